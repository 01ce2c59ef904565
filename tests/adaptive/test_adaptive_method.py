"""The value `Adaptive`: its spec, its ladder, and what it refuses."""

import pytest
import torch.nn.functional as F
from models import MLP_SPLIT, mlp

import mpcomp
from mpcomp import (
    AQSGD,
    EF21,
    Adaptive,
    EFMixed,
    ErrorFeedback,
    Quantize,
    RandomBlock,
    SameIndices,
    Sign,
    TopK,
    parse,
)


def test_spec():
    method = parse("adaptive:cf=2-50:eps=0.8:window=20+ef21+topk:0.1+quant:8")
    inner = EF21(TopK(0.1, values=Quantize(8)))
    assert method == Adaptive(inner, cf=(2, 50), eps=0.8, window=20)
    assert str(method) == "adaptive:eps=0.8:window=20+ef21+topk:0.1+quant:8"  # cf is the default


def test_the_method_at_a_cf():
    assert Adaptive(TopK(0.1)).at(4) == TopK(0.25)
    assert Adaptive(ErrorFeedback(RandomBlock(0.1))).at(5) == ErrorFeedback(RandomBlock(0.2))
    assert Adaptive(EF21(TopK(0.1))).compressor(4) == TopK(0.25)


def test_rungs_are_different_compressors():
    assert Adaptive(TopK(0.1)).rungs == (2, 4, 8, 32, 50)
    assert Adaptive(TopK(0.1), policy="geometric").rungs == (2, 4, 8, 16, 32, 50)
    in_bits = Adaptive(Quantize(4), cf=(4, 20), budget=0.1)
    assert [in_bits.compressor(cf).bits for cf in in_bits.rungs] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert in_bits.rungs[1] == 32 / 7
    assert Adaptive(Quantize(4)).rungs == (2, 8, 32)  # 8, 4 and 1 bits; 4 is 8 bits as well


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"cf": (0.5, 10)}, ValueError, r"cf=\(0.5, 10\).*1 or more"),
        ({"cf": (20, 10)}, ValueError, r"smallest comes first; write cf=\(10, 20\)"),
        ({"cf": (10, 10)}, ValueError, r"nothing to choose"),
        ({"cf": 10}, ValueError, r"cf=10: expected the smallest and the largest"),
        ({"cf": (2, float("inf"))}, ValueError, "1 or more"),
        ({"inner": Quantize(4), "cf": (17, 32)}, ValueError, r"quant:1 at both ends"),
        ({"inner": Quantize(4), "cf": (1, 4)}, ValueError, r"quant:8 at both ends"),
        ({"eps": 0}, ValueError, r"eps=0: expected a number in \(0, 1\)"),
        ({"eps": 1.0}, ValueError, "eps=1.0"),
        ({"omega": -0.1}, ValueError, "omega=-0.1"),
        ({"window": 0}, ValueError, "window=0: expected a number of steps"),
        ({"window": 2.0}, ValueError, "window=2.0"),
        ({"policy": "linear"}, ValueError, "policy='linear': expected exponential or geometric"),
        ({"smoothing": 0.0}, ValueError, "smoothing=0.0"),
        ({"gain": "loss"}, ValueError, "gain='loss': expected energy, centred"),
        ({"gain": "cosine"}, ValueError, "gain='cosine': expected energy, centred"),
        ({"budget": 1.5}, ValueError, r"budget=1.5: expected a number in \(0, 1\)"),
        ({"budget": 0.0}, ValueError, "budget=0.0"),
        ({"budget": 0.2, "bandwidth_mbps": 1.0}, ValueError, "leave out one of them"),
        ({"latency_ms": 1.0}, ValueError, "without bandwidth_mbps"),
        ({"bandwidth_mbps": -1.0}, ValueError, "bandwidth_mbps=-1.0"),
        ({"inner": Sign()}, TypeError, "sign has no compression factor"),
        ({"inner": AQSGD(TopK(0.1))}, TypeError, r"ErrorFeedback and EF21 alone; use ef\+topk"),
        ({"inner": EFMixed(TopK(0.1))}, TypeError, "ErrorFeedback and EF21 alone"),
        ({"inner": SameIndices()}, TypeError, "inner=same: .*to the cut itself"),
        ({"inner": "topk:0.1"}, TypeError, "Adaptive goes round a compressor"),
    ],
)
def test_bad_settings(arguments, error, message):
    arguments = {"inner": TopK(0.1), **arguments}
    with pytest.raises(error, match=message):
        Adaptive(**arguments)


def pipe_of(**kwargs):
    kwargs = {"split": MLP_SPLIT, "loss_fn": F.cross_entropy, "engine": "local", **kwargs}
    return mpcomp.pipeline(mlp(), 2, **kwargs)


def test_where_it_has_no_place():
    with pytest.raises(ValueError, match="act_comp=.*lr_scaled is for gradients"):
        pipe_of(act_comp=Adaptive(ErrorFeedback(TopK(0.1), lr_scaled=True)))
    with pytest.raises(ValueError, match=r"SameIndices\(\) at boundary 0 with act_comp=adaptive"):
        pipe_of(act_comp=Adaptive(Quantize(4)), grad_comp="same")


def test_between_replicas_it_is_refused():
    from mpcomp.data_parallel.methods import replica_method_of

    with pytest.raises(ValueError, match=r"dp_comp=adaptive.*topk:0.1.*at a cut.*gravac"):
        replica_method_of(Adaptive(TopK(0.1)))
