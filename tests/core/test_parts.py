"""Parts: several payloads in one message, of which any may be shorter than planned."""

import itertools

import pytest
import torch
from methods import same_bits

from mpcomp import TensorMeta
from mpcomp.core.wire import Parts

BYTES = torch.uint8
#: A part as (layout, whether it varies): one of known size, one that varies alone, one of both.
FIXED = ((TensorMeta((3,)), TensorMeta((5,), torch.int16)), False)
ALONE = ((TensorMeta((40,), BYTES),), True)
MIXED = ((TensorMeta((2, 2)), TensorMeta((30,), BYTES)), True)
EMPTY = ((), False)  # an empty tensor's, or one whose receiver draws all there is


def parts_of(*given):
    layouts, varies = zip(*given, strict=True)
    return Parts(layouts, varies)


def payloads_of(parts, lengths):
    """Random payloads; the last tensors of parts that vary have those lengths, in turn."""
    lengths = iter(lengths)
    payloads = []
    for layout, varies in zip(parts.layouts, parts.varies, strict=True):
        sizes = [meta.shape for meta in layout]
        if varies:
            sizes[-1] = (next(lengths),)
        payloads.append(
            tuple(
                torch.randint(0, 100, size).to(meta.dtype)
                for size, meta in zip(sizes, layout, strict=True)
            )
        )
    return payloads


def assert_comes_back(parts, payloads):
    found = parts.parted(parts.joined(payloads))
    assert [len(part) for part in found] == [len(part) for part in payloads]
    for part, expected in zip(found, payloads, strict=True):
        for a, b in zip(part, expected, strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("count", range(5))
def test_all_mixtures_come_back(count):
    """None to four parts of each kind and order; tails empty, short and of full length."""
    for given in itertools.product([FIXED, ALONE, MIXED, EMPTY], repeat=count):
        parts = parts_of(*given) if given else Parts((), ())
        for lengths in ([0] * 4, [7, 0, 30, 1], [30] * 4):
            payloads = payloads_of(parts, lengths)
            assert_comes_back(parts, payloads)
            joined = parts.joined(payloads)
            metas = [TensorMeta.of(part) for part in joined]
            if any(parts.varies):
                last, most = metas.pop(), parts.layout[-1]
                assert last.dtype == most.dtype == BYTES and len(last.shape) == 1
                assert last.numel <= most.numel
            assert tuple(metas) == parts.layout[: len(metas)]
            assert len(joined) == len(parts.layout)


def test_where_none_varies_payloads_follow_each_other():
    parts = parts_of(FIXED, EMPTY, FIXED)
    payloads = payloads_of(parts, [])
    assert parts.layout == (*FIXED[0], *FIXED[0])
    joined = parts.joined(payloads)
    assert all(a is b for a, b in zip(joined, (*payloads[0], *payloads[2]), strict=True))


def test_one_that_varies_has_no_length_before_it():
    """It is as long as the message says, wherever among the parts it is."""
    for given in ([MIXED], [MIXED, FIXED], [FIXED, MIXED], [FIXED, MIXED, FIXED]):
        parts = parts_of(*given)
        assert parts.layout[-1] == MIXED[0][-1]
        payloads = payloads_of(parts, [11])
        tail = payloads[given.index(MIXED)][-1]
        assert parts.joined(payloads)[-1] is tail


def test_several_that_vary_have_their_lengths_before_them():
    """uint32, little-endian; what is of known size comes first."""
    parts = parts_of(ALONE, FIXED, MIXED)
    assert parts.layout == (*FIXED[0], MIXED[0][0], TensorMeta((40 + 30 + 2 * 4,), BYTES))
    first, second = torch.arange(3, dtype=BYTES), torch.arange(5, 7, dtype=BYTES)
    _, fixed, (known, _) = payloads_of(parts, [0, 0])
    joined = parts.joined([(first,), fixed, (known, second)])
    assert bytes(joined[-1].tolist()).hex() == "03000000" + "000102" + "02000000" + "0506"
    assert joined[:-1] == (*fixed, known)


def test_a_damaged_length_is_an_error():
    """More than is left, more than its part may have, or less than none."""
    parts = parts_of(ALONE, FIXED, MIXED, ALONE)
    joined = parts.joined(payloads_of(parts, [9, 20, 3]))
    *known, tail = joined
    for at, length in ((0, 9), (4 + 9, 20), (4 + 9 + 4 + 20, 3)):
        assert tail[at] == length
        for damaged in (255, 256, 41, 2**31 - 1, -1, -(2**31)):
            hurt = tail.clone()
            hurt[at : at + 4] = torch.tensor([damaged], dtype=torch.int32).view(BYTES)
            with pytest.raises(RuntimeError, match=r"a part of .* damaged"):
                parts.parted((*known, hurt))


def test_no_damage_is_another_error():
    """A message of random bytes, or cut short, has parts that fit, or is refused."""
    parts = parts_of(ALONE, MIXED, ALONE)
    *known, tail = parts.joined(payloads_of(parts, [9, 20, 3]))
    for end in range(tail.numel()):
        with pytest.raises(RuntimeError, match="cut short|damaged"):
            parts.parted((*known, tail[:end]))
    accepted = 0
    for _ in range(500):
        hurt = tail.clone()
        hurt[torch.randint(tail.numel(), (2,))] = torch.randint(0, 30, (2,), dtype=BYTES)
        try:
            found = parts.parted((*known, hurt))
        except RuntimeError:
            continue
        accepted += 1
        for part, layout in zip(found, parts.layouts, strict=True):
            assert part[-1].numel() <= layout[-1].numel
    assert 0 < accepted < 500
