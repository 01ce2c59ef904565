"""Bytes on the wire: tensors of a known layout in one flat uint8 buffer, behind a header or not.

Gradients between replicas are packed alone. The message of a cut is a header and then the payload.

The header says what a receiver cannot derive: whether the sender saw non-finite values; and
what it must agree with the receiver about: a checksum over layout, slots and their flags, and the
compression factor. Its fields, little-endian::

    0        1     2       3     4      8     12   16      24                  32
    version  kind  status  form  check  step  cf   length  sum over all bits

Payload tensors follow in the order of the layout, each aligned to its element size.

Most messages are as long as their layout says, and have a header of 16 bytes whose form is 0.
Where the length is known only after coding (`Compressor.variable_length`), the form is 1 and
eight bytes more say how long the message is, the header included. Its layout then is the longest
that it may have: so much is posted for it, but what is sent ends with the last tensor of the
payload, uint8 [n] of any n up to the layout's. Where every message is checked (form 3), it has its
length too, and a sum over all bits but its own (`mpcomp.core.bit_sum`). Both ends know beforehand
which of the three a message is.

The form of an activation for which no gradient is wanted has one bit more (4).

Where there is no gradient to send, a notice says so (`no_tensor`): a header alone, of a kind of its
own and always the same 16 bytes. It is refused where an activation is due.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mpcomp.core.bit_sum import bit_sum
from mpcomp.core.context import TensorMeta
from mpcomp.core.transfer import to_device

__all__ = [
    "CHECKED_HEADER_BYTES",
    "COMPRESSED",
    "DENSE",
    "FORMAT",
    "HEADER_BYTES",
    "LONG_HEADER_BYTES",
    "VERSION",
    "Form",
    "Header",
    "Parts",
    "Payload",
    "aligned_length",
    "apply_status",
    "byte_parts",
    "layout_check",
    "no_tensor",
    "pack",
    "packed_length",
    "says_constant",
    "says_no_tensor",
    "set_constant",
    "status_of",
    "unpack",
]

VERSION = 3
DENSE, COMPRESSED, _NO_TENSOR = 0, 1, 2
HEADER_BYTES = 16
LONG_HEADER_BYTES = 24  # where the length varies
CHECKED_HEADER_BYTES = 32  # where every message has a sum over its bits
_LONG, _CHECKED, _CONSTANT = 1, 2, 4  # bits of the form
_STATUS, _FORM = 2, 3  # positions of the bytes
_ALIGNED = 16  # bytes; no element is longer
_HEADER = struct.Struct("<BBBBIIf")
_LENGTH = struct.Struct("<Q")
_PREFIX = struct.Struct("<i")  # the length of a part that varies
_FP32 = struct.Struct("<f")
_NOTICE = _HEADER.pack(VERSION, _NO_TENSOR, 0, 0, zlib.crc32(b"no tensor"), 0, 0.0)
#: Numbers that ranks have in common if their messages have the same headers and notices.
FORMAT = (VERSION, zlib.crc32(_NOTICE))

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


def byte_parts(payload: Payload, start: int) -> tuple[list[Tensor], int]:
    """The tensors as uint8, from byte ``start`` of a message on, and where they end.

    Each is behind the zeros that align it; zeros, so that equal payloads are equal messages.
    Tensors of the host go to the accelerator where others lie there.
    """
    if len({part.device for part in payload}) > 1:
        payload = _together(payload)
    parts, end = [], start
    for part in payload:
        if gap := -end % part.dtype.itemsize:
            parts.append(torch.zeros(gap, dtype=torch.uint8, device=part.device))
        flat = part.reshape(-1)
        if flat.stride(0) != 1:  # which a single element may have, and be contiguous
            flat = flat.clone(memory_format=torch.contiguous_format)
        parts.append(flat.view(torch.uint8))
        end += gap + part.nbytes
    return parts, end


def _together(tensors: Iterable[Tensor]) -> Payload:
    """Tensors of the host and of an accelerator, all on that."""
    tensors = tuple(tensors)
    device = next(x.device for x in tensors if x.device.type != "cpu")
    return tuple(to_device(x, device) if x.device.type == "cpu" else x for x in tensors)


def aligned_length(layout: Sequence[TensorMeta]) -> int:
    """Bytes that `pack` gives; rounded up, so that such buffers behind each other are aligned."""
    return _aligned(packed_length(layout))


def _aligned(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


def pack(payloads: Iterable[Payload]) -> Tensor:
    """Payloads behind each other, uint8 [n] on their device."""
    payload = tuple(part for each in payloads for part in each)
    device = payload[0].device if payload else torch.device("cpu")
    parts, end = byte_parts(payload, 0)
    rest = torch.zeros(_aligned(end) - end, dtype=torch.uint8, device=device)
    return torch.cat([*parts, rest])


def unpack(buffer: Tensor, layout: Sequence[TensorMeta], start: int = 0) -> Payload:
    """The tensors, as views into the buffer."""
    return _views(buffer, layout, _offsets(layout, start)[0])


def _views(buffer: Tensor, layout: Sequence[TensorMeta], offsets: Sequence[int]) -> Payload:
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

    @functools.cached_property
    def layout(self) -> tuple[TensorMeta, ...]:
        """The layout of all together."""
        if not any(self.varies):
            return tuple(meta for layout in self.layouts for meta in layout)
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
                    length = bytearray(_PREFIX.pack(payload[-1].numel()))
                    tails.append(torch.frombuffer(length, dtype=torch.uint8).to(payload[-1].device))
                tails.append(payload[-1])
        if len({tail.device for tail in tails}) > 1:
            tails = [*_together(tails)]
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
            prefix = bytes(tails[start : start + self._prefix].tolist())
            start += self._prefix
            if start > tails.numel():
                raise RuntimeError(f"a message of {tails.numel()} bytes that was cut short")
            (length,) = _PREFIX.unpack(prefix)
        if not 0 <= length <= min(most, tails.numel() - start):
            raise RuntimeError(
                f"a part of {length} bytes in a message where at most "
                f"{min(most, tails.numel() - start)} are left: it is damaged, or the two ends have "
                "different methods"
            )
        return tails[start : start + length], start + length

    @functools.cached_property
    def _prefix(self) -> int:
        """Bytes before each tail."""
        return _PREFIX.size if sum(self.varies) > 1 else 0

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
        check: checksum over layout, slots and flags.
        step: number of the step, modulo 2^32.
        cf: compression factor that an adaptive link coded the message with, in fp32; 0 for a dense
            message, and where the method is fixed.
        version: of this format.
        length: bytes of the whole message where it says so, else None. Not compared, as who
            expects a message may not know it.
        checked: whether there is a sum over the message's bits.
    """

    kind: int
    status: int = 0
    check: int = 0
    step: int = 0
    cf: float = 0.0
    version: int = VERSION
    length: int | None = field(default=None, compare=False)
    checked: bool = False

    def __post_init__(self) -> None:
        if self.cf:  # as it travels, so that what arrives is equal to what is expected
            object.__setattr__(self, "cf", _FP32.unpack(_FP32.pack(self.cf))[0])

    @classmethod
    def of(cls, message: Tensor) -> Header:
        """Reads the header of a message (from an accelerator this waits for it).

        Raises:
            RuntimeError: there is none.
        """
        raw = bytes(message[:LONG_HEADER_BYTES].tolist())
        if len(raw) < HEADER_BYTES:
            raise RuntimeError(f"message of {len(raw)} bytes, which is no header")
        version, kind, status, form, check, step, cf = _HEADER.unpack_from(raw)
        length = None
        if form & _LONG and len(raw) == LONG_HEADER_BYTES:
            (length,) = _LENGTH.unpack_from(raw, HEADER_BYTES)
        return cls(kind, status, check, step, cf, version, length, bool(form & _CHECKED))


