"""Measured coding: messages as the library sends them, and times that are times."""

from __future__ import annotations

import pytest
import torch

import mpcomp
from mpcomp.plan import measure_coding

pytestmark = pytest.mark.usefixtures("_no_walk_through_memory")

X = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("act", "grad"),
    [
        ("none", None),
        ("quant:4", "topk:0.1+fp16"),
        ("topk:0.1", "same"),
        ("ef21+topk:0.1", "ef+topk:0.1"),
        ("auto:memory", "auto:memory"),
    ],
)
def test_messages_are_those_of_a_pipeline(act: str, grad: str | None) -> None:
    coding, sent = measure_coding(act, grad, X, X, repeats=2)
    assert all(seconds > 0 for seconds in coding)
    assert 0 < sent.act_bytes <= X.nbytes + 16
    assert 0 < sent.grad_bytes <= X.nbytes + 16


def test_a_fixed_length_is_the_layouts() -> None:
    meta = mpcomp.TensorMeta.of(X)
    _, dense = measure_coding("none", "none", X, X, repeats=1)
    header = dense.act_bytes - X.nbytes
    _, sent = measure_coding("quant:4", "topk:0.1+fp16", X, X, repeats=1)
    assert sent == (
        header + mpcomp.parse("quant:4").wire_bytes(meta),
        header + mpcomp.parse("topk:0.1+fp16").wire_bytes(meta),
    )


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="repeats is 0"):
        measure_coding("none", "none", X, X, repeats=0)
    with pytest.raises(ValueError, match="topq"):
        measure_coding("topq:1", "none", X, X)
