"""Integers of images, expected from those of pixels around them.

Pixels are rows of channels, image by image and line by line. Of an integer q with a to its left, b
above it, and c above a, all of its channel, the expected one is

    m = median(a, b, a + b - c)

(the median edge detector of LOCO-I; Weinberger, Seroussi and Sapiro, IEEE Trans. Image Processing
2000, section III.A). A symbol s >= 0 says how far q is from it, d = q - m,

    s = 2 |d| - (d < 0)     where q may be negative, or |d| <= m
    s = q                   else: so far above m, where nothing can be as far below

and its context is the size of m with that of the errors |d| of the pixels to the left and above,
all channels together, which both ends know by then.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpcomp.core.compiled import compiled

__all__ = ["CONTEXTS", "LARGEST", "expect", "integer", "symbol", "symbols_of"]

# Sizes in halves of an octave from 4 on: 0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, and so on.
_SIZES = np.array(
    [n if n < 4 else 2 * (n.bit_length() - 1) + (n >> n.bit_length() - 2 & 1) for n in range(128)],
    np.uint8,
)
_LARGEST_SIZE: Final = 12  # of an expected integer; 64 and more
_PER_ERROR: Final = _LARGEST_SIZE + 1
_LARGEST_ERROR: Final = 14
_FIRST: Final = _LARGEST_ERROR + 1  # the class of pixels with none around them
#: Contexts of integers.
CONTEXTS: Final = _PER_ERROR * (_FIRST + 1)
#: Magnitudes of integers that have symbols in int16.
LARGEST: Final = 2**13 - 1
_LIMIT: Final = 2**15 - 1  # of what damaged data says
_int64: Any = np.int64  # for a type checker, which knows no absolute one of numpy's own numbers


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
        expected: takes them, int64 [channels].
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
    for j in range(num_channels):
        a, b, c = _int64(q[left, j]), _int64(q[above, j]), _int64(q[corner, j])
        low, high = min(a, b), max(a, b)
        m = min(max(a + b - c, low), high)
        expected[j] = m
        sizes[j] = min(_SIZES[min(abs(m), 127)], _LARGEST_SIZE)
    error = 4 * (errors[left] + errors[above]) // num_channels
    of_error: int = _int64(min(_SIZES[min(error, 127)], _LARGEST_ERROR))
    return of_error * _PER_ERROR


@compiled
def symbol(q: int, expected: int, signed: bool) -> int:
    """s of an integer."""
    d = q - expected
    return 2 * abs(d) - (d < 0) if signed or abs(d) <= expected else q


@compiled
def integer(s: int, expected: int, signed: bool) -> int:
    """The inverse of `symbol`; of any s one within what integers may be."""
    d = -((s + 1) >> 1) if s & 1 else s >> 1
    q = expected + d if signed or s <= 2 * expected else s
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
    expected = np.empty(num_channels, np.int64)
    for i in range(num_pixels):
        classes[i] = expect(q, i, height, width, errors, expected, sizes[i])
        error = 0
        for j in range(num_channels):
            value = _int64(q[i, j])
            symbols[i, j] = symbol(value, expected[j], signed)
            error += abs(value - expected[j])
        errors[i] = error
    return symbols, classes, sizes
