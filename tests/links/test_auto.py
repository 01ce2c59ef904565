"""Words in place of a spec: ``auto``, ``auto:scratch``, ``auto:relu`` and ``auto:memory``."""

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows

import mpcomp
from mpcomp.links.auto import AUTO
from mpcomp.links.build import method_of


def methods(**kwargs):
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, loss_fn=F.cross_entropy, **kwargs)
    return pipe, [str(link.method) for link in pipe.links]


@pytest.mark.parametrize("word", AUTO)
def test_they_are_what_their_specs_say(word):
    pipe, found = methods(act_comp=word, grad_comp=word)
    _, named = methods(**AUTO[word])
    assert found == named
    ids = range(10) if word == "auto:memory" else None
    assert torch.isfinite(pipe.forward_backward(*rows(10), sample_ids=ids))


def test_only_one_remembers():
    for argument in ("act_comp", "grad_comp"):
        assert isinstance(method_of(argument, "auto"), mpcomp.Compressor)
    assert method_of("act_comp", "auto:memory").by_sample


def test_for_one_cut_of_several():
    _, found = methods(act_comp=[None, "auto"])
    assert found == ["none", "none", AUTO["auto"]["act_comp"].replace("true", "True"), "none"]


def test_a_tie_has_none():
    with pytest.raises(ValueError, match="tie_comp='auto': only act_comp and grad_comp can be"):
        method_of("tie_comp", "auto")


def test_a_word_that_is_none():
    with pytest.raises(ValueError, match="unknown method 'auto'"):
        method_of("act_comp", "auto:everything")
