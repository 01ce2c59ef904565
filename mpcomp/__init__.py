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
from mpcomp.optim import clip_grad_norm_
from mpcomp.parsing import parse
from mpcomp.pipe import Pipeline
from mpcomp.tensor_meta import TensorMeta

__all__ = [
    "AQSGD",
    "EF21",
    "Boundary",
    "Cast",
    "Compressor",
    "EFMixed",
    "ErrorFeedback",
    "Feedback",
    "FixedPoint",
    "Identity",
    "Link",
    "Pipeline",
    "Quantize",
    "RandomBlock",
    "RandomK",
    "SameIndices",
    "Sign",
    "TensorMeta",
    "TopK",
    "clip_grad_norm_",
    "parse",
    "pipeline",
]
