"""Pure functions on one tensor: what goes on the wire."""

from mpcomp.compressors.base import Compressor, Payload, Selecting
from mpcomp.compressors.cast import Cast
from mpcomp.compressors.fixedpoint import FixedPoint
from mpcomp.compressors.identity import Identity
from mpcomp.compressors.quantize import Quantize
from mpcomp.compressors.random import RandomBlock, RandomK
from mpcomp.compressors.same_indices import SameIndices
from mpcomp.compressors.sign import Sign
from mpcomp.compressors.topk import TopK

__all__ = [
    "Cast",
    "Compressor",
    "FixedPoint",
    "Identity",
    "Payload",
    "Quantize",
    "RandomBlock",
    "RandomK",
    "SameIndices",
    "Selecting",
    "Sign",
    "TopK",
]
