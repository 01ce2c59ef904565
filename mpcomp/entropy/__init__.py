"""Entropy coding of small integers, most of them zero or near it."""

from mpcomp.entropy.coding import (
    KINDS,
    LARGEST,
    decode,
    decode_to,
    encode,
    encode_tensor,
    max_bytes,
)
from mpcomp.entropy.counting import count_bytes
from mpcomp.entropy.dithered import PARTS

__all__ = [
    "KINDS",
    "LARGEST",
    "PARTS",
    "count_bytes",
    "decode",
    "decode_to",
    "encode",
    "encode_tensor",
    "max_bytes",
]
