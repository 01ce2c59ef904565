"""Rows that are all zero are not sent; the others are a smaller tensor, and arrive in place."""

import pytest
import torch
from kernels import run_anywhere
from methods import drawn, round_trip, same_bits

from mpcomp import ECSQ, Cast, Identity, Quantize, RandomK, Sign, TensorMeta, TopK
from mpcomp.compressors.rows import InRows, nonzero_rows

NUM_ROWS, WIDTH = 37, 24
COUNTS = [0, 1, 5, 20, 36, 37]
FEW_OR_ALL = [0, 1, 5, 20, 37]  # of 36 all may be sent
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INNER = [
    Identity(),
    Cast("bf16"),
    Quantize(4, scale=128),
    Quantize(8),
    TopK(0.1),
    TopK(0.3, values=Quantize(8)),
    RandomK(0.2),
    Sign(),
    ECSQ(0.3),
]


def tensor(count, dtype=torch.float32, seed=0):
    """A tensor [1, n] of which so many rows are not zero, and where they are."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(NUM_ROWS, generator=generator)[:count].sort().values
    x = torch.zeros(NUM_ROWS, WIDTH, dtype=dtype)
    x[rows] = torch.randn(count, WIDTH, generator=generator).to(dtype)
    return x.reshape(1, -1), rows


def split(x):
    return x.reshape(NUM_ROWS, WIDTH)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_as_they_are_they_arrive_bit_for_bit(count, dtype):
    x, _ = tensor(count, dtype)
    coder = InRows(Identity(), NUM_ROWS)
    (message,) = coder.compress(x)
    assert same_bits(coder.decompress((message,), TensorMeta.of(x)), x)
    values = count * WIDTH * dtype.itemsize
    assert values <= message.numel() <= values + 8 + 6 + 7  # a bit for each row, and alignment


@pytest.mark.parametrize("count", FEW_OR_ALL)
@pytest.mark.parametrize("inner", INNER, ids=str)
def test_they_are_a_smaller_tensor(inner, count):
    x, rows = tensor(count)
    coder, meta = InRows(inner, NUM_ROWS), TensorMeta.of(x)
    payload = coder.compress(x, drawn(7))
    arrived = split(coder.decompress(payload, meta, drawn(7)))
    absent = torch.ones(NUM_ROWS, dtype=torch.bool)
    if count:
        taken = split(x)[rows].reshape(1, -1)
        said = inner.decompress(inner.compress(taken, drawn(7)), TensorMeta.of(taken), drawn(7))
        assert same_bits(arrived[rows], said.reshape(count, WIDTH))
        absent[rows] = False
    assert not arrived[absent].any()
    (room,) = coder.layout(meta)
    assert payload[0].numel() <= room.numel
    assert str(coder) == str(inner) and coder.sends_dense == inner.sends_dense


@pytest.mark.parametrize("count", FEW_OR_ALL)
@pytest.mark.parametrize("inner", INNER, ids=str)
def test_a_sender_knows_what_arrives(inner, count):
    """Of a tensor with what was left of others: of its own rows alone anything is sent."""
    whole, rows = tensor(count)
    x = whole + torch.randn(1, NUM_ROWS * WIDTH, generator=drawn(7))
    coder, meta = InRows(inner, NUM_ROWS), TensorMeta.of(x)
    payload, said = coder.round_trip(x, whole, meta, lambda: drawn(7))
    (again,) = coder.compress_against(x, whole, drawn(7))
    assert same_bits(payload[0], again)
    assert same_bits(said, coder.decompress(payload, meta, drawn(7)))
    absent = torch.ones(NUM_ROWS, dtype=torch.bool)
    absent[rows] = False
    assert not split(said)[absent].any()
    if inner == Identity():
        assert same_bits(split(said)[rows], split(x)[rows])


def test_all_rows_go_where_that_is_shorter():
    """Rows of a byte each cost less than to say that twenty are missing; longer ones do not."""
    x = torch.ones(400, 8)
    x[3:23] = 0
    flat = x.reshape(1, -1)
    signs, halves = (
        InRows(inner, 400).compress(flat)[0].numel() for inner in (Sign(), Cast("bf16"))
    )
    assert signs == 8 + Sign().wire_bytes(TensorMeta((1, 3200)))
    assert 8 + 2 * 380 * 8 < halves < 8 + 2 * 380 * 8 + 60


@pytest.mark.parametrize("by_numpy", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_found_by_their_bits(dtype, by_numpy, monkeypatch):
    if not by_numpy:
        run_anywhere(monkeypatch)
    x = torch.zeros(9, 5, dtype=dtype)
    for row, value in {
        1: -0.0,
        3: float("nan"),
        4: float("inf"),
        8: torch.finfo(dtype).tiny,
    }.items():
        x[row, row % 5] = value
    assert nonzero_rows(x).nonzero().flatten().tolist() == [1, 3, 4, 8]
    assert nonzero_rows(torch.ones(4, 3, dtype=dtype)).all()
    coder = InRows(Identity(), 9)
    flat = x.reshape(1, -1)
    arrived = coder.decompress(coder.compress(flat), TensorMeta.of(flat))
    assert torch.equal(arrived.view(torch.uint8), flat.view(torch.uint8))


@pytest.mark.parametrize("inner", [Identity(), Quantize(4), ECSQ(0.3)], ids=str)
def test_a_damaged_message_is_refused_or_gives_a_tensor(inner):
    x, _ = tensor(5)
    coder, meta = InRows(inner, NUM_ROWS), TensorMeta.of(x)
    (message,) = coder.compress(x)
    refused = 0
    damaged = [message[:end] for end in range(0, message.numel(), 3)]
    for place in range(min(24, message.numel())):
        for bit in (0, 3, 7):
            damaged.append(message.clone())
            damaged[-1][place] ^= 1 << bit
    for each in damaged:
        try:
            arrived = coder.decompress((each.clone(),), meta)
        except (RuntimeError, ValueError):
            refused += 1
        else:
            assert arrived.shape == x.shape
    assert refused > 20
    with pytest.raises(RuntimeError, match="that says it has -1 rows of 37"):
        coder.decompress((message[:4],), meta)
    with pytest.raises(
        RuntimeError, match=r"of 9 bytes where 5 rows have \d+ to \d+: it is damaged"
    ):
        coder.decompress((message[:9],), meta)


def test_methods_are_those_of_a_round_trip():
    """The law of a contraction and of an unbiased method holds as it does of the rows."""
    x, _ = tensor(20)
    for inner in (TopK(0.1), Sign(), Quantize(2)):
        arrived = round_trip(InRows(inner, NUM_ROWS), x)
        assert (x - arrived).norm() <= x.norm()
        assert InRows(inner, NUM_ROWS).contractive == inner.contractive
    unbiased = RandomK(0.2, unbiased=True)
    assert InRows(unbiased, NUM_ROWS).is_unbiased == unbiased.is_unbiased
