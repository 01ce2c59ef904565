"""The stranger's test: methods defined here, with formulas alone, are taken as the library's own.

No other file knows of them: what they can do is what their classes say.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from laws import laws_over
from methods import round_trip
from torch import Tensor

import mpcomp
from mpcomp import Compressor, TensorMeta, TopK, parse
from mpcomp.compressors import bits
from mpcomp.core.randomness import uniform


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Wen et al., NeurIPS 2017, eq. 1: s sign(x) b, with s = max |x| and P(b = 1) = |x| / s."""

    spec: ClassVar[str] = "terngrad"
    is_unbiased = True
    contractive = False  # E||x - C(x)||^2 = s ||x||_1 - ||x||^2 may be any multiple of ||x||^2

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        packed = bits.packed_bytes(meta.numel, 2)
        return (TensorMeta((1,)), TensorMeta((packed,), torch.uint8))

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        flat = TensorMeta.of(x).flatten(x).reshape(-1).to(torch.float32)
        if flat.numel() == 0:
            return (flat.new_zeros(1), flat.new_zeros(0, dtype=torch.uint8))
        scale = flat.abs().amax()
        sent = uniform(generator, flat.numel(), flat.device) * scale < flat.abs()
        codes = (flat.sign().nan_to_num() * sent + 1).to(torch.uint8)  # 0, 1 or 2
        return (scale.reshape(1), bits.pack(codes.reshape(1, -1), 2)[0])

    def decompress(
        self,
        payload: tuple[Tensor, ...],
        meta: TensorMeta,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        scale, packed = payload
        codes = bits.unpack(packed.reshape(1, -1), 2, meta.numel)[0]
        return meta.unflatten(((codes.to(torch.float32) - 1) * scale).to(meta.dtype))


pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
COMPRESSORS = [TernGrad()]

globals().update(laws_over("compressors/test_compressor_laws.py", compressor=COMPRESSORS))
globals().update(laws_over("compressors/test_identity.py", compressor=COMPRESSORS))
globals().update(laws_over("compressors/test_planned_once.py", compressor=COMPRESSORS))
globals().update(laws_over("compressors/test_registry.py", compressor=COMPRESSORS))
globals().update(laws_over("compressors/test_registry.py", method=COMPRESSORS))
globals().update(laws_over("compressors/test_selecting.py", compressor=COMPRESSORS))
globals().update(laws_over("test_capabilities.py", unbiased=COMPRESSORS))
globals().update(laws_over("core/test_message.py", compressor=COMPRESSORS))
globals().update(
    laws_over(
        "links/test_link.py",
        without=["test_what_arrives_is_the_compressors_result"],
        method=COMPRESSORS,
    )
)
globals().update(laws_over("engines/test_local.py", method=COMPRESSORS))


def test_the_laws_are_all_here():
    """As many as a compressor of the library is under."""
    found = {name.split("__")[0] for name in globals() if "__test_" in name}
    assert {
        "test_payload_is_what_the_layout_says",
        "test_survives_hard_tensors",
        "test_same_input_and_seed_give_the_same_bits",
        "test_paths_of_accelerators_give_the_same_bytes",
        "test_a_method_is_a_frozen_value",
        "test_add_to_adds_what_would_be_decoded",
        "test_unbiased_means_that_the_mean_is_the_tensor",
        "test_length_is_known_beforehand_and_metered",
        "test_bytes_metered_are_bytes_handed_to_the_transport",
    } <= found


def test_its_spec_is_known():
    assert parse("terngrad") == TernGrad() and str(TernGrad()) == "terngrad"
    assert parse("topk:0.1+terngrad") == TopK(0.1, values=TernGrad())
    with pytest.raises(ValueError, match="did you mean 'terngrad'"):
        parse("ternegrad")


def test_its_formula():
    x = torch.tensor([-4.0, 0.0, 1.0, 2.0])
    draws = torch.stack([round_trip(TernGrad(), x, seed) for seed in range(400)])
    assert set(draws.flatten().tolist()) == {-4.0, 0.0, 4.0}
    assert (draws[:, 0] == -4).all() and (draws[:, 1] == 0).all()
    shares = (draws[:, 2:] == 4).double().mean(dim=0)
    assert torch.allclose(shares, torch.tensor([0.25, 0.5]).double(), atol=0.08)
    assert TernGrad().wire_bytes(TensorMeta((1000,))) == 4 + 250


@pytest.mark.parametrize("feedback", ["ef", "ef21", "aqsgd", "conef"])
def test_feedback_round_it_would_diverge(feedback):
    with pytest.raises(ValueError, match=r"inner=terngrad: inside feedback it diverges"):
        parse(f"{feedback}+terngrad")


def test_an_error_may_be_kept_by_it():
    """Which takes what is unbiased, however large its error."""
    assert parse("conef:error=terngrad+topk:0.1").error == TernGrad()
    with pytest.raises(ValueError, match="error=topk:0.1: what it loses is not zero on average"):
        parse("conef:error=topk/0.1+topk:0.1")


@pytest.mark.parametrize("adaptive", ["gravac", "adaptive"])
def test_it_has_no_ratio_to_adapt(adaptive):
    """GraVAC has a residual, round which it would diverge as well."""
    words = "with a residual it diverges" if adaptive == "gravac" else "has no compression factor"
    with pytest.raises(ValueError, match=f"terngrad.*{words}|{words}"):
        parse(f"{adaptive}+terngrad")
    with pytest.raises(TypeError, match="terngrad has no compression factor to set"):
        TernGrad().with_cf(4)


def test_a_cut_trains_and_reports():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    pipe = mpcomp.pipeline(
        model, 2, split=2, act_comp="terngrad", grad_comp=TernGrad(), loss_fn=F.cross_entropy
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.2)
    x = torch.randn(64, 12)
    y = x[:, :4].argmax(dim=1)
    losses = []
    for _ in range(80):
        losses.append(float(pipe.forward_backward(x, y)))
        optimizer.step()
        optimizer.zero_grad()
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert pipe.wire_bytes < 0.08 * pipe.dense_bytes  # 1 / 16, scales and headers
    assert "terngrad" in str(pipe.report())
    assert pipe.state_bytes(x) == {"total": 0, "per_link": []}
