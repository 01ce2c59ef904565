"""Entropy coding: a round trip always, near the entropy, and damage is an error or integers."""

import zlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpcomp.entropy import LARGEST, decode, encode, max_bytes
from mpcomp.entropy.classes import Classes
from mpcomp.entropy.message import Place


def assert_comes_back(q: NDArray[np.int16]) -> NDArray[np.uint8]:
    """The coded form, after its checks."""
    before = q.copy()
    coded = encode(q)
    assert coded.dtype == np.uint8 and coded.ndim == 1
    assert len(coded) <= max_bytes(*q.shape)
    found = decode(coded, *q.shape)
    assert found.dtype == np.int16 and found.shape == q.shape
    assert np.array_equal(found, q) and np.array_equal(q, before)
    return coded


def entropy(symbols: NDArray[np.int16]) -> float:
    """Bits of all symbols by how often each occurs."""
    _, counts = np.unique(symbols, return_counts=True)
    return float(-(counts * np.log2(counts / symbols.size)).sum())


def gaussian(rng: np.random.Generator, shape: tuple[int, ...], size: float) -> NDArray[np.int16]:
    """Rounded Gaussian numbers."""
    return np.rint(rng.standard_normal(shape) * size).astype(np.int16)


CONTENTS = {
    "zeros": lambda rng, shape: np.zeros(shape),
    "alike": lambda rng, shape: np.full(shape, rng.integers(-LARGEST, LARGEST + 1)),
    "alternating": lambda rng, shape: np.where(np.indices(shape).sum(0) % 2, 5, -5),
    "any": lambda rng, shape: rng.integers(-LARGEST, LARGEST + 1, shape),
    "small": lambda rng, shape: rng.integers(-2, 3, shape),
    "sparse": lambda rng, shape: (rng.random(shape) < 0.003) * rng.integers(-300, 301, shape),
    "gaussian": lambda rng, shape: rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 9),
    "heavy": lambda rng, shape: rng.standard_cauchy(shape) * 20,
    "rows": lambda rng, shape: (
        rng.standard_normal(shape) * np.exp2(rng.uniform(-9, 9, shape[0]))[:, None]
    ),
    "columns": lambda rng, shape: (
        rng.standard_normal(shape) * np.exp2(rng.uniform(-9, 9, shape[1]))
    ),
    "behind a ReLU": lambda rng, shape: np.maximum(rng.standard_normal(shape) * 3, 0),
    "one": lambda rng, shape: np.arange(np.prod(shape)).reshape(shape) == 0,
    "edges": lambda rng, shape: (
        rng.choice([0, 1, 254, 255, 256, LARGEST], shape) * rng.choice([-1, 1], shape)
    ),
}


def content(name: str, shape: tuple[int, int], seed: int = 0) -> NDArray[np.int16]:
    """Integers of a kind, magnitudes up to `LARGEST`."""
    made = CONTENTS[name](np.random.default_rng(seed), shape)
    return np.clip(np.rint(made), -LARGEST, LARGEST).astype(np.int16)


@given(
    rows=st.integers(0, 90),
    columns=st.integers(0, 90),
    name=st.sampled_from(sorted(CONTENTS)),
    seed=st.integers(0, 99),
)
@example(rows=0, columns=0, name="zeros", seed=0)
def test_integers_come_back(rows, columns, name, seed):
    assert_comes_back(content(name, (rows, columns), seed))


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 9000), (9000, 1), (80, 120), (700, 8), (2, 4096)])
def test_integers_of_every_kind_and_shape_come_back(name, shape):
    """Below and above the size from which on there are several contexts."""
    assert_comes_back(content(name, shape))


def test_memory_order_is_not_seen():
    q = content("columns", (120, 80))
    assert np.array_equal(encode(np.asfortranarray(q)), encode(q))
    assert np.array_equal(encode(np.repeat(q, 2, axis=1)[:, ::2]), encode(q))


@pytest.mark.parametrize("size", [0.5, 2, 6])
def test_size_is_the_entropy_of_magnitudes_and_a_bit_a_sign(size):
    """No more than 3 % above it, tables and classes included."""
    q = gaussian(np.random.default_rng(0), (1024, 576), size)
    least = (entropy(np.abs(q)) + np.count_nonzero(q)) / 8
    assert least * 0.99 <= len(assert_comes_back(q)) <= least * 1.03


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_and_columns_that_differ_cost_less_than_their_mixture(axis):
    """Below the entropy of elements that know nothing of their row and column."""
    rng = np.random.default_rng(0)
    shape = [1, 1]
    shape[axis] = (1024, 576)[axis]
    spread = np.exp2(rng.uniform(-3, 3, shape))
    q = np.rint(rng.standard_normal((1024, 576)) * spread).astype(np.int16)
    assert len(assert_comes_back(q)) < 0.93 * entropy(q) / 8