def set_constant(message: Tensor, *, checked: bool) -> None:
    """Writes into the header that no gradient of the tensor is wanted.

    Args:
        message: that was just framed.
        checked: as of its `Form`.
    """
    message[_FORM] |= _CONSTANT
    if checked:
        _seal(message)


def says_constant(message: Tensor) -> bool:
    """Whether a message says so (on an accelerator this waits for it)."""
    return bool(int(message[_FORM]) & _CONSTANT)


def status_of(message: Tensor) -> Tensor:
    """The header's status as a view of the message: uint8 [], nothing is waited for."""
    return message[_STATUS]


def apply_status(message: Tensor, x: Tensor) -> None:
    """Makes the tensor that a message says all NaN if its sender saw NaN or Inf."""
    if message.device.type != "cpu":
        x.masked_fill_(status_of(message).bool(), torch.nan)
    elif status_of(message):
        x.fill_(torch.nan)


def no_tensor(num_bytes: int = HEADER_BYTES) -> Tensor:
    """The notice that there is no tensor, uint8 [num_bytes] on the CPU, with zeros behind it."""
    return torch.frombuffer(bytearray(_NOTICE.ljust(num_bytes, b"\0")), dtype=torch.uint8)


def says_no_tensor(message: Tensor) -> bool:
    """Whether a message is that notice (on an accelerator this waits for it)."""
    return bytes(message[:HEADER_BYTES].tolist()) == _NOTICE


@functools.lru_cache(4096)
def layout_check(layout: tuple[TensorMeta, ...]) -> int:
    """A number of 32 bits that two ends have in common if they have the layout of a message."""
    return zlib.crc32(repr([(part.shape, str(part.dtype)) for part in layout]).encode())


