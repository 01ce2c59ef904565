"""What travels: one flat uint8 buffer, a 16-byte header and then the payload.

The header says what a receiver cannot derive: whether the sender saw non-finite values; and
what it must agree with the receiver about: a checksum over slots and their flags, and the
compression factor. Its fields, little-endian::

    0        1     2       3         4      8     12
    version  kind  status  reserved  check  step  cf

Payload tensors follow in the order of the layout, each aligned to its element size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from mpcomp.core.packing import Payload, pack_into, packed_length, unpack
from mpcomp.core.tensor_meta import TensorMeta

__all__ = ["COMPRESSED", "DENSE", "HEADER_BYTES", "Header", "frame", "message_bytes", "unframe"]

VERSION = 2
DENSE, COMPRESSED = 0, 1
HEADER_BYTES = 16
_HEADER = struct.Struct("<BBBxIIf")
_FP32 = struct.Struct("<f")


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
    """

    kind: int
    status: int = 0
    check: int = 0
    step: int = 0
    cf: float = 0.0
    version: int = VERSION

    def __post_init__(self) -> None:
        # As it travels, so that what arrives is equal to what is expected.
        object.__setattr__(self, "cf", _FP32.unpack(_FP32.pack(self.cf))[0])

    def to_tensor(self) -> Tensor:
        """The header as uint8 [16] on the CPU."""
        raw = _HEADER.pack(
            self.version,
            self.kind,
            self.status,
            self.check,
            self.step & 0xFFFFFFFF,
            self.cf,
        )
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    @classmethod
    def of(cls, message: Tensor) -> Header:
        """Reads the header of a message (from an accelerator this waits for it)."""
        raw = bytes(message[:HEADER_BYTES].tolist())
        version, kind, status, check, step, cf = _HEADER.unpack(raw)
        return cls(kind, status, check, step, cf, version)


def message_bytes(layout: tuple[TensorMeta, ...]) -> int:
    """Length of a message with this layout, header included."""
    return packed_length(layout, HEADER_BYTES)


def frame(header: Header, payload: Payload) -> Tensor:
    """Header and payload as one uint8 buffer on the payload's device."""
    device = payload[0].device if payload else torch.device("cpu")
    length = message_bytes(tuple(TensorMeta.of(part) for part in payload))
    message = torch.empty(length, dtype=torch.uint8, device=device)
    message[:HEADER_BYTES] = header.to_tensor().to(device, non_blocking=True)
    pack_into(message, payload, HEADER_BYTES)
    return message


def unframe(message: Tensor, layout: tuple[TensorMeta, ...]) -> Payload:
    """The payload as views into the message.

    Raises:
        RuntimeError: the message is not as long as the layout says.
    """
    length = message_bytes(layout)
    if message.numel() != length:
        raise RuntimeError(f"message of {message.numel()} bytes where {length} were expected")
    return unpack(message, layout, HEADER_BYTES)
