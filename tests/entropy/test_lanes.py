"""Integers in lanes: round trips, the format by a decoder of its own, bytes, and damage."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_entropy import CONTENTS, DAMAGED, content, dithered, gaussian, offsets

from mpcomp import entropy
from mpcomp.core import threads
from mpcomp.entropy import ans, lanes, tallies
from mpcomp.entropy.classes import Classes, read
from mpcomp.entropy.message import Reader

SHAPES = [(1, 1), (1, 9000), (9000, 1), (80, 120), (700, 8), (2, 4096), (33, 31), (5, 32)]


@pytest.fixture
def _always(monkeypatch):
    """Lanes for integers of any number, whatever they take."""
    monkeypatch.setattr(lanes, "MANY", 1)
    monkeypatch.setattr(lanes, "_MOST", np.inf)


@pytest.fixture
def _small_blocks(monkeypatch):
    monkeypatch.setattr(lanes, "_LEAST", lanes._SMALLEST_BLOCK)
    monkeypatch.setattr(lanes, "_LARGEST", lanes._SMALLEST_BLOCK)


def coded_in_lanes(q, eighths=None):
    """The parts of a message but for its kind."""
    return lanes.encode(tensor(q), tensor(eighths))


def tensor(array):
    return None if array is None else torch.from_numpy(array)


def assert_comes_back(q, eighths=None):
    """The coded form, after its checks."""
    before = q.copy()
    coded = entropy.encode(q, None, eighths, in_lanes=True)
    assert len(coded) <= entropy.max_bytes(*q.shape)
    assert np.array_equal(entropy.decode(coded, *q.shape, None, eighths), q)
    assert np.array_equal(q, before)
    return coded


@given(
    rows=st.integers(0, 90),
    columns=st.integers(0, 90),
    name=st.sampled_from(sorted(CONTENTS)),
    seed=st.integers(0, 99),
    under_a_dither=st.booleans(),
    k=st.integers(10, 15),
)
def test_integers_come_back(rows, columns, name, seed, under_a_dither, k):
    q = content(name, (rows, columns), seed)
    with pytest.MonkeyPatch.context() as patch:
        for what, value in (("MANY", 1), ("_MOST", np.inf), ("_LEAST", k), ("_LARGEST", k)):
            patch.setattr(lanes, what, value)
        assert_comes_back(q, offsets(rows, columns) if under_a_dither else None)


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_of_every_kind_and_shape_come_back(name, shape, _always, _small_blocks):
    for eighths in (None, offsets(*shape)):
        coded = assert_comes_back(content(name, shape), eighths)
        if shape[0] * shape[1] > 4096 and name == "small":
            assert coded[0] == 10


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_bytes_do_not_hang_on_the_machine(num_threads, monkeypatch):
    """Nor on the slices in which integers are counted."""
    q = gaussian(np.random.default_rng(0), (2000, 70), 3.0)
    one = assert_comes_back(q)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(threads, "_ELEMENTS", 5000)
    assert one[0] == 10 and np.array_equal(assert_comes_back(q), one)


def said(coded, rows, columns, eighths=None):
    """The integers of a message, by the description of the format: a state a Python integer."""
    reader = Reader(coded)
    flag, k = map(int, reader.array("u1", 2))
    classes, costs, coder = read(reader, rows, columns, 4 if flag == 2 else 1, in_lanes=True)
    coder.check_end()
    (count,) = map(int, reader.array("<u4", 1))
    places, values = reader.array("<u4", count).tolist(), reader.array("<i2", count).tolist()
    assert not reader.array("u1", -reader.at % 4).any()
    step = max(1, round(2**k / columns))
    starts = range(0, rows, step)
    lengths = reader.array("<u4", len(starts)).tolist()
    states = reader.array("<u4", 32 * len(starts)).tolist()
    words = iter(reader.array("<u2", sum(lengths)).tolist())
    by_table = lanes._of_symbols(lanes._frequencies(costs[2:], flag), flag)
    assert (by_table.sum(1) == 4096).all()
    found = []
    for block, start in enumerate(starts):
        own = states[32 * block : 32 * block + 32]
        for i in range(start, min(start + step, rows)):
            for j in range(columns):
                context = min(int(classes.rows[i]) + int(classes.columns[j]), 23)
                table = int(classes.table_of[context]) - 2
                if flag == 2:
                    offset = int(eighths[i, j])
                    table += max(offset, -offset - 1) * len(classes.occurring)
                lane = ((i - start) * columns + j) % 32
                high, slot = divmod(own[lane], 4096)
                before = by_table[table].cumsum()
                symbol = int(np.searchsorted(before, slot, "right"))
                frequency = int(by_table[table, symbol])
                own[lane] = frequency * high + slot - int(before[symbol]) + frequency
                if own[lane] < 1 << 16:
                    own[lane] = own[lane] << 16 | next(words)
                integer = symbol if flag == 0 else int(ans.unfolded(symbol))
                found.append(-integer if flag == 2 and eighths[i, j] >= 0 else integer)
        assert own == [1 << 16] * 32
    assert next(words, None) is None
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return np.array(found, np.int16).reshape(rows, columns)


@pytest.mark.parametrize(
    "name", ["gaussian", "heavy", "behind a ReLU", "columns", "rows", "edges", "under a dither"]
)
def test_messages_are_as_the_format_says(name, _always, _small_blocks):
    q, eighths = content("columns", (70, 37)), None
    if name == "under a dither":
        q, eighths = dithered(np.random.default_rng(0), (70, 61), 0.7)
    elif name != "columns":
        q = content(name, (70, 37))
    coded = coded_in_lanes(q, eighths)
    data = np.frombuffer(b"".join([b"\n", *coded]), np.uint8)
    assert np.array_equal(said(data, *q.shape, eighths), q)


@pytest.mark.parametrize("scale", [0.3, 1, 3, 10, 40])
@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_bytes_are_at_most_eight_thousandths_more(kind, scale):
    """Where lanes would take more, another kind is chosen."""
    rng = np.random.default_rng(0)
    shape = (512, 256)
    x = getattr(rng, kind)(size=shape) * scale * np.exp(rng.normal(0, 0.3, shape[1]))
    q, v = np.rint(x).astype(np.int16), rng.random(shape) - 0.5
    before = len(entropy.encode(q))
    assert len(assert_comes_back(q)) <= 1.008 * before + 8
    q, eighths = np.rint(x + v).astype(np.int16), np.floor(8 * v).astype(np.int8)
    before = len(entropy.encode(q, None, eighths))
    assert len(assert_comes_back(q, eighths)) <= 1.008 * before + 8


def test_few_and_smooth_images_and_zeros_are_in_no_lanes():
    few = content("gaussian", (100, 1000))
    assert np.array_equal(entropy.encode(few), entropy.encode(few, in_lanes=True))
    smooth = np.add.outer(np.arange(4096), np.arange(64)).astype(np.int16) % 90
    assert entropy.encode(smooth, (64, 64), in_lanes=True)[0] in (6, 7)
    assert len(entropy.encode(np.zeros((1000, 1000), np.int16), in_lanes=True)) < 20


STEEP = np.indices((640, 240))
STEEP = ((STEEP[0] * 7 + STEEP[1] * 13 + STEEP[0] * STEEP[1]) % 11 - 5) * 2 ** (STEEP[1] // 60)
EIGHTHS = offsets(*STEEP.shape)


@pytest.mark.parametrize(
    ("q", "eighths", "expected"),
    [
        (STEEP, None, (66298, 1781778848)),
        (STEEP + 64, None, (88022, 2443006451)),
        (STEEP // 16 + EIGHTHS // 4, EIGHTHS, (38888, 1634865240)),
    ],
)
def test_coded_bytes_stay_as_they_are(q, eighths, expected):
    coded = assert_comes_back(q.astype(np.int16), eighths)
    assert coded[0] == 10
    assert (len(coded), zlib.crc32(coded.tobytes())) == expected


# -- damage ----------------------------------------------------------------------------------------

HURT = {
    **{name: (q, None) for name, q in DAMAGED.items() if q.any() and q.shape[0] != 768},
    "under a dither": (lambda made: made)(dithered(np.random.default_rng(1), (64, 80), 0.7)),
    "many alone": (content("heavy", (60, 40)), None),
}


def refused(coded, rows, columns, eighths):
    """Whether it was refused; what was not has the right shape and magnitudes."""
    try:
        found = entropy.decode(coded, rows, columns, None, eighths)
    except RuntimeError as error:
        assert "allocate" not in str(error)
        return True
    assert found.shape == (rows, columns) and found.dtype == np.int16
    assert not found.size or np.abs(found.astype(np.int32)).max() <= entropy.LARGEST
    return False


def coded_of(name):
    q, eighths = HURT[name]
    coded = coded_in_lanes(q, eighths)
    assert coded is not None
    return np.frombuffer(bytearray(b"".join([b"\n", *coded])), np.uint8)


@pytest.mark.parametrize("name", HURT)
def test_what_was_cut_short_or_is_too_long_is_refused(name, _always, _small_blocks):
    (q, eighths), coded = HURT[name], coded_of(name)
    n = len(coded)
    for end in {*range(min(n, 200)), *range(200, n, 31), *range(max(0, n - 50), n)}:
        assert refused(coded[:end], *q.shape, eighths)
    for more in (1, 2, 3, 4, 400):
        assert refused(np.concatenate([coded, np.full(more, 7, np.uint8)]), *q.shape, eighths)


@pytest.mark.parametrize("name", HURT)
def test_damage_of_all_kinds(name, _always, _small_blocks):
    """Every bit of the first bytes, bits anywhere, runs of bytes; nearly all is found out."""
    (q, eighths), coded = HURT[name], coded_of(name)
    rng = np.random.default_rng(0)
    for bit in range(8 * min(len(coded), 80)):
        hurt = coded.copy()
        hurt[bit // 8] ^= 1 << (bit % 8)
        refused(hurt, *q.shape, eighths)
    found = 0
    for turn in range(400):
        hurt = coded.copy()
        if turn % 2:
            for at in rng.integers(len(coded), size=rng.integers(1, 4)):
                hurt[at] ^= 1 << rng.integers(8)
        else:
            start = rng.integers(len(coded))
            run = hurt[start : start + rng.integers(1, 40)]
            run[:] = (0, 255)[turn // 2 % 2] if turn % 3 else rng.integers(0, 256, len(run))
        found += refused(hurt, *q.shape, eighths) or np.array_equal(hurt, coded)
    assert found > 200
    for shape in (q.shape[::-1], (q.shape[0] + 1, q.shape[1]), (q.shape[0], 1), (1, 1), (0, 5)):
        refused(coded, *shape, None if eighths is None else offsets(*shape))


def test_random_bytes():
    rng = np.random.default_rng(0)
    for turn in range(1500):
        hurt = rng.integers(0, 256, rng.integers(0, 400), dtype=np.uint8)
        begin = 10, turn % 3, 10 + turn % 5, 1, *(0, 0) * 2, rng.integers(0, 160), turn % 9
        hurt[: len(begin)] = begin[: len(hurt)]
        shape = tuple(int(n) for n in rng.integers(0, 40, 2))
        refused(hurt, *shape, offsets(*shape))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.__setitem__(1, 2), "lanes of flag 2"),
        (lambda data: data.__setitem__(1, 9), "lanes of flag 9"),
        (lambda data: data.__setitem__(2, 9), r"blocks of 2\^9"),
        (lambda data: data.__setitem__(2, 25), r"blocks of 2\^25"),
        (lambda data: data.__setitem__(-1, data[-1] ^ 1), "a block that does not end"),
    ],
)
def test_errors_say_what_may_be_wrong(change, why, _always):
    q = content("gaussian", (40, 40))
    data = np.frombuffer(bytearray(b"".join([b"\n", *coded_in_lanes(q)])), np.uint8)
    change(data)
    with pytest.raises(RuntimeError, match=f"{why}.*damaged, or the two ends have different"):
        entropy.decode(data, *q.shape)


# -- machine code ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "heavy", "edges", "under a dither"])
def test_machine_code_does_what_the_interpreter_does(name, monkeypatch, _always, _small_blocks):
    """Types that overflow or round would show."""
    q, eighths = dithered(np.random.default_rng(1), (80, 53), 0.7)
    if name != "under a dither":
        q, eighths = content(name, (21, 53)), None
    coded = coded_in_lanes(q, eighths)
    for module, function in (
        (lanes, "entries_of"),
        (lanes, "find_tables"),
        (lanes, "slots_of"),
        (tallies, "tally"),
    ):
        monkeypatch.setattr(module, function, getattr(module, function).__wrapped__)
    with np.errstate(over="ignore"):
        assert coded_in_lanes(q, eighths) == coded
        data = np.frombuffer(b"".join([b"\n", *coded]), np.uint8)
        found = lanes.decode(Reader(data), *q.shape, tensor(eighths), torch.device("cpu"))
        assert np.array_equal(found.numpy(), q)


def test_places_of_classes_without_own_tables():
    of_rows, tables, apart = lanes._places(Classes.single(3, 5), torch.device("cpu"))
    assert apart == 1 and not of_rows.any() and not tables.any() and tables.shape == (1, 5)
