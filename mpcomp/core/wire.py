"""Bytes on the wire: tensors of a known layout in one flat uint8 buffer, behind a header or not.

Gradients between replicas are packed alone. The message of a cut is a header and then the payload.

The header says what a receiver cannot derive: whether the sender saw non-finite values; and
what it must agree with the receiver about: a checksum over slots and their flags, and the
compression factor. Its fields, little-endian::

    0        1     2       3       4      8     12      16
    version  kind  status  varies  check  step  cf      length (where it varies)

Payload tensors follow in the order of the layout, each aligned to its element size.

Most messages are as long as their layout says, and have a header of 16 bytes whose byte 3 is 0.
Where the length is known only after coding (`Compressor.variable_length`), that byte is 1 and
eight more say how long the message is, the header included. Its layout then is the longest that
it may have: so much is posted for it, but what is sent ends with the last tensor of the payload,
uint8 [n] of any n up to the layout's. Both ends know beforehand which of the two a message is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mpcomp.core.tensor_meta import TensorMeta

__all__ = [
    "COMPRESSED",
    "DENSE",
    "HEADER_BYTES",
    "LONG_HEADER_BYTES",
    "Header",
    "Parts",
    "Payload",
    "aligned_length",
    "frame",
    "message_bytes",
    "pack",
    "pack_into",
    "packed_length",
    "set_status",
    "status_of",
    "unframe",
    "unpack",
]

VERSION = 2
DENSE, COMPRESSED = 0, 1
HEADER_BYTES = 16
LONG_HEADER_BYTES = 24  # where the length varies
_STATUS = 2  # position of the byte
_ALIGNED = 16  # bytes; no element is longer
_HEADER = struct.Struct("<BBBBIIf")
_LENGTH = struct.Struct("<Q")
_FP32 = struct.Struct("<f")

#: The wire tensors of one message.
Payload = tuple[Tensor, ...]


def _offsets(layout: Sequence[TensorMeta], start: int) -> tuple[list[int], int]:
    """The first byte of each tensor, and the end of the last one."""
    offsets, end = [], start
    for part in layout:
        end += -end % part.dtype.itemsize
        offsets.append(end)
        end += part.dense_bytes
    return offsets, end


def packed_length(layout: Sequence[TensorMeta], start: int = 0) -> int:
    """The end of tensors of this layout that are packed from byte ``start`` on."""
    return _offsets(layout, start)[1]


def pack_into(buffer: Tensor, payload: Payload, start: int = 0) -> int:
    """Writes the tensors into a uint8 buffer from byte ``start`` on; returns where they end."""
    offsets, length = _offsets([TensorMeta.of(part) for part in payload], start)
    end = start
    for part, offset in zip(payload, offsets, strict=True):
        buffer[end:offset] = 0  # padding, so that equal payloads are equal messages
        end = offset + part.numel() * part.element_size()
        buffer[offset:end].view(part.dtype).copy_(part.reshape(-1))
    return length


def aligned_length(layout: Sequence[TensorMeta]) -> int:
    """Bytes that `pack` gives; rounded up, so that such buffers behind each other are aligned."""
    return -(-packed_length(layout) // _ALIGNED) * _ALIGNED


def pack(payloads: Iterable[Payload]) -> Tensor:
    """Payloads behind each other, uint8 [n] on their device."""
    payload = tuple(part for each in payloads for part in each)
    length = aligned_length([TensorMeta.of(part) for part in payload])
    device = payload[0].device if payload else torch.device("cpu")
    buffer = torch.empty(length, dtype=torch.uint8, device=device)
    buffer[pack_into(buffer, payload) :] = 0
    return buffer


def unpack(buffer: Tensor, layout: Sequence[TensorMeta], start: int = 0) -> Payload:
    """The tensors, as views into the buffer."""
    offsets, _ = _offsets(layout, start)
    return tuple(
        buffer[offset : offset + part.dense_bytes].view(part.dtype).reshape(part.shape)
        for part, offset in zip(layout, offsets, strict=True)
    )


# -- several payloads in one message ---------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Payloads of one message, of which any may vary in length.

    Tensors of known sizes come first, part by part. The last tensors of parts that vary, uint8 [n],
    are one at the end: of a single such part as it is, of several each behind its length (uint32,
    little-endian).

    Attributes:
        layouts: of each part, the longest where it varies.
        varies: whether each does.
    """

    layouts: tuple[tuple[TensorMeta, ...], ...]
    varies: tuple[bool, ...]

    @property
    def layout(self) -> tuple[TensorMeta, ...]:
        """The layout of all together."""
        known = [meta for meta, last in self._marked() if not last]
        tails = [meta for meta, last in self._marked() if last]
        if tails:
            room = sum(tail.numel for tail in tails) + self._prefix * len(tails)
            known.append(TensorMeta((room,), torch.uint8))
        return tuple(known)

    def joined(self, payloads: Sequence[Payload]) -> Payload:
        """One payload of all parts'."""
        if not any(self.varies):
            return tuple(part for payload in payloads for part in payload)
        known: list[Tensor] = []
        tails: list[Tensor] = []
        for payload, varies in zip(payloads, self.varies, strict=True):
            known += payload[:-1] if varies else payload
            if varies:
                if self._prefix:
                    length = torch.tensor([payload[-1].numel()], dtype=torch.int32)
                    tails.append(length.view(torch.uint8).to(payload[-1].device))
                tails.append(payload[-1])
        return (*known, tails[0] if len(tails) == 1 else torch.cat(tails))

    def parted(self, payload: Payload) -> list[Payload]:
        """Each part's payload, of one that `joined` gave.

        Raises:
            RuntimeError: the lengths in it are not those of what there is.
        """
        at, start = 0, 0
        found = []
        for layout, varies in zip(self.layouts, self.varies, strict=True):
            count = len(layout) - varies
            part = payload[at : at + count]
            at += count
            if varies:
                tail, start = self._tail(payload[-1], start, layout[-1].numel)
                part = (*part, tail)
            found.append(part)
        if any(self.varies) and start != payload[-1].numel():
            raise RuntimeError(
                f"a message of {payload[-1].numel()} bytes of which its parts say {start}: it is "
                "damaged, or the two ends have different methods"
            )
        return found

    def _tail(self, tails: Tensor, start: int, most: int) -> tuple[Tensor, int]:
        """The tail that begins there, and where it ends."""
        length = tails.numel()
        if self._prefix:
            prefix = tails[start : start + self._prefix].cpu()
            start += self._prefix
            if start > tails.numel():
                raise RuntimeError(f"a message of {tails.numel()} bytes that was cut short")
            # A copy, as a view needs an address that is a multiple of four.
            length = int(prefix.clone().view(torch.int32))
        if not 0 <= length <= min(most, tails.numel() - start):
            raise RuntimeError(
                f"a part of {length} bytes in a message where at most "
                f"{min(most, tails.numel() - start)} are left: it is damaged, or the two ends have "
                "different methods"
            )
        return tails[start : start + length], start + length

    @property
    def _prefix(self) -> int:
        """Bytes before each tail."""
        return 4 if sum(self.varies) > 1 else 0

    def _marked(self) -> Iterator[tuple[TensorMeta, bool]]:
        """Each tensor, and whether it varies in length."""
        for layout, varies in zip(self.layouts, self.varies, strict=True):
            for place, meta in enumerate(layout, 1):
                yield meta, varies and place == len(layout)


