"""Entropy coding of small integers, most of them zero or near it."""

from mpcomp.entropy.coding import LARGEST, decode, encode, max_bytes

__all__ = ["LARGEST", "decode", "encode", "max_bytes"]
