"""Bytes that are counted are those that the coder takes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpcomp import entropy
from mpcomp.core import threads
from mpcomp.entropy import neighbours

#: Bytes that four states of a coder may be off the mean.
STATES = 8


def drawn(kind: str, scale: float, rows: int, columns: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * scale
    if kind == "classes":
        x *= np.exp(rng.standard_normal((rows, 1))) * np.exp(rng.standard_normal(columns))
    if kind == "smooth":
        x = np.cumsum(x, axis=0)
    if kind == "sparse":
        x *= rng.random((rows, columns)) < 0.05
    if kind == "positive":
        x = np.maximum(x, 0)
    return np.rint(x).clip(-entropy.LARGEST, entropy.LARGEST).astype(np.int16)


def check(q: np.ndarray, image=None, offsets=None):
    coded = len(entropy.encode(q, image, offsets))
    there = None if offsets is None else torch.from_numpy(offsets)
    counted = entropy.count_bytes(torch.from_numpy(q), image, there)
    assert counted == pytest.approx(coded, rel=0.005, abs=STATES)
    assert counted <= entropy.max_bytes(*q.shape)


@given(
    kind=st.sampled_from(["plain", "classes", "smooth", "sparse", "positive"]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0, 1000.0]),
    shape=st.sampled_from([(1, 1), (3, 5), (96, 64), (1, 9000), (500, 20)]),
    seed=st.integers(0, 9),
)
def test_integers(kind, scale, shape, seed):
    check(drawn(kind, scale, *shape, seed))


@given(
    kind=st.sampled_from(["plain", "smooth", "positive"]),
    scale=st.sampled_from([0.2, 3.0, 300.0, 3000.0]),
    sides=st.sampled_from([(1, 1), (4, 6), (16, 1), (8, 8)]),
    dithered=st.booleans(),
    seed=st.integers(0, 9),
)
def test_images(kind, scale, sides, dithered, seed):
    rows = 3 * sides[0] * sides[1] * max(1, 64 // (sides[0] * sides[1]))
    q = drawn(kind, scale, rows, 24, seed)
    offsets = np.random.default_rng(seed).integers(-4, 4, q.shape).astype(np.int8)
    check(q, sides, offsets if dithered else None)


@pytest.mark.parametrize("scale", [0.1, 0.5, 3.0, 200.0])
def test_under_a_dither(scale):
    rng = np.random.default_rng(0)
    v = rng.random((128, 96)) - 0.5
    q = np.rint(rng.standard_normal(v.shape) * scale + v).astype(np.int16)
    check(q, None, np.floor(entropy.PARTS * v).astype(np.int8))


@pytest.mark.parametrize("kind", ["plain", "classes", "sparse", "positive"])
def test_in_lanes(kind):
    q = drawn(kind, 3.0, 512, 300, 0)
    coded = entropy.encode(q, in_lanes=True)
    counted = entropy.count_bytes(torch.from_numpy(q), in_lanes=True)
    assert coded[0] == 10 or kind in ("classes", "sparse")
    assert counted == pytest.approx(len(coded), rel=0.005)
    v = np.random.default_rng(1).random(q.shape) - 0.5
    q, eighths = np.rint(q / 4 + v).astype(np.int16), np.floor(8 * v).astype(np.int8)
    coded = entropy.encode(q, None, eighths, in_lanes=True)
    there = torch.from_numpy(q), None, torch.from_numpy(eighths)
    counted = entropy.count_bytes(*there, in_lanes=True)
    assert coded[0] in (8, 10) and counted == pytest.approx(len(coded), rel=0.005)


def test_in_slices(monkeypatch):
    monkeypatch.setattr(threads, "_ELEMENTS", 5000)
    check(drawn("classes", 3.0, 400, 64, 0))
    check(drawn("positive", 3.0, 12 * 48, 64, 0), (6, 8))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("sides", [(1, 1), (1, 5), (5, 1), (4, 6)])
def test_what_is_expected_of_whole_images_is_what_the_coder_expects(sides, signed):
    q = drawn("smooth" if signed else "positive", 9.0, 7 * sides[0] * sides[1], 5, 1)
    symbols, pixels, sizes = neighbours.symbols_of(q, *sides, signed)
    images = torch.from_numpy(q.astype(np.int64)).reshape(7, *sides, 5)
    expected, contexts = neighbours.expect_all(images)
    assert np.array_equal(contexts.reshape(len(q), 5), pixels[:, None].astype(int) + sizes)
    d = q - expected.reshape(len(q), 5).numpy()
    folded = 2 * np.abs(d) - (d < 0)
    plain = ~signed & (np.abs(d) > expected.reshape(len(q), 5).numpy())
    assert np.array_equal(symbols, np.where(plain, q, folded))