@dataclass(frozen=True)
class Header:
    """The header's fields.

    Attributes:
        kind: DENSE or COMPRESSED.
        status: 0, or 1 if the tensor had non-finite values.
        check: checksum over slots and flags.
        step: number of the step, modulo 2^32.
        cf: compression factor that an adaptive link coded the message with, in fp32; 0 for a dense
            message, and where the method is fixed.
        version: of this format.
        length: bytes of the whole message where that varies, else None. Not compared, as who
            expects a message does not know it.
    """

    kind: int
    status: int = 0
    check: int = 0
    step: int = 0
    cf: float = 0.0
    version: int = VERSION
    length: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # As it travels, so that what arrives is equal to what is expected.
        object.__setattr__(self, "cf", _FP32.unpack(_FP32.pack(self.cf))[0])

    def to_tensor(self) -> Tensor:
        """The header as uint8 [16], or [24] where the length varies, on the CPU."""
        raw = _HEADER.pack(
            self.version,
            self.kind,
            self.status,
            self.length is not None,
            self.check,
            self.step & 0xFFFFFFFF,
            self.cf,
        )
        if self.length is not None:
            raw += _LENGTH.pack(self.length)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    @classmethod
    def of(cls, message: Tensor) -> Header:
        """Reads the header of a message (from an accelerator this waits for it)."""
        raw = bytes(message[:LONG_HEADER_BYTES].tolist())
        version, kind, status, varies, check, step, cf = _HEADER.unpack_from(raw)
        length = None
        if varies and len(raw) == LONG_HEADER_BYTES:
            (length,) = _LENGTH.unpack_from(raw, HEADER_BYTES)
        return cls(kind, status, check, step, cf, version, length)