class Form:
    """The form of a message, which both ends know before there is one.

    Args:
        layout: of the payload; where the length varies the longest, which ends with uint8 [n].
        variable: whether the length varies.
        checked: whether the header has a sum over all bits.

    Attributes:
        num_bytes: length of the message, header included; the most where it varies.
    """

    def __init__(
        self, layout: tuple[TensorMeta, ...], *, variable: bool = False, checked: bool = False
    ) -> None:
        self.layout, self.variable, self.checked = layout, variable, checked
        self._long = variable or checked
        self._header_bytes = LONG_HEADER_BYTES if self._long else HEADER_BYTES
        if checked:
            self._header_bytes = CHECKED_HEADER_BYTES
        self._offsets, self.num_bytes = _offsets(layout, self._header_bytes)

    @functools.cached_property
    def check(self) -> int:
        """The layout's `layout_check`."""
        return layout_check(self.layout)

    def frame(self, header: Header, payload: Payload, status: Tensor | int | None = None) -> Tensor:
        """Header and payload as one uint8 buffer where the payload lies.

        Args:
            header: of the message; what its form says of it is filled in here.
            payload: tensors of the layout, where the length varies the last one maybe shorter.
            status: in place of the header's; one element on the device, which is not waited for.
        """
        if self.variable:
            assert payload and payload[-1].dtype == torch.uint8 and payload[-1].dim() == 1
        parts, length = byte_parts(payload, self._header_bytes)
        raw = _HEADER.pack(
            header.version,
            header.kind,
            header.status,
            _LONG * self._long | _CHECKED * self.checked,
            header.check,
            header.step & 0xFFFFFFFF,
            header.cf,
        )
        if self._long:
            raw += _LENGTH.pack(length).ljust(self._header_bytes - HEADER_BYTES, b"\0")
        head = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if parts:
            head = head.to(parts[0].device, non_blocking=True)
        message = torch.cat([head, *parts])
        if status is not None:
            message[_STATUS] = status
        if self.checked:
            _seal(message)
        return message

    def payload(
        self, message: Tensor, expected: Header | None = None, device: torch.device | None = None
    ) -> Payload:
        """The payload as views into the message, or into a copy of it.

        Args:
            message: as long as the layout says. Where its length varies or it is checked, it may be
                a longer buffer that was posted for it. The rest of that buffer means nothing.
                Then its header is read, so an accelerator is waited for.
            expected: the header but for its status, where it is compared; on an accelerator only
                one that is read anyway.
            device: where the payload is put, in one copy, once the message was read; None for
                where the message lies.

        Raises:
            RuntimeError: the message is not as long as the layout, or its header, says, not the
                one that was sent, or not the expected one.
        """
        header = None
        if self._long:
            message, header = self._read(message)
        elif message.numel() != self.num_bytes:
            raise RuntimeError(
                f"message of {message.numel()} bytes where {self.num_bytes} were expected"
            )
        elif expected is not None and message.device.type == "cpu":
            header = Header.of(message)
        if header is not None and expected is not None:
            _check_header(header, expected)
        if device is not None:
            message = to_device(message, device)
        if not self.variable:
            return _views(message, self.layout, self._offsets)
        *offsets, start = self._offsets
        return (*_views(message, self.layout[:-1], offsets), message[start:])

    def _read(self, message: Tensor) -> tuple[Tensor, Header]:
        """The part of a buffer that was sent, and its header, where that says the length."""
        least = most = self.num_bytes
        if self.variable:
            last = self.layout[-1]
            assert last.dtype == torch.uint8 and len(last.shape) == 1
            least -= last.numel
        due = f"{least} to {most}" if self.variable else f"{most}"
        # What is checked may have come to a buffer with room for any message.
        if message.numel() < least or (message.numel() > most and not self.checked):
            raise RuntimeError(f"message of {message.numel()} bytes where {due} were expected")
        header = Header.of(message)
        if header.length is None:
            raise RuntimeError(
                f"message of {message.numel()} bytes that does not say its length, where one of "
                f"{due} bytes was expected: the two ends have different methods"
            )
        if not least <= header.length <= most:
            raise RuntimeError(
                f"message that says it has {header.length} bytes where {due} were expected: "
                "its header is damaged, or the two ends have different methods"
            )
        if header.length > message.numel():
            raise RuntimeError(
                f"message of {message.numel()} bytes that says it has {header.length}: it was cut "
                "short"
            )
        message = message[: header.length]
        if self.checked and not torch.equal(
            _sum_of(message), _bits_of(message).reshape(1).view(torch.uint8)
        ):
            raise RuntimeError(
                f"message of {header.length} bytes whose bits do not add up to what its sender has "
                "written: it was damaged or cut short on its way"
            )
        return message, header


def _check_header(found: Header, expected: Header) -> None:
    """Raises RuntimeError unless a header is the expected one but for its status."""
    if found.status != expected.status:
        expected = replace(expected, status=found.status)
    if found != expected:
        raise RuntimeError(
            f"the two ends disagree (message says {found}, this end expects {expected})"
        )


def _seal(message: Tensor) -> None:
    """Writes the sum over a message's bits into its header, when nothing else will change."""
    _sum_of(message).copy_(_bits_of(message).reshape(1).view(torch.uint8))


def _sum_of(message: Tensor) -> Tensor:
    return message[LONG_HEADER_BYTES:CHECKED_HEADER_BYTES]


def _bits_of(message: Tensor) -> Tensor:
    """Sum over all bits of a message but those of the sum itself, int64 []."""
    head = bit_sum(message[:LONG_HEADER_BYTES])
    return bit_sum(torch.stack([head, bit_sum(message[CHECKED_HEADER_BYTES:])]))