@pytest.mark.parametrize("axis", [0, 1])
def test_a_row_or_column_of_zeros_leaves_the_others_their_contexts(axis):
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-2, 2, (256, 1)) + rng.uniform(-2, 2, 256))
    q = np.rint(rng.standard_normal((256, 256)) * spread * 0.3).astype(np.int16)
    without = len(assert_comes_back(q))
    first = np.zeros_like(q.take([0], axis))
    assert len(assert_comes_back(np.concatenate([first, q], axis))) < 1.01 * without


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_a_vector_that_differ_cost_less_than_their_mixture(axis):
    """As gradients of samples do, of which those at known positions are sent."""
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-3, 3, 30)).repeat(3000)
    q = np.expand_dims(np.rint(rng.standard_normal(90000) * spread).astype(np.int16), axis)
    assert len(assert_comes_back(q)) < 0.93 * entropy(q) / 8


def test_noise_of_many_bits_is_sent_as_it_is():
    q = content("any", (50, 60))
    coded = assert_comes_back(q)
    assert len(coded) == max_bytes(50, 60) == 1 + 2 * 3000
    assert coded[1:].tobytes() == q.astype("<i2").tobytes()


def test_zeros_cost_a_few_bytes_whatever_the_size():
    sizes = {len(assert_comes_back(np.zeros(shape, np.int16))) for shape in ((9, 9), (900, 1100))}
    assert sizes.pop() < 20 and not sizes
    few = np.zeros((1000, 1000), np.int16)
    few[3, 5], few[700, 800] = 1, -9
    assert len(assert_comes_back(few)) < 60


