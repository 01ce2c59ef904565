"""Integers of images, coded by what those of pixels around them let expect.

Pixels are rows of channels, image by image and line by line. Of an integer q with a to its left, b
above it, and c above a, all of its channel, the expected one is

    m = median(a, b, a + b - c)

(the median edge detector of LOCO-I; Weinberger, Seroussi and Sapiro, IEEE Trans. Image Processing
2000, section III.A). A symbol s >= 0 says how far q is from it, d = q - m,

    s = 2 |d| - (d < 0)     where q may be negative, or |d| <= m
    s = q                   else: so far above m, where nothing can be as far below

and its context is the size of m with that of the errors |d| of the pixels to the left and above,
all channels together, which both ends know by then. Ahead in a message stands a bit for each
context that occurs, behind are symbols from `ans.ESCAPE` on as uint16, the last one first.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpcomp.core.compiled import compiled
from mpcomp.entropy import ans
from mpcomp.entropy.ans import ESCAPE, folded, pop_row, unfolded
from mpcomp.entropy.frequencies import Tables
from mpcomp.entropy.message import FEW, Message, Place, Reader, damaged

__all__ = [
    "decode",
    "encode",
    "expect",
    "integer",
    "may_tell",
    "pop",
    "symbol",
    "symbols_of",
]

# Sizes in halves of an octave from 4 on: 0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, and so on.
_SIZES = np.array(
    [n if n < 4 else 2 * (n.bit_length() - 1) + (n >> n.bit_length() - 2 & 1) for n in range(128)],
    np.uint8,
)
_LARGEST_EXPECTED: Final = 64  # and more
_LARGEST_SIZE: Final = 12  # of that
_PER_ERROR: Final = _LARGEST_SIZE + 1
_LARGEST_ERROR: Final = 14
_FIRST: Final = _LARGEST_ERROR + 1  # the class of pixels with none around them
#: Contexts, by errors around a pixel and by what is expected.
CONTEXTS: Final = _PER_ERROR * (_FIRST + 1)
#: Magnitude of integers whose symbols all are int16.
LARGEST: Final = 2**13 - 1
_LIMIT: Final = 2**15 - 1  # of what damaged data says
#: Of so many images one is looked at first, where integers may be negative.
ONE_OF: Final = 8
# For a type checker, which knows no absolute one of numpy's own numbers.
_int32: Any = np.int32
_int64: Any = np.int64
_uint64: Any = np.uint64


def may_tell(q: NDArray[np.int16], height: int, width: int, *, signed: bool) -> bool:
    """Whether neighbours may tell of integers; where these have signs, by some of the images.

    Noise, as gradients are, would cost the time of looking for what is not there.
    """
    largest = max(int(q.max()), -int(q.min()))
    if q.size < FEW or not 0 < largest <= LARGEST:
        return False
    if not signed:
        return True
    some = q[: height * width * max(1, len(q) // (ONE_OF * height * width))]
    symbols, _, _ = symbols_of(some, height, width, signed)
    # A symbol is about twice as large as what it is off.
    return bool(symbols.sum(dtype=np.int64) < 2 * np.abs(some).sum(dtype=np.int64))


def encode(q: NDArray[np.int16], height: int, width: int, *, signed: bool) -> Message:
    """The message of integers [pixels, channels] of images, of which neighbours `may_tell`.

    Args:
        q: integers.
        height: lines of an image.
        width: pixels of a line.
        signed: whether integers may be negative.
    """
    symbols, pixels, sizes = symbols_of(q, height, width, signed)
    largest = min(int(symbols.max()), ESCAPE)
    counts = ans.tally(symbols, pixels, sizes, CONTEXTS, largest)
    num_large = int(counts[:, ESCAPE:].sum())
    occurs = counts.any(1)
    return Message(
        ahead=np.packbits(occurs).tobytes(),
        tables=Tables.of(counts[occurs].astype(np.int64)),
        coded=[(symbols, Place(pixels, sizes, _tables_of(np.flatnonzero(occurs))))],
        num_behind=2 * num_large,
        behind=lambda: ans.large_of(symbols, num_large)[::-1].astype("<u2").tobytes(),
    )


def decode(
    reader: Reader, pixels: int, channels: int, height: int, width: int, *, signed: bool
) -> NDArray[np.int16]:
    """The integers [pixels, channels] of a message.

    Raises:
        RuntimeError: it cannot be of such integers.
    """
    bits = np.unpackbits(reader.array("u1", -(-CONTEXTS // 8)))
    occurring = np.flatnonzero(bits[:CONTEXTS])
    if not len(occurring):
        raise damaged("no contexts")
    coder = reader.coder(reader.costs(len(occurring)), pixels * channels)
    q = np.empty((pixels, channels), np.int16)
    at, num_large = pop(
        reader.data, reader.at, signed, height, width, _tables_of(occurring), *coder, q
    )
    reader.go_to(at)
    coder.check_end()
    reader.check_end(2 * num_large)
    return q


def _tables_of(occurring: NDArray[np.intp]) -> NDArray[np.int64]:
    """The table of each context; of one that does not occur, any."""
    table_of = np.zeros(CONTEXTS, np.int64)
    table_of[occurring] = np.arange(len(occurring))
    return table_of


@compiled
def expect(
    q: NDArray[Any],
    i: int,
    height: int,
    width: int,
    errors: NDArray[Any],
    expected: NDArray[Any],
    sizes: NDArray[Any],
) -> int:
    """Expected integers of a pixel.

    Args:
        q: integers, int16 [pixels, channels], those before this pixel.
        i: the pixel.
        height: lines of an image.
        width: pixels of a line.
        errors: sums over channels of how wrong expected integers were, int64 [pixels].
        expected: takes them, whole numbers [channels].
        sizes: takes their classes, uint8 [channels].

    Returns:
        The pixel's class; an integer's context is this and its size.
    """
    num_channels = q.shape[1]
    is_first_of_line, is_in_first_line = i % width == 0, i % (height * width) < width
    if is_first_of_line and is_in_first_line:
        expected[:] = 0
        sizes[:] = 0
        return _FIRST * _PER_ERROR
    # At an edge the one neighbour there is stands for all.
    left = i - width if is_first_of_line else i - 1
    above = left if is_in_first_line else i - width
    corner = left if is_in_first_line else above if is_first_of_line else above - 1
    at_left, at_above, at_corner = q[left], q[above], q[corner]
    for j in range(num_channels):  # m as low + high - c, with no c that is outside
        a, b, c = at_left[j], at_above[j], at_corner[j]
        low, high = _int32(min(a, b)), _int32(max(a, b))
        expected[j] = low + high - min(max(_int32(c), low), high)
    for j in range(num_channels):
        sizes[j] = _SIZES[_uint64(min(abs(_int32(expected[j])), _int32(_LARGEST_EXPECTED)))]
    error = 4 * (errors[left] + errors[above]) // num_channels
    of_error: int = _int64(min(_SIZES[min(error, 127)], _LARGEST_ERROR))
    return of_error * _PER_ERROR


def expect_all(q: Tensor) -> tuple[Tensor, Tensor]:
    """Expected integers of whole images that are known, and contexts; `expect` for any device.

    Args:
        q: int64 [images, height, width, channels].

    Returns:
        Both like ``q``.
    """
    left, above = torch.zeros_like(q), torch.zeros_like(q)
    left[:, :, 1:], above[:, 1:] = q[:, :, :-1], q[:, :-1]
    # At an edge the one neighbour there is stands for all.
    left[:, 1:, 0], above[:, 0] = above[:, 1:, 0], left[:, 0]
    corner = torch.zeros_like(q)
    corner[:, 0], corner[:, 1:, 0] = left[:, 0], above[:, 1:, 0]
    corner[:, 1:, 1:] = q[:, :-1, :-1]
    low, high = torch.minimum(left, above), torch.maximum(left, above)
    expected = torch.minimum(torch.maximum(left + above - corner, low), high)
    sizes = torch.from_numpy(_SIZES).to(q.device, torch.int64)
    of_expected = sizes[expected.abs().clamp(max=127)].clamp_(max=_LARGEST_SIZE)
    errors = (q - expected).abs().sum(-1)
    around = torch.zeros_like(errors)
    around[:, :, 1:] += errors[:, :, :-1]
    around[:, 1:] += errors[:, :-1]
    around[:, 0, 1:] += errors[:, 0, :-1]
    around[:, 1:, 0] += errors[:, :-1, 0]
    classes = sizes[(4 * around // q.shape[-1]).clamp_(max=127)].clamp_(max=_LARGEST_ERROR)
    classes[:, 0, 0] = _FIRST
    return expected, classes[..., None] * _PER_ERROR + of_expected


@compiled
def symbol(q: int, expected: int, signed: bool) -> int:
    """s of an integer."""
    d = q - expected
    return folded(d) if signed or abs(d) <= expected else q


@compiled
def integer(s: int, expected: int, signed: bool) -> int:
    """The inverse of `symbol`; of any s one within what integers may be."""
    q = expected + unfolded(s) if signed or s <= 2 * expected else s
    return min(max(q, -_LIMIT), _LIMIT)


@compiled
def symbols_of(
    q: NDArray[Any], height: int, width: int, signed: bool
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Symbols of images, and their contexts.

    Args:
        q: integers, int16 [pixels, channels], of magnitudes up to `LARGEST`.
        height: lines of an image.
        width: pixels of a line.
        signed: whether integers may be negative.

    Returns:
        s, int16 [pixels, channels]; classes of pixels, uint8 [pixels]; of what was expected, uint8
        [pixels, channels].
    """
    num_pixels, num_channels = q.shape
    symbols = np.empty((num_pixels, num_channels), np.int16)
    sizes = np.empty((num_pixels, num_channels), np.uint8)
    classes = np.empty(num_pixels, np.uint8)
    errors = np.empty(num_pixels, np.int64)
    expected = np.empty(num_channels, np.int16)
    for i in range(num_pixels):
        classes[i] = expect(q, i, height, width, errors, expected, sizes[i])
        said, values, error = symbols[i], q[i], 0
        for j in range(num_channels):
            value, m = _int32(values[j]), _int32(expected[j])
            said[j] = symbol(value, m, signed)
            error += abs(_int32(value - m))
        errors[i] = error
    return symbols, classes, sizes


