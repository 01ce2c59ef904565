"""mpcomp: model-parallel training over slow links, with compressed cuts.

pipe = mpcomp.pipeline(model, chunks=8, split=4, act_comp="topk:0.1", grad_comp="topk:0.2",
                       loss_fn=F.cross_entropy)
loss = pipe.forward_backward(x, y)
"""

from mpcomp.adaptive.method import Adaptive
from mpcomp.api.build import pipeline
from mpcomp.api.grad_norm import clip_grad_norm_
from mpcomp.api.pipeline import Pipeline
from mpcomp.comm.failures import PeerError
from mpcomp.compressors import (
    QSGD,
    Cast,
    Compressor,
    FixedPoint,
    Identity,
    LowRank,
    MeanValue,
    MultiLevel,
    OneBitColumns,
    Quantize,
    RandomBlock,
    RandomK,
    RedSyncTopK,
    SameIndices,
    SameSign,
    SampledTopK,
    Sign,
    TopK,
)
from mpcomp.core.loss import CausalLMLoss
from mpcomp.core.spec import parse
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.data_parallel.accordion import Accordion
from mpcomp.data_parallel.compress import CompressedGradients, compress_gradients
from mpcomp.data_parallel.dgc import DGC, RedSync
from mpcomp.data_parallel.gravac import GraVAC
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.onebit import OneBit
from mpcomp.data_parallel.powersgd import PowerSGD
from mpcomp.data_parallel.sampler import ReplicaSampler
from mpcomp.feedback import AQSGD, EF21, ConEF, EFMixed, ErrorFeedback, Feedback
from mpcomp.links.boundary import Boundary
from mpcomp.links.link import Link
from mpcomp.version import __version__

__all__ = [
    "AQSGD",
    "DGC",
    "EF21",
    "QSGD",
    "Accordion",
    "Adaptive",
    "Boundary",
    "Cast",
    "CausalLMLoss",
    "CompressedGradients",
    "Compressor",
    "ConEF",
    "EFMixed",
    "ErrorFeedback",
    "Feedback",
    "FixedPoint",
    "GraVAC",
    "Identity",
    "Link",
    "LowRank",
    "MeanValue",
    "MultiLevel",
    "OneBit",
    "OneBitColumns",
    "PeerError",
    "Pipeline",
    "PowerSGD",
    "Quantize",
    "RandomBlock",
    "RandomK",
    "RedSync",
    "RedSyncTopK",
    "ReplicaNetwork",
    "ReplicaSampler",
    "SameIndices",
    "SameSign",
    "SampledTopK",
    "Sign",
    "TensorMeta",
    "TopK",
    "__version__",
    "clip_grad_norm_",
    "compress_gradients",
    "parse",
    "pipeline",
]
