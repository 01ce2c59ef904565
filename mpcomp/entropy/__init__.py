"""Entropy coding of small integers, most of them zero or near it."""

from mpcomp.entropy.coding import KINDS, LARGEST, decode, encode, max_bytes
from mpcomp.entropy.counting import count_bytes
from mpcomp.entropy.dithered import PARTS

__all__ = ["KINDS", "LARGEST", "PARTS", "count_bytes", "decode", "encode", "max_bytes"]