def set_status(message: Tensor, status: Tensor | int) -> None:
    """Writes the header's status, 0 or 1; a flag of one element on the device is not waited for."""
    message[_STATUS] = status


def status_of(message: Tensor) -> Tensor:
    """The header's status as a view of the message: uint8 [], nothing is waited for."""
    return message[_STATUS]


def message_bytes(layout: tuple[TensorMeta, ...], *, variable: bool = False) -> int:
    """Length of a message with this layout, header included; the largest where it varies."""
    return packed_length(layout, LONG_HEADER_BYTES if variable else HEADER_BYTES)


def frame(header: Header, payload: Payload, *, variable: bool = False) -> Tensor:
    """Header and payload as one uint8 buffer on the payload's device.

    Args:
        header: of the message; its length is filled in here.
        payload: tensors of the layout, where the length varies the last one maybe shorter.
        variable: whether it does.
    """
    device = payload[0].device if payload else torch.device("cpu")
    length = message_bytes(tuple(map(TensorMeta.of, payload)), variable=variable)
    if variable:
        assert payload and payload[-1].dtype == torch.uint8 and payload[-1].dim() == 1
        header = replace(header, length=length)
    message = torch.empty(length, dtype=torch.uint8, device=device)
    head = header.to_tensor()
    message[: head.numel()] = head.to(device, non_blocking=True)
    pack_into(message, payload, head.numel())
    return message


def unframe(message: Tensor, layout: tuple[TensorMeta, ...], *, variable: bool = False) -> Payload:
    """The payload as views into the message.

    Args:
        message: as long as the layout says. Where its length varies: what was sent, or the buffer
            that was posted for it, of which the end then has no meaning.
        layout: of the payload, the largest where it varies.
        variable: whether it does; then the header is read, so an accelerator is waited for.

    Raises:
        RuntimeError: the message is not as long as the layout, or its header, says.
    """
    most = message_bytes(layout, variable=variable)
    if not variable:
        if message.numel() != most:
            raise RuntimeError(f"message of {message.numel()} bytes where {most} were expected")
        return unpack(message, layout, HEADER_BYTES)
    last = layout[-1]
    assert last.dtype == torch.uint8 and len(last.shape) == 1
    least = most - last.numel
    if not least <= message.numel() <= most:
        raise RuntimeError(
            f"message of {message.numel()} bytes where {least} to {most} were expected"
        )
    length = Header.of(message).length
    if length is None:
        raise RuntimeError(
            f"message of {message.numel()} bytes that does not say its length, where one of "
            f"{least} to {most} bytes was expected: the two ends have different methods"
        )
    if not least <= length <= most:
        raise RuntimeError(
            f"message that says it has {length} bytes where {least} to {most} were expected: "
            "its header is damaged, or the two ends have different methods"
        )
    if length > message.numel():
        raise RuntimeError(
            f"message of {message.numel()} bytes that says it has {length}: it was cut short"
        )
    sent = (*layout[:-1], TensorMeta((length - least,), torch.uint8))
    return unpack(message, sent, LONG_HEADER_BYTES)
