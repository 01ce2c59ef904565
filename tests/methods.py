"""Every compressor and feedback method, in the settings that the laws are tested over.

The lists are keyed by class, and `test_registry.py` fails for a class that has no entry here, so
a new method is under all laws from its first day.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mpcomp import (
    AQSGD,
    DGC,
    ECSQ,
    EF21,
    KLT,
    QSGD,
    Accordion,
    Adaptive,
    Cast,
    Compressor,
    ConEF,
    EFMixed,
    ErrorFeedback,
    Feedback,
    FixedPoint,
    GraVAC,
    Identity,
    LloydMax,
    LocalSGD,
    LowRank,
    MeanValue,
    MultiLevel,
    OneBit,
    OneBitColumns,
    PowerSGD,
    Quantize,
    RandomBlock,
    RandomK,
    RedSync,
    RedSyncTopK,
    Rotate,
    SameIndices,
    SameSign,
    SampledTopK,
    Sign,
    TensorMeta,
    TopK,
)
from mpcomp.compressors import Selecting
from mpcomp.core.spec import SpecValue

EXAMPLES: dict[type[SpecValue], list[SpecValue]] = {
    Identity: [Identity()],
    Cast: [Cast(dtype) for dtype in ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")],
    TopK: [
        TopK(0.1),
        TopK(0.3, scope="row"),
        TopK(0.02, scope="tensor"),
        TopK(1.0),
        TopK(0.2, values=Cast("fp16")),
        TopK(0.1, values=Quantize(8)),
        TopK(0.3, values=Quantize(4, scale="sample", rounding="stochastic")),
        TopK(0.3, scope="tensor", values=Sign()),
    ],
    RandomK: [RandomK(0.1), RandomK(0.3, unbiased=True), RandomK(0.2, values=Quantize(8))],
    RandomBlock: [RandomBlock(0.1), RandomBlock(0.4, unbiased=True, values=Cast("bf16"))],
    SampledTopK: [
        SampledTopK(0.1),
        SampledTopK(0.02, sample=0.5),
        SampledTopK(0.2, values=Quantize(8)),
    ],
    RedSyncTopK: [
        RedSyncTopK(0.1),
        RedSyncTopK(0.02, search="binary"),
        RedSyncTopK(0.3, values=Cast("fp16")),
    ],
    SameSign: [SameSign(0.1), SameSign(0.3, sign="positive"), SameSign(0.05, sign="negative")],
    MeanValue: [MeanValue()],
    MultiLevel: [
        MultiLevel(TopK(0.3), 0.1),
        MultiLevel(TopK(0.5, values=Cast("fp16")), 0.2),
        MultiLevel(SampledTopK(0.4, sample=0.5), 0.02),
        MultiLevel(RandomK(0.5), 0.2),
        MultiLevel(RandomK(0.5, unbiased=True, values=Quantize(8)), 0.3),
        MultiLevel(RandomBlock(0.4), 0.4),
        MultiLevel(RedSyncTopK(0.3, search="binary"), 0.05),
        MultiLevel(SameSign(0.3), 0.1),
    ],
    Quantize: [
        *(Quantize(bits) for bits in range(1, 9)),
        Quantize(2, mode="maxabs"),
        Quantize(4, rounding="stochastic"),
        Quantize(4, scale="sample"),
        Quantize(3, scale="channel"),
        Quantize(4, scale="token"),
        Quantize(2, scale="token", mode="minmax", rounding="stochastic"),
        Quantize(4, scale=16),
        Quantize(5, scale=7, mode="minmax", rounding="stochastic"),
    ],
    LloydMax: [
        *(LloydMax(bits) for bits in (1, 2, 5, 8)),
        LloydMax(3, scale="tensor"),
        LloydMax(4, scale="channel"),
        LloydMax(2, scale=7),
    ],
    Rotate: [
        Rotate(Quantize(4, scale="token")),
        Rotate(Quantize(3, scale=16, rounding="stochastic"), seed=7),
        Rotate(LloydMax(2)),
        Rotate(TopK(0.3, scope="row", values=Cast("bf16"))),
        Rotate(RandomK(0.3, unbiased=True)),
        Rotate(ECSQ(0.5)),
    ],
    FixedPoint: [FixedPoint(1), FixedPoint(4), FixedPoint(7, scale="tensor")],
    QSGD: [QSGD(2), QSGD(4), QSGD(4, group=16), QSGD(8, group=7)],
    OneBitColumns: [OneBitColumns()],
    LowRank: [LowRank(1), LowRank(2, iterations=0)],
    Sign: [Sign(), Sign("sample"), Sign("channel"), Sign("token"), Sign(24)],
    ECSQ: [
        ECSQ(0.5),
        ECSQ(0.35, centre=True),
        ECSQ(0.5, centre=True, spikes=16),
        ECSQ(0.02, dead_zone=0.75),
        ECSQ(2.0, scale="tensor"),
        ECSQ(2.0, scale="tensor", rounding="dither"),
    ],
    SameIndices: [SameIndices(), SameIndices(Cast("fp16"))],
    Adaptive: [  # whose clock is not the wall's, so that runs repeat
        Adaptive(TopK(0.1), cf=(2.0, 8.0), eps=0.4, window=2, bandwidth_mbps=1.0),
        Adaptive(
            ErrorFeedback(RandomK(0.1)),
            cf=(2.0, 4.0),
            eps=0.2,
            window=2,
            policy="geometric",
            smoothing=0.5,
            bandwidth_mbps=1.0,
            latency_ms=0.5,
        ),
        Adaptive(EF21(TopK(0.1)), cf=(3.0, 9.0), eps=0.3, window=2, bandwidth_mbps=1.0),
        Adaptive(Quantize(4, scale="sample"), cf=(4.0, 16.0), window=3, gain="centred", budget=0.3),
    ],
    ErrorFeedback: [
        ErrorFeedback(TopK(0.1)),
        ErrorFeedback(Quantize(2, rounding="stochastic"), eval="raw"),
        ErrorFeedback(RandomK(0.2), storage="bf16"),
        ErrorFeedback(Sign(), storage="fp16", location="cpu"),
        ErrorFeedback(LowRank(1)),
        ErrorFeedback(SampledTopK(0.2)),
    ],
    ConEF: [
        ConEF(TopK(0.1)),
        ConEF(RandomBlock(0.2), 0.4, storage="bf16"),
        ConEF(Quantize(4, rounding="stochastic"), 0.6, beta=0.5, eval="raw"),
        ConEF(TopK(0.2, values=Quantize(8)), 0.3, hash="murmur", location="cpu"),
        ConEF(LowRank(1), 1.0, beta=0.0),
    ],
    EFMixed: [EFMixed(TopK(0.2)), EFMixed(TopK(0.2), second="remainder")],
    EF21: [
        EF21(TopK(0.1)),
        EF21(TopK(0.2, values=Quantize(8)), first=Quantize(8)),
        EF21(Quantize(4, rounding="stochastic"), storage="bf16"),
        EF21(TopK(0.3), storage=8, eval="raw"),
        EF21(ECSQ(0.5), eval=ECSQ(0.2)),
        EF21(LowRank(1)),
    ],
    AQSGD: [
        AQSGD(Quantize(4)),
        AQSGD(Quantize(4, rounding="stochastic"), storage="fp16"),
        AQSGD(TopK(0.3), first=Quantize(8), storage=4),
        AQSGD(ECSQ(0.3), first=ECSQ(0.3, centre=True)),
        AQSGD(ECSQ(0.2, dead_zone=0.7), first=ECSQ(0.3), storage="bf16"),
        AQSGD(Quantize(8, scale="sample"), location="cpu", cap_bytes=2000),
        AQSGD(ECSQ(0.3, dead_zone=0.7), first=ECSQ(0.3), along=ECSQ(1.0)),
        AQSGD(Quantize(4), along=Cast("bf16"), storage=8),
    ],
    KLT: [KLT(ECSQ(0.5)), KLT(ECSQ(0.2, centre=True)), KLT(ECSQ(1.0, rounding="dither"))],
}

#: Methods between replicas, which no cut takes: tests/data_parallel has their laws.
BETWEEN_REPLICAS: dict[type[SpecValue], list[SpecValue]] = {
    GraVAC: [
        GraVAC(TopK(0.1)),
        GraVAC(RandomK(0.5), cf=(2.0, 100.0), eps=0.9, window=20, policy="geometric"),
    ],
    Accordion: [
        Accordion(TopK(0.99), TopK(0.1), interval=100),
        Accordion(PowerSGD(2), PowerSGD(1), interval=10, threshold=0.2),
    ],
    DGC: [DGC(0.001), DGC(0.01, warmup_steps=40, nesterov=True, values=Cast("fp16"))],
    RedSync: [RedSync(0.001), RedSync(0.01, same_sign=True)],
    OneBit: [OneBit(), OneBit(storage="fp16")],
    PowerSGD: [PowerSGD(2), PowerSGD(4, feedback=False)],
    LocalSGD: [
        LocalSGD(30),
        LocalSGD(30, ErrorFeedback(TopK(0.02, values=Quantize(2)), decay=0.95), parts=3),
    ],
}

ALL = [
    v for examples in (EXAMPLES, BETWEEN_REPLICAS) for values in examples.values() for v in values
]
COMPRESSORS: list[Compressor] = [value for value in ALL if isinstance(value, Compressor)]
SELECTING = [value for value in COMPRESSORS if isinstance(value, Selecting)]
FEEDBACK: list[Feedback] = [value for value in ALL if isinstance(value, Feedback)]


def beside(act: object, otherwise: object) -> object:
    """A method of gradients for one of activations: ``otherwise``, or the memory that it needs."""
    looks = isinstance(act, AQSGD) and act.looks_at_gradients
    return replace(act, along=None) if looks else otherwise


FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def drawn(seed: int = 0) -> torch.Generator:
    """A generator, equal for equal seeds: what the two ends of a link are given."""
    return torch.Generator().manual_seed(seed)


def round_trip(compressor: Compressor, x: Tensor, seed: int = 0) -> Tensor:
    """What arrives for ``x``."""
    payload = compressor.compress(x, drawn(seed))
    return compressor.decompress(payload, TensorMeta.of(x), drawn(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit (of NaN and -0.0 too)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    fresh = (t.detach().cpu().clone(memory_format=torch.contiguous_format) for t in (a, b))
    raw = (t.reshape(-1).view(torch.uint8) for t in fresh)
    return torch.equal(*raw)


def varies(method: SpecValue) -> bool:
    """Whether the length of a method's message is known only after coding."""
    coder = method.inner if isinstance(method, Feedback) else method
    return coder.variable_length


def epsilon(dtype: torch.dtype) -> float:
    """Relative rounding of what is computed in fp32 and handed over in ``dtype``."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