@compiled
def pop(
    data: NDArray[Any],
    at: int,
    signed: bool,
    height: int,
    width: int,
    table_of: NDArray[Any],
    starts: NDArray[Any],
    first: NDArray[Any],
    states: NDArray[Any],
    out: NDArray[Any],
) -> tuple[int, int]:
    """The inverse of `ans.push` of symbols, of any bytes.

    Args:
        data: words from ``at`` on, and symbols from `ans.ESCAPE` on from the end backwards, uint8.
        at: where words begin.
        signed: whether integers may be negative.
        height: lines of an image.
        width: pixels of a line.
        table_of: the table of each context, int64.
        starts: of those tables; the last of each is `ans.TOTAL`.
        first: their `ans.buckets`.
        states: as they were after `ans.push`, int64; they change.
        out: takes the integers, int16 [pixels, channels].

    Returns:
        Where the words end, or -1 where the data ends before them, and the number of symbols from
        `ans.ESCAPE` on, which may be more than there is room for.
    """
    num_pixels, num_channels = out.shape
    end, escaped = len(data), 0
    tables, expected = np.zeros(num_channels, np.int64), np.zeros(num_channels, np.int16)
    sizes = np.empty(num_channels, np.uint8)
    errors = np.empty(num_pixels, np.int64)
    for i in range(num_pixels):
        of_class = _uint64(expect(out, i, height, width, errors, expected, sizes))
        for j in range(num_channels):
            tables[j] = table_of[of_class + _uint64(sizes[j])]
        values, error = out[i], 0
        at, largest = pop_row(data, at, tables, starts, first, states, values)
        if at < 0:
            return -1, 0
        if largest == ESCAPE:
            for j in range(num_channels):
                symbol = _int64(values[j])
                if symbol == ESCAPE:
                    escaped += 1
                    low = max(end - 2 * escaped, 0)
                    symbol = _int64(data[low]) | _int64(data[low + 1]) << 8
                values[j] = integer(symbol, _int64(expected[j]), signed)
                error += abs(_int64(values[j]) - expected[j])
        else:
            for j in range(num_channels):
                m = _int32(expected[j])
                value = _int32(integer(_int32(values[j]), m, signed))
                values[j] = value
                error += abs(_int32(value - m))
        errors[i] = error
    return at, escaped
