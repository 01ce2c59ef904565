"""Sending the rows of a tensor that are not all zero, by another compressor, as a smaller tensor.

For the gradient of an embedding, which has rows of the batch's tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, Identity, or_dense, shrinks
from mpcomp.compressors.bits import decode_indices, encode_indices, index_bytes, nonzero
from mpcomp.core.context import WHOLE_NUMBERS, TensorMeta
from mpcomp.core.kernels import kernel
from mpcomp.core.spec import of_inner
from mpcomp.core.transfer import to_device
from mpcomp.core.wire import Payload, byte_parts, packed_length, unpack

__all__ = ["InRows", "nonzero_rows"]

_COUNT: Final = TensorMeta((1,), torch.int64)


class _Form(NamedTuple):
    """A message of so many rows.

    Attributes:
        coder: of the rows.
        meta: they themselves, as one row of all elements.
        layout: number of rows, which ones, and what the coder makes of them.
    """

    coder: Compressor
    meta: TensorMeta
    layout: tuple[TensorMeta, ...]


@dataclass(frozen=True)
class InRows(Compressor):
    """Sends which rows are not all zero, and those by ``inner``; all of them where that is shorter.

    What is left of a tensor may have other rows: those of the tensor itself are sent. So an error
    that is kept of a row waits until the row comes again.

    Args:
        inner: compressor of the rows, which are one tensor to it.
        num_rows: of the tensor, each with as many elements.
    """

    inner: Compressor
    num_rows: int
    variable_length = True

    def __str__(self) -> str:
        return str(self.inner)

    sends_dense = of_inner("sends_dense")
    contractive = of_inner("contractive")
    is_unbiased = of_inner("is_unbiased")
    draws = of_inner("draws")
    shares_choice = of_inner("shares_choice")

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return (TensorMeta((packed_length(self._form(self.num_rows, meta).layout),), torch.uint8),)

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        return self.compress_against(x, x, generator)

    def compress_against(
        self, x: Tensor, whole: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        meta = TensorMeta.of(x)
        rows = self._rows_of(whole)
        form = self._form(len(rows), meta)
        if not len(rows):
            return self._message(rows, ())
        taken, of_whole = self._take(x, rows), self._take(whole, rows)
        return self._message(rows, form.coder.compress_against(taken, of_whole, generator))

    def round_trip(
        self,
        x: Tensor,
        whole: Tensor,
        meta: TensorMeta,
        draw: Callable[[], torch.Generator | None],
    ) -> tuple[Payload, Tensor]:
        rows = self._rows_of(whole)
        form = self._form(len(rows), meta)
        if not len(rows):
            return self._message(rows, ()), self._put(None, rows, meta)
        taken, of_whole = self._take(x, rows), self._take(whole, rows)
        payload, said = form.coder.round_trip(taken, of_whole, form.meta, draw)
        return self._message(rows, payload), self._put(said, rows, meta)

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        (message,) = payload
        count, form = self._read(message, meta)
        _, index, *rest = unpack(message, form.layout)
        rows = decode_indices(index, self.num_rows, count)
        said = form.coder.decompress(tuple(rest), form.meta, generator) if count else None
        return self._put(said, rows, meta)

    # -- the message ----------------------------------------------------------------------------

    def _form(self, count: int, meta: TensorMeta) -> _Form:
        """The form of a message of so many rows, the longest where it varies."""
        every = count == self.num_rows
        numel = meta.numel if every else count * (meta.numel // self.num_rows)
        part = TensorMeta((1, numel), meta.dtype)
        coder: Compressor = Identity()
        if every:
            coder = or_dense(self.inner, part)  # which says so
        elif count and shrinks(self.inner, part):
            coder = self.inner
        index = TensorMeta((index_bytes(self.num_rows, count),), torch.uint8)
        return _Form(coder, part, (_COUNT, index, *(coder.layout(part) if count else ())))

    def _message(self, rows: Tensor, payload: Payload) -> Payload:
        count = to_device(torch.tensor([len(rows)]), rows.device)
        parts, _ = byte_parts((count, encode_indices(rows, self.num_rows), *payload), 0)
        return (torch.cat(parts),)

    def _read(self, message: Tensor, meta: TensorMeta) -> tuple[int, _Form]:
        """The number of rows in a message, and its form.

        Raises:
            RuntimeError: there is no such message.
        """
        length = message.numel()
        count = int(message[: _COUNT.dense_bytes].view(torch.int64)) if length >= 8 else -1
        if not 0 <= count <= self.num_rows:
            raise RuntimeError(
                f"a message of {length} bytes that says it has {count} rows of {self.num_rows}: it "
                "is damaged, or the two ends have different methods"
            )
        form = self._form(count, meta)
        least = most = packed_length(form.layout)
        if count and form.coder.variable_length:
            least -= form.layout[-1].numel
        if not least <= length <= most:
            raise RuntimeError(
                f"a message of {length} bytes where {count} rows have {least} to {most}: it is "
                "damaged, or the two ends have different methods"
            )
        if length < most:
            tail = TensorMeta((length - least,), torch.uint8)
            form = form._replace(layout=(*form.layout[:-1], tail))
        return count, form

    # -- rows -----------------------------------------------------------------------------------

    def _rows_of(self, whole: Tensor) -> Tensor:
        """Ascending positions of the rows to send, int64 [k]."""
        meta, found = TensorMeta.of(whole), nonzero_rows(self._split(whole))
        count = int(found.sum())
        some, all_ = (packed_length(self._form(k, meta).layout) for k in (count, self.num_rows))
        if some < all_:
            return nonzero(found, count)
        return torch.arange(self.num_rows, device=whole.device)

    def _split(self, x: Tensor) -> Tensor:
        return TensorMeta.of(x).flatten(x).reshape(self.num_rows, -1)

    def _take(self, x: Tensor, rows: Tensor) -> Tensor:
        """These rows of a tensor, [1, elements]."""
        split = self._split(x)
        return (split if len(rows) == self.num_rows else split[rows]).reshape(1, -1)

    def _put(self, said: Tensor | None, rows: Tensor, meta: TensorMeta) -> Tensor:
        """A tensor of these rows, and zeros elsewhere."""
        if said is not None and len(rows) == self.num_rows:
            return meta.unflatten(said)
        flat = torch.zeros(meta.numel, dtype=meta.dtype, device=rows.device)
        if said is not None:
            flat.view(self.num_rows, -1).index_copy_(0, rows, said.reshape(len(rows), -1))
        return meta.unflatten(flat)


def nonzero_rows(x: Tensor) -> Tensor:
    """Rows of a contiguous tensor [rows, n] that have a bit which is not zero: bool [rows].

    By bits, as what is left out comes back as 0, and not as -0.
    """
    numbers = x.view(WHOLE_NUMBERS[x.dtype.itemsize])
    begin = numbers[:, 0] != 0
    if bool(begin.all()):  # as of a head's gradient: nothing more is to be read
        return begin
    return rows_with_bits(numbers)


@kernel
def rows_with_bits(numbers: Tensor) -> Tensor:
    """Rows of whole numbers [rows, n] that are not all zero: bool [rows]."""
    return (numbers != 0).any(1)


@rows_with_bits.on("cpu")
def _rows_with_bits_on_cpu(numbers: Tensor) -> Tensor:
    # seven times as fast as torch's way here
    return torch.from_numpy(np.bitwise_or.reduce(numbers.numpy(), axis=1) != 0)