#: Of a single context, and of several with magnitudes that follow by themselves.
FIXED = np.array([[0, 1, -1, 0, 2, 0, 0, -3, 0, 0] * 4] * 4, np.int16)
ROW, COLUMN = np.indices((72, 60))
STEEP = ((ROW * 7 + COLUMN * 13 + ROW * COLUMN) % 11 - 5) * 2 ** (COLUMN // 8)


def test_coded_bytes_stay_as_they_are():
    """Ranks of two versions of the library understand each other as long as this holds."""
    assert bytes(encode(FIXED)).hex() == (
        "0401000000002403b99127e7b991b991b991b991b991b991b991b991b991b991b991b991b991ee96d094aaaa"
        "aaaaaaaaaaaa"
    )
    coded = assert_comes_back(STEEP.astype(np.int16))
    assert coded[0] == 4
    assert (len(coded), zlib.crc32(coded.tobytes())) == (3502, 1152253232)


# -- images ----------------------------------------------------------------------------------------

IMAGE, Y, X, CHANNEL = np.indices((4, 16, 12, 8))
SMOOTH = (3 * Y + (4 + IMAGE) * X + (Y * X * (CHANNEL + 1) + CHANNEL) % 5) // 4 - 2 * CHANNEL
IMAGES = {
    "signed": SMOOTH.reshape(-1, 8).astype(np.int16),
    "behind a ReLU": SMOOTH.clip(0).reshape(-1, 8).astype(np.int16),
    "of fine steps": 30 * SMOOTH.reshape(-1, 8).astype(np.int16),
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("image", [(16, 12), (1, 64), (64, 1), (1, 1), (2, 3)])
def test_images_of_every_kind_come_back(name, image):
    q = content(name, (192, 24))
    coded = encode(q, image)
    assert np.array_equal(decode(coded, *q.shape, image), q)
    assert len(coded) <= len(encode(q)) + 16  # estimates of what takes less are off by little


@pytest.mark.parametrize(
    ("name", "kind"), [("signed", 6), ("behind a ReLU", 7), ("of fine steps", 6)]
)
def test_neighbours_that_are_alike_save_bytes(name, kind):
    q = IMAGES[name]
    coded = encode(q, (16, 12))
    assert coded[0] == kind and np.array_equal(decode(coded, *q.shape, (16, 12)), q)
    assert len(coded) < 0.75 * len(encode(q))


def test_noise_is_coded_by_classes():
    q = gaussian(np.random.default_rng(0), (192, 64), 1.5)
    assert encode(q, (16, 12)).tobytes() == encode(q).tobytes()


@pytest.mark.parametrize(
    ("name", "checksum"), [("signed", (1431, 4101045403)), ("behind a ReLU", (1255, 4219345518))]
)
def test_coded_bytes_of_images_stay_as_they_are(name, checksum):
    coded = encode(IMAGES[name], (16, 12))
    assert (len(coded), zlib.crc32(coded.tobytes())) == checksum


def test_images_are_refused_where_none_are_expected():
    coded = encode(IMAGES["signed"], (16, 12))
    with pytest.raises(RuntimeError, match="kind 6.*damaged, or the two ends have different"):
        decode(coded, *IMAGES["signed"].shape)
    coded[1:27] = 0
    with pytest.raises(RuntimeError, match="no contexts"):
        decode(coded, *IMAGES["signed"].shape, (16, 12))


# -- dither ----------------------------------------------------------------------------------------


def offsets(rows: int, columns: int) -> NDArray[np.int8]:
    """Eighths of a dither."""
    row, column = np.indices((rows, columns))
    return ((row * 5 + column * 3 + row * column) % 8 - 4).astype(np.int8)


def dithered(
    rng: np.random.Generator, shape: tuple[int, int], size: float
) -> tuple[NDArray[np.int16], NDArray[np.int8]]:
    """Rounded Gaussian numbers, and the eighths of the dither that they were rounded under."""
    eighths = offsets(*shape)
    v = (eighths + rng.random(shape)) / 8
    return np.rint(rng.standard_normal(shape) * size + v).astype(np.int16), eighths


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("shape", [(1, 1), (9, 30), (192, 24), (1, 9001), (5000, 1), (0, 7)])
def test_integers_of_every_kind_come_back_under_a_dither(name, shape):
    q, eighths = content(name, shape), offsets(*shape)
    coded = encode(q, None, eighths)
    assert np.array_equal(decode(coded, *shape, None, eighths), q)
    assert len(coded) <= len(encode(q)) + 16


@pytest.mark.parametrize(("size", "share"), [(0.2, 0.75), (0.5, 0.9), (1.0, 0.98), (4.0, 1.01)])
def test_a_dither_tells_of_integers_by_as_much_as_it_moved_them(size, share):
    q, eighths = dithered(np.random.default_rng(0), (512, 128), size)
    coded = encode(q, None, eighths)
    assert np.array_equal(decode(coded, *q.shape, None, eighths), q)
    assert len(coded) <= share * len(encode(q))


@pytest.mark.parametrize("shape", [(64, 80), (1, 5000)])
def test_what_a_dither_told_is_refused_without_it(shape):
    q, eighths = dithered(np.random.default_rng(0), shape, 0.4)
    coded = encode(q, None, eighths)
    with pytest.raises(RuntimeError, match="kind 8.*damaged, or the two ends have different"):
        decode(coded, *shape)
    other = np.where(eighths < 0, eighths, 3 - eighths).astype(np.int8)
    assert_refused_or_integers(coded, *shape, other)


def test_images_under_a_dither_are_coded_by_what_takes_least():
    """Smooth ones by their neighbours, noise by the dither."""
    smooth, noise = IMAGES["signed"], dithered(np.random.default_rng(0), (768, 8), 0.5)
    for q, eighths, kind in ((smooth, offsets(*smooth.shape), 6), (*noise, 8)):
        coded = encode(q, (16, 12), eighths)
        assert coded[0] == kind
        assert np.array_equal(decode(coded, *q.shape, (16, 12), eighths), q)


def test_coded_bytes_under_a_dither_stay_as_they_are():
    q = (STEEP // 16 + offsets(*STEEP.shape) // 4).astype(np.int16)
    coded = encode(q, None, offsets(*STEEP.shape))
    assert coded[0] == 8
    assert (len(coded), zlib.crc32(coded.tobytes())) == (1938, 2596635034)


# -- damage ----------------------------------------------------------------------------------------

DAMAGED = {
    "single context": content("gaussian", (13, 17)),
    "escapes": content("heavy", (40, 20)),
    "contexts": content("columns", (70, 60)),
    "rows": content("rows", (300, 20)),
    "plain": content("any", (6, 5)),
    "zeros": np.zeros((8, 8), np.int16),
    **IMAGES,
    "under a dither": dithered(np.random.default_rng(1), (64, 80), 0.7)[0],
}


def coded_of(name: str) -> NDArray[np.uint8]:
    """The coded form of such integers."""
    q = DAMAGED[name]
    eighths = offsets(*q.shape) if name == "under a dither" else None
    return encode(q, (16, 12) if name in IMAGES else None, eighths)


def assert_refused_or_integers(
    coded: NDArray[np.uint8], rows: int, columns: int, eighths: NDArray[np.int8] | None = None
) -> bool:
    """Whether it was refused; what was not has the right shape and magnitudes."""
    eighths = offsets(rows, columns) if eighths is None else eighths
    try:
        found = decode(coded, rows, columns, (16, 12), eighths)
    except RuntimeError:
        return True
    assert found.shape == (rows, columns) and found.dtype == np.int16
    assert not found.size or np.abs(found.astype(np.int32)).max() <= LARGEST
    return False


@pytest.mark.parametrize("name", DAMAGED)
def test_what_was_cut_short_or_is_too_long_is_refused(name):
    """Every length; of long messages every one near its ends, and some between."""
    q = DAMAGED[name]
    coded = coded_of(name)
    n = len(coded)
    for end in {*range(min(n, 200)), *range(200, n, 31), *range(max(0, n - 50), n)}:
        assert assert_refused_or_integers(coded[:end], *q.shape)
    for more in (1, 3, 4, 400):
        longer = np.concatenate([coded, np.full(more, 7, np.uint8)])
        assert_refused_or_integers(longer, *q.shape)


@pytest.mark.parametrize("name", DAMAGED)
def test_flipped_bits(name):
    """Every bit of the first bytes, and those of bytes anywhere; up to three at a time."""
    q = DAMAGED[name]
    coded, rng = coded_of(name), np.random.default_rng(0)
    for bit in range(8 * min(len(coded), 60)):
        hurt = coded.copy()
        hurt[bit // 8] ^= 1 << (bit % 8)
        assert_refused_or_integers(hurt, *q.shape)
    for _ in range(300):
        hurt = coded.copy()
        for at in rng.integers(len(coded), size=rng.integers(1, 4)):
            hurt[at] ^= 1 << rng.integers(8)
        assert_refused_or_integers(hurt, *q.shape)


@pytest.mark.parametrize("name", DAMAGED)
def test_overwritten_bytes(name):
    """Runs of equal or random bytes over any region."""
    q = DAMAGED[name]
    coded, rng = coded_of(name), np.random.default_rng(0)
    for turn in range(300):
        hurt = coded.copy()
        start = rng.integers(len(coded))
        run = hurt[start : start + rng.integers(1, 40)]
        run[:] = (0, 255)[turn % 2] if turn % 3 else rng.integers(0, 256, len(run))
        assert_refused_or_integers(hurt, *q.shape)


def test_random_bytes():
    rng = np.random.default_rng(0)
    for turn in range(1500):
        hurt = rng.integers(0, 256, rng.integers(0, 120), dtype=np.uint8)
        if turn % 2 and len(hurt) > 20:  # so that the first checks let it pass
            kind = (4, 8)[turn // 2 % 2]
            hurt[:8] = kind, 1, 0, 0, 0, 0, rng.integers(0, 160), rng.integers(0, 9)
        assert_refused_or_integers(hurt, *(int(n) for n in rng.integers(0, 40, 2)))


@pytest.mark.parametrize("name", DAMAGED)
def test_a_message_of_another_shape(name):
    q = DAMAGED[name]
    coded = coded_of(name)
    rows, columns = q.shape
    for shape in ((columns, rows), (rows + 1, columns), (rows, 1), (1, 1), (0, 5), (3000, 30)):
        assert_refused_or_integers(coded, *shape)


def test_errors_say_what_may_be_wrong():
    with pytest.raises(RuntimeError, match="empty message"):
        decode(np.zeros(0, np.uint8), 2, 2)
    with pytest.raises(RuntimeError, match="kind 9.*damaged, or the two ends have different"):
        decode(np.full(9, 9, np.uint8), 2, 2)
    with pytest.raises(RuntimeError, match="5 bytes, expected 9"):
        decode(np.zeros(5, np.uint8), 2, 2)


def test_integers_that_are_sent_as_they_are_have_magnitudes_up_to_the_largest():
    """-2^15 is none that an encoder sends."""
    assert_refused_or_integers(np.array([0, 0, 0x80], np.uint8), 1, 1)


def test_no_signs_are_sent_where_none_is_negative():
    rng = np.random.default_rng(0)
    half = np.maximum(gaussian(rng, (512, 64), 2.0), 0)
    assert 8 * len(assert_comes_back(half)) < 1.02 * entropy(half) + 8 * 200
    one_negative = half.copy()
    one_negative[3, 5] = -1
    signs = np.count_nonzero(half) / 8
    more = len(assert_comes_back(one_negative)) - len(assert_comes_back(half))
    assert 0.95 * signs < more < 1.05 * signs


def test_places_that_messages_share_are_not_changed():
    rng, shape = np.random.default_rng(0), (33, 47)
    shared = [
        Classes.single(*shape).place(),
        *(Place.alike(n, each) for n, each in enumerate(shape)),
    ]
    before = [[part.copy() for part in place] for place in shared]
    for content in CONTENTS.values():
        assert_comes_back(content(rng, shape).astype(np.int16))
    assert Place.alike(0, shape[0]) is shared[1]
    for place, parts in zip(shared, before, strict=True):
        assert all(map(np.array_equal, place, parts))
