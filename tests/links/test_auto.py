"""Words in place of a spec: ``auto``, ``auto:scratch``, ``auto:relu`` and ``auto:memory``."""

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows

import mpcomp
from mpcomp.links.auto import AUTO, BEFORE_HEAD, TIE_COMP
from mpcomp.links.build import method_of


def methods(**kwargs):
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, loss_fn=F.cross_entropy, **kwargs)
    return pipe, [str(link.method) for link in pipe.links]


@pytest.mark.parametrize("word", AUTO)
def test_they_are_what_their_specs_say(word):
    _, named = methods(**AUTO[word])
    if word == "auto":  # which a pipeline may take another for: tests/pilot/test_dial.py
        assert [str(method_of(name, word)) for name in AUTO[word]] == named[:2]
        return
    pipe, found = methods(act_comp=word, grad_comp=word)
    assert found == named
    ids = range(10) if word == "auto:memory" else None
    assert torch.isfinite(pipe.forward_backward(*rows(10), sample_ids=ids))


def test_only_one_remembers():
    for argument in ("act_comp", "grad_comp"):
        assert isinstance(method_of(argument, "auto"), mpcomp.Compressor)
    assert method_of("act_comp", "auto:memory").by_sample


def test_for_one_cut_of_several():
    _, found = methods(act_comp=[None, "auto:scratch"])
    expected = AUTO["auto:scratch"]["act_comp"].replace("true", "True")
    assert found == ["none", "none", expected, "none"]


@pytest.mark.parametrize("ties", ["together", "apart"])
def test_memory_is_another_before_a_head_with_a_stage_of_its_own(ties):
    lms = pytest.importorskip("lms")
    words = dict.fromkeys(("act_comp", "grad_comp"), "auto:memory")
    pipe = mpcomp.pipeline(lms.gpt2(), 2, split=2, ties=ties, **words)
    names = [AUTO["auto:memory"]] + [BEFORE_HEAD["auto:memory"]] * (ties == "together")
    expected = [str(mpcomp.parse(spec)) for pair in names for spec in pair.values()]
    assert [str(link.method) for link in pipe.links][: len(expected)] == expected
    ids = torch.randint(3, lms.VOCABULARY, (4, 8))
    for _ in range(2):
        loss = pipe.forward_backward({"input_ids": ids, "labels": ids}, sample_ids=range(4))
        assert torch.isfinite(loss)


CHOICES = {
    "a word": ({"act_comp": "auto", "grad_comp": "auto"}, TIE_COMP),
    "a word one way": ({"grad_comp": "auto:scratch"}, TIE_COMP),
    "a word at one cut": ({"act_comp": [None, "auto"]}, TIE_COMP),
    "a word by a cut's number": ({"act_comp": {1: "auto:relu"}}, TIE_COMP),
    "memory": ({"act_comp": "auto:memory", "grad_comp": "auto:memory"}, TIE_COMP),
    "no word": ({"act_comp": "topk:0.1", "grad_comp": "quant:4"}, "none"),
    "nothing": ({}, "none"),
    "a method is given": ({"act_comp": "auto", "tie_comp": "quant:8"}, "quant:8"),
    "none is given": ({"act_comp": "auto", "tie_comp": "none"}, "none"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_a_word_at_the_cuts_chooses_for_ties_too(case):
    lms = pytest.importorskip("lms")
    given, expected = CHOICES[case]
    pipe = mpcomp.pipeline(lms.gpt2(), 2, split=3, ties="apart", **given)
    assert {str(link.method) for tie in pipe.ties for link in tie.links} == {expected}


def test_what_a_tie_does_not_send_at_once_it_sends_later():
    """Over the steps that a gradient does not change in, its mean arrives."""
    lms = pytest.importorskip("lms")
    torch.manual_seed(0)
    made = {"split": 2, "ties": "apart"}
    pipe = mpcomp.pipeline(lms.gpt2(), 1, act_comp={0: "auto"}, **made).train()
    plain = mpcomp.pipeline(lms.gpt2(), 1, **made).train()
    plain.load_state_dict(pipe.state_dict())
    ids = torch.randint(3, lms.VOCABULARY, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    name = "transformer.wte.weight"
    errors = []
    for num_steps in (1, 16):
        means = []
        for each in (pipe, plain):
            each.zero_grad()
            for _ in range(num_steps):
                with each.compressed(act=False, grad=True):
                    each.forward_backward(batch)
            means.append(dict(each.named_parameters())[name].grad / num_steps)
        errors.append(float((means[0] - means[1]).norm() / means[1].norm()))
    assert 0 < errors[1] < errors[0] / 4


def test_no_tie_needs_no_method():
    pipe, _ = methods(act_comp="auto", grad_comp="auto")
    assert not pipe.ties


def test_a_tie_has_none():
    with pytest.raises(ValueError, match="tie_comp='auto': only act_comp and grad_comp can be"):
        method_of("tie_comp", "auto")


def test_a_word_that_is_none():
    with pytest.raises(ValueError, match="unknown method 'auto'"):
        method_of("act_comp", "auto:everything")
