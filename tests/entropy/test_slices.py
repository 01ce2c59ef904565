"""Millions of integers, which are coded in slices of their rows."""

import numpy as np
import pytest
import torch

from mpcomp import entropy
from mpcomp.core import threads

ROWS, COLUMNS, SIDES = 96, 40, (4, 6)


@pytest.fixture
def _small_slices(monkeypatch):
    monkeypatch.setattr(threads, "_ELEMENTS", 500)


def integers(scale=3.0):
    rng = np.random.default_rng(0)
    return np.rint(rng.standard_normal((ROWS, COLUMNS)) * scale).astype(np.int16)


def smooth():
    """Images, whose pixels are alike."""
    across = np.add.outer(np.arange(ROWS), np.arange(COLUMNS)) % 50
    return across.astype(np.int16)


OFFSETS = np.random.default_rng(1).integers(-4, 4, (ROWS, COLUMNS)).astype(np.int8)
CASES = {
    "integers": (integers(), None, None),
    "large ones": (integers(3000), None, None),
    "zeros": (np.zeros((ROWS, COLUMNS), np.int16), None, None),
    "images": (smooth(), SIDES, None),
    "a dither": (integers(0.4), None, OFFSETS),
    "a vector": (np.tile(integers(), 3).reshape(1, -1), None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_encoded_is_decoded_on_any_number_of_threads(name, monkeypatch, _small_slices):
    q, image, offsets = CASES[name]
    messages = []
    for num_threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        messages.append(entropy.encode(q, image, offsets))
        assert np.array_equal(entropy.decode(messages[-1], *q.shape, image, offsets), q)
    assert np.array_equal(*messages), "the bytes do not hang on the machine"
    assert messages[0][0] == (0 if name == "large ones" else 9)
    assert len(messages[0]) <= entropy.max_bytes(*q.shape)


def test_millions_are_coded_in_slices():
    q = np.tile(integers(), (600, 1))
    whole = entropy.encode(q)
    assert whole[0] == 9 and len(whole) < q.size / 2
    assert np.array_equal(entropy.decode(whole, *q.shape), q)
    one = entropy.encode(q[: len(q) // 2])
    assert one[0] != 9 and len(whole) == pytest.approx(2 * len(one), rel=0.01)


def test_a_message_that_is_damaged_is_said(_small_slices):
    q, image, offsets = CASES["integers"]
    message = entropy.encode(q, image, offsets)
    longer, elsewhere = message.copy(), message.copy()
    longer[1:5].view("<u4")[:] += 1
    elsewhere[0] = 4
    for damaged in (longer, elsewhere, message[:-1], message[:3], message[:1]):
        with pytest.raises(RuntimeError, match="damaged"):
            entropy.decode(damaged, *q.shape)
    none = np.concatenate([message[:1], np.zeros_like(message[1:])])
    with pytest.raises(RuntimeError, match="damaged"):
        entropy.decode(none, *q.shape)


def test_few_integers_are_in_no_slices():
    q = integers()
    with pytest.raises(RuntimeError, match="kind 9"):
        entropy.decode(np.array([9, 1, 0, 0, 0, 0], np.uint8), *q.shape)
