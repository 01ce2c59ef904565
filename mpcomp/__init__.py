"""mpcomp: model-parallel training over slow links, with compressed cuts.

pipe = mpcomp.pipeline(model, chunks=8, split=4, act_comp="topk:0.1", grad_comp="topk:0.2",
                       loss_fn=F.cross_entropy)
loss = pipe.forward_backward(x, y)
"""

from mpcomp.api import pipeline
from mpcomp.boundary import Boundary
from mpcomp.compressors import (
    Cast,
    Compressor,
    FixedPoint,
    Identity,
    Quantize,
    RandomBlock,
    RandomK,
    SameIndices,
    Sign,
    TopK,
)
from mpcomp.feedback import AQSGD, EF21, EFMixed, ErrorFeedback, Feedback
from mpcomp.link import Link
from mpcomp.loss import CausalLMLoss
from mpcomp.network.faults import PeerError
from mpcomp.optim import clip_grad_norm_
from mpcomp.parsing import parse
from mpcomp.pipe import Pipeline
from mpcomp.replicas import ReplicaSampler
from mpcomp.tensor_meta import TensorMeta
from mpcomp.version import __version__

__all__ = [
    "AQSGD",
    "EF21",
    "Boundary",
    "Cast",
    "CausalLMLoss",
    "Compressor",
    "EFMixed",
    "ErrorFeedback",
    "Feedback",
    "FixedPoint",
    "Identity",
    "Link",
    "PeerError",
    "Pipeline",
    "Quantize",
    "RandomBlock",
    "RandomK",
    "ReplicaSampler",
    "SameIndices",
    "Sign",
    "TensorMeta",
    "TopK",
    "__version__",
    "clip_grad_norm_",
    "parse",
    "pipeline",
]
