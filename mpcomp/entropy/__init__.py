"""Entropy coding of small integers, most of them zero or near it."""

from mpcomp.entropy.coding import LARGEST, decode, encode, max_bytes
from mpcomp.entropy.dithered import PARTS

__all__ = ["LARGEST", "PARTS", "decode", "encode", "max_bytes"]
