"""Mistakes that several ranks would make without a word, each of them by itself."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows
from ranks import preload

import mpcomp

preload("test_ranks_mistakes")


def pipe_of(loss_fn=F.cross_entropy, model=None):
    torch.manual_seed(0)
    return mpcomp.pipeline(model or mlp(), 2, split=MLP_SPLIT[:1], loss_fn=loss_fn, timeout=60.0)


def detached(output, target):
    return F.cross_entropy(output.detach(), target)


def infinite(output, target):
    return F.cross_entropy(output, target) / 0


def raised(call):
    with pytest.raises(Exception) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def mistakes(folder):
    found = {}
    torch.manual_seed(0)
    model = mlp()
    pipe = pipe_of(model=model)
    found["model"] = raised(model.state_dict)
    with torch.inference_mode():
        found["inference mode"] = raised(lambda: pipe.forward_backward(*rows(6)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.save(folder)  # whose parts are meant
        pipe.load(folder)
        whole = pipe.merge()
        assert not caught
        parts = [pipe.state_dict() for _ in range(2)]
    found["pipe"] = [str(each.message) for each in caught]
    assert set(parts[0]) < set(whole.state_dict())
    assert not whole._state_dict_hooks  # nothing of ours goes into a file with it
    frozen = mlp()
    frozen[0].requires_grad_(False)
    frozen[1].requires_grad_(False)
    found["infinite"] = raised(lambda: pipe_of(infinite, frozen).forward_backward(*rows(6)))
    found["detached"] = raised(lambda: pipe_of(detached).forward_backward(*rows(6)))
    return found


def test_mistakes_of_all_ranks(ranks, tmp_path):
    first, last = ranks(mistakes, 2, str(tmp_path / "checkpoint"))
    for rank, found in enumerate((first, last)):
        kind, message = found["model"]
        assert kind == "ValueError" and "trained on other ranks" in message
        assert "pipe.merge()" in message and "pipe.save(folder)" in message
        assert "under torch.inference_mode()" in found["inference mode"][1]
        (message,) = found["pipe"]
        assert f"rank {rank} of 2 is the part" in message and "pipe.merge()" in message
        kind, message = found["infinite"]
        assert kind == "FloatingPointError" and "the loss of step 0 is NaN or Inf" in message
        assert "the loss has no gradient" in found["detached"][1]
    assert first["detached"][0] == "PeerError" and last["detached"][0] == "ValueError"
