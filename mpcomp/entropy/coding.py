"""Integers [rows, columns] to bytes and back.

A message's first byte says its kind. Integers are coded by their rows and columns
(`mpcomp.entropy.classes`), or, where that takes less, by what their neighbours in an image let
expect (`mpcomp.entropy.neighbours`) or the dither under which they were rounded
(`mpcomp.entropy.dithered`). Where coding would gain nothing (noise of many bits) they go
as int16. Millions are coded in slices of rows, on several threads (`mpcomp.core.threads`). Who asks
for it has many in lanes (`mpcomp.entropy.lanes`), unless their neighbours tell of them or that
takes more bytes; so has a device that codes lanes itself. All arithmetic of what both ends make is
in whole numbers, so that nothing depends on how a machine rounds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mpcomp.core.threads import each, slices_of
from mpcomp.core.transfer import to_device, to_host
from mpcomp.entropy import ans, classes, dithered, lanes, neighbours
from mpcomp.entropy.message import FEW, Reader, damaged

__all__ = [
    "KINDS",
    "LARGEST",
    "decode",
    "decode_to",
    "encode",
    "encode_tensor",
    "in_lines",
    "lines_of",
    "max_bytes",
    "slices",
]

#: Magnitudes are at most this.
LARGEST = 2**15 - 1

# 1 to 3 were by coders of before, which no longer are understood. Of each pair the first is with
# negative integers.
_PLAIN, _CLASSES, _NEIGHBOURS, _DITHERED, _SLICES, _LANES = 0, (4, 5), (6, 7), (8, 8), 9, 10
#: Names of all kinds; who lacks one cannot read what others write.
KINDS = ("plain", "classes", "neighbours", "dithered", "slices", "lanes")
_LINE = 512  # integers of a vector that have a class in common, nearly
_HOST = torch.device("cpu")


def max_bytes(rows: int, columns: int) -> int:
    """The most that `encode` takes for integers [rows, columns]."""
    return 1 + 2 * rows * columns


def encode(
    q: NDArray[np.int16],
    image: tuple[int, int] | None = None,
    offsets: NDArray[np.int8] | None = None,
    *,
    in_lanes: bool = False,
) -> NDArray[np.uint8]:
    """The coded form of integers [rows, columns], uint8 [n], n <= `max_bytes`.

    Args:
        q: magnitudes up to `LARGEST`.
        image: height and width of images, whose pixels the rows are, line by line.
        offsets: floor(`PARTS` v) of the dither v in [-1/2, 1/2) under which each was rounded,
            [rows, columns], which `decode` will be given too.
        in_lanes: whether many may go in lanes.
    """
    by = None if offsets is None else _tensor(offsets, np.int8)
    coded: NDArray[np.uint8]
    coded = encode_tensor(_tensor(q, np.int16), image, by, in_lanes=in_lanes).numpy()
    return coded


def encode_tensor(
    q: Tensor,
    image: tuple[int, int] | None = None,
    offsets: Tensor | None = None,
    *,
    in_lanes: bool = False,
) -> Tensor:
    """As `encode`, of integers on any device; what is coded is on the host.

    Many integers of a device that codes lanes stay there, and go in lanes whoever asks.

    Args:
        q: int16 [rows, columns].
        image: as of `encode`.
        offsets: int8 [rows, columns], on that device.
        in_lanes: as of `encode`.
    """
    most = max_bytes(*q.shape)
    if image is None:
        q = in_lines(q)
        offsets = None if offsets is None else in_lines(offsets)
    q, there = q.contiguous(), lanes.codes_on(q.device)
    if not there:
        q, offsets = to_host(q), None if offsets is None else to_host(offsets)
    message = _in_lanes(q, image, offsets) if in_lanes or there else None
    # Of one, nothing is shorter than itself.
    if message is None:
        q = to_host(q)
        message = _in_slices(q.numpy(), image, _array(offsets)) if q.numel() > 1 else []
    if not message or sum(map(len, message)) > most:
        plain = to_host(q).numpy().astype("<i2").tobytes()
        message = [bytes([_PLAIN]), plain[: most - 1]]
    coded = bytearray().join(message)  # no bytes, of which an array could not be changed
    return torch.from_numpy(np.frombuffer(coded, np.uint8))


def decode(
    data: NDArray[np.uint8],
    rows: int,
    columns: int,
    image: tuple[int, int] | None = None,
    offsets: NDArray[np.int8] | None = None,
) -> NDArray[np.int16]:
    """Inverse of `encode`.

    Raises:
        RuntimeError: the data cannot be of such integers. (Of damaged data many are.)
    """
    by = None if offsets is None else _tensor(offsets, np.int8)
    q: NDArray[np.int16]
    q = decode_to(_HOST, _tensor(data, np.uint8), rows, columns, image, by).numpy()
    return q


def decode_to(
    device: torch.device,
    coded: Tensor,
    rows: int,
    columns: int,
    image: tuple[int, int] | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """As `decode`, of integers on any device, int16 [rows, columns], made there if it codes lanes.

    Args:
        device: of the integers.
        coded: uint8 [n] on the host.
        rows: of the integers.
        columns: likewise.
        image: as of `encode`.
        offsets: int8 [rows, columns], on the device.

    Raises:
        RuntimeError: as of `decode`.
    """
    data = coded.numpy()
    if not len(data):
        raise RuntimeError("an empty message where coded integers were expected")
    kind = int(data[0])
    if kind == _PLAIN:
        if len(data) != max_bytes(rows, columns):
            raise damaged(f"{len(data)} bytes, expected {max_bytes(rows, columns)}")
        plain = np.frombuffer(data, "<i2", offset=1).astype(np.int16)
        q = torch.from_numpy(np.maximum(plain, -LARGEST).reshape(rows, columns))
        return to_device(q, device)
    shape = lines_of(rows, columns) if image is None else (rows, columns)
    if offsets is not None and image is None:
        offsets = _filled(offsets, shape)
    there = kind == _LANES and lanes.codes_on(device)
    if offsets is not None and not there:
        offsets = to_host(offsets)
    if kind == _LANES:
        q = lanes.decode(Reader(data), *shape, offsets, device if there else _HOST)
    else:
        q = torch.from_numpy(_of_slices(data, shape, image, _array(offsets)))
    q = q.view(-1)[: rows * columns].view(rows, columns)
    return q if there else to_device(q, device)


def lines_of(rows: int, columns: int) -> tuple[int, int]:
    """The shape in which integers are coded: a vector in lines, of which each has a class."""
    if min(rows, columns) != 1 or rows * columns < FEW:
        return rows, columns
    num_lines = -(-rows * columns // _LINE)
    return num_lines, -(-rows * columns // num_lines)


def in_lines(q: Tensor) -> Tensor:
    """The integers in the shape in which they are coded."""
    return _filled(q, lines_of(*q.shape))


def _filled(q: Tensor, shape: tuple[int, int]) -> Tensor:
    """The integers in another shape, with zeros at the end to fill it up."""
    if shape == q.shape:
        return q
    return F.pad(q.reshape(-1), (0, math.prod(shape) - q.numel())).reshape(shape)


def _tensor(array: NDArray[Any], dtype: type) -> Tensor:
    # Of arrays in another order, or that cannot be changed, there would be other machine code.
    return torch.from_numpy(np.require(array, dtype, ["C", "W"]))


def _array(offsets: Tensor | None) -> NDArray[np.int8] | None:
    return None if offsets is None else to_host(offsets).numpy()


def slices(shape: tuple[int, int], image: tuple[int, int] | None) -> list[slice]:
    """Rows that are coded by themselves; of images whole ones."""
    return slices_of(*shape, together=1 if image is None else math.prod(image))


def _in_lanes(
    q: Tensor, image: tuple[int, int] | None, offsets: Tensor | None
) -> list[bytes] | None:
    """The kind and the message in lanes; None of few, and where another kind takes less."""
    if q.numel() < lanes.MANY:
        return None
    if image is not None:
        pixels = to_host(q).numpy()
        if neighbours.may_tell(pixels, *image, signed=bool(pixels.min() < 0)):
            return None
    message = lanes.encode(q, offsets)
    return None if message is None else [bytes([_LANES]), *message]


def _in_slices(
    q: NDArray[np.int16], image: tuple[int, int] | None, offsets: NDArray[np.int8] | None
) -> list[bytes]:
    """The kind and the message of integers, of millions of them that of each slice."""

    def coded(rows: slice) -> bytes:
        return b"".join(_encoded(q[rows], image, None if offsets is None else offsets[rows]))

    messages = each(coded, slices(q.shape, image))
    if len(messages) == 1:
        return messages
    lengths = np.array(list(map(len, messages)), "<u4")
    return [bytes([_SLICES]), lengths.tobytes(), *messages]


def _of_slices(
    data: NDArray[np.uint8],
    shape: tuple[int, int],
    image: tuple[int, int] | None,
    offsets: NDArray[np.int8] | None,
) -> NDArray[np.int16]:
    """The inverse of `_in_slices`."""
    rows_of = slices(shape, image)
    if len(rows_of) == 1:
        return _decoded(data, shape, image, offsets)
    if data[0] != _SLICES:
        raise damaged(f"kind {data[0]}, expected {len(rows_of)} slices")
    reader = Reader(data)
    lengths = reader.array("<u4", len(rows_of)).astype(np.int64)
    reader.check_end(int(lengths.sum()))
    ends = reader.at + lengths.cumsum()
    q = np.empty(shape, np.int16)

    def decode_slice(of: tuple[slice, int, int]) -> None:
        rows, start, end = of
        of_slice = None if offsets is None else offsets[rows]
        q[rows] = _decoded(data[start:end], q[rows].shape, image, of_slice)

    each(decode_slice, list(zip(rows_of, (ends - lengths).tolist(), ends.tolist(), strict=True)))
    return q


def _encoded(
    q: NDArray[np.int16], image: tuple[int, int] | None, offsets: NDArray[np.int8] | None
) -> list[bytes]:
    """The kind, and the message, which is the shortest of those that there may be."""
    sums = ans.sums(q)
    signed = sums.negative > 0
    of, counts, under_dither = classes.Classes.of(sums), None, None
    if offsets is not None and dithered.may_tell(q.size, sums):
        under_dither, counts = dithered.encode(q, offsets, of)
    ways = [(_CLASSES, classes.encode(q, sums, of, counts))]
    if image is not None and neighbours.may_tell(q, *image, signed=signed):
        ways.append((_NEIGHBOURS, neighbours.encode(q, *image, signed=signed)))
    if under_dither is not None:
        ways.append((_DITHERED, under_dither))
    kinds, message = min(ways, key=lambda way: way[1].num_bytes)
    return [bytes([kinds[not signed]]), *message.parts()]


def _decoded(
    data: NDArray[np.uint8],
    shape: tuple[int, int],
    image: tuple[int, int] | None,
    offsets: NDArray[np.int8] | None,
) -> NDArray[np.int16]:
    """The inverse of `_encoded`."""
    kind = int(data[0]) if len(data) else None
    if kind in _CLASSES:
        return classes.decode(Reader(data), *shape, signed=kind == _CLASSES[0])
    if kind in _NEIGHBOURS and image is not None:
        return neighbours.decode(Reader(data), *shape, *image, signed=kind == _NEIGHBOURS[0])
    if kind in _DITHERED and offsets is not None:
        return dithered.decode(Reader(data), *shape, offsets)
    raise damaged(f"kind {kind}")
