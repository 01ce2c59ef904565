"""Pure functions on one tensor: what goes on the wire."""

from mpcomp.compressors.base import Compressor, Identity, Selecting
from mpcomp.compressors.cast import Cast
from mpcomp.compressors.ecsq import ECSQ
from mpcomp.compressors.fixedpoint import FixedPoint
from mpcomp.compressors.klt import KLT
from mpcomp.compressors.lloyd import LloydMax
from mpcomp.compressors.lowrank import LowRank
from mpcomp.compressors.multi_level import MultiLevel
from mpcomp.compressors.onebit import OneBitColumns
from mpcomp.compressors.qsgd import QSGD
from mpcomp.compressors.quantize import Quantize
from mpcomp.compressors.random import RandomBlock, RandomK
from mpcomp.compressors.rotate import Rotate
from mpcomp.compressors.same_indices import SameIndices
from mpcomp.compressors.same_sign import MeanValue, SameSign
from mpcomp.compressors.sign import Sign
from mpcomp.compressors.threshold import RedSyncTopK, SampledTopK
from mpcomp.compressors.topk import TopK
from mpcomp.core.spec import import_all

__all__ = [
    "ECSQ",
    "KLT",
    "QSGD",
    "Cast",
    "Compressor",
    "FixedPoint",
    "Identity",
    "LloydMax",
    "LowRank",
    "MeanValue",
    "MultiLevel",
    "OneBitColumns",
    "Quantize",
    "RandomBlock",
    "RandomK",
    "RedSyncTopK",
    "Rotate",
    "SameIndices",
    "SameSign",
    "SampledTopK",
    "Selecting",
    "Sign",
    "TopK",
]

import_all(__name__, __path__)
