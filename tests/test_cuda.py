"""The laws on a GPU: stages on ``["cuda:0"] * 4``. Skipped, with a reason, where there is none."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from methods import COMPRESSORS, drawn, round_trip, same_bits
from models import store_of

import mpcomp
import stages
from mpcomp.core.microbatch import rows_of_chunks, scatter
from mpcomp.core.randomness import generator_for

pytestmark = pytest.mark.gpu

DEVICES = ["cuda:0"] * 4
SPECS = [
    "none", "bf16", "fp16", "fp8", "fp8_e5m2", "topk:0.1", "topk:0.1:scope=row+fp16",
    "topk:0.1:scope=tensor+quant:8", "randomk:0.1", "randomblock:0.1+fp16", "quant:4", "quant:3",
    "quant:4:scale=128", "quant:8:scale=channel", "quant:2:rounding=stochastic", "fixed:4",
]  # fmt: skip
TRAINED = [
    ("topk:0.1", "same"),
    ("ef+topk:0.1", "ef+topk:0.1+quant:8"),
    ("ef21+topk:0.1", "ef21+quant:4"),
    ("efmixed+topk:0.1", "efmixed+topk:0.1"),
    ("aqsgd:storage=4+topk:0.1", "quant:4:rounding=stochastic"),
    ("step:0.3:centre=true:spikes=16", "step:1:scale=tensor:rounding=dither"),
    ("auto:relu", "auto:relu"),
    ("auto:memory", "auto:memory"),
    ("auto:scratch", "auto:scratch"),
]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, 32, 32, generator=generator)
    return x.cuda(), torch.randint(10, (rows,), generator=generator).cuda()


def pipe_of(act: str | None, grad: str | None, **kwargs: object) -> mpcomp.Pipeline:
    torch.manual_seed(0)
    return mpcomp.pipeline(
        stages.resnet18(width=8), 4, split="paper", devices=DEVICES, act_comp=act, grad_comp=grad,
        loss_fn=F.cross_entropy, **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_payloads_are_those_of_the_cpu(spec: str, dtype: torch.dtype) -> None:
    """Law 4 across devices: the same bits on the wire and in what arrives."""
    compressor = mpcomp.parse(spec)
    x = torch.randn(4, 6, 8, 8, generator=torch.Generator().manual_seed(1)).relu().to(dtype)
    meta = mpcomp.TensorMeta.of(x)
    here = compressor.compress(x, generator_for(1))
    there = compressor.compress(x.cuda(), generator_for(1))
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.cpu().reshape(-1).view(torch.uint8))
    arrived = compressor.decompress(there, meta, generator_for(1))
    assert arrived.is_cuda
    assert torch.equal(compressor.decompress(here, meta, generator_for(1)), arrived.cpu())


@pytest.mark.parametrize("shape", [(4, 24, 64), (4, 6, 8, 8)], ids=str)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_every_compressor_codes_on_a_gpu(
    compressor: mpcomp.Compressor, shape: tuple[int, ...]
) -> None:
    """Laws 2 to 4, and receivers that have no GPU: sums of another order are all that differs."""
    x = torch.randn(shape, generator=drawn(1)).add(0.5).relu()
    x[0, 0] *= 30
    meta, there = mpcomp.TensorMeta.of(x), x.cuda()
    payload = compressor.compress(there, drawn())
    for part, said in zip(payload, compressor.layout(meta), strict=True):
        assert part.dtype == said.dtype and part.numel() <= math.prod(said.shape)
        assert part.is_cuda is not compressor.on_host
    arrived = compressor.decompress_to(there.device, payload, meta, drawn())
    assert arrived.is_cuda and arrived.shape == x.shape and arrived.dtype == x.dtype
    for part, again in zip(payload, compressor.compress(there, drawn()), strict=True):
        assert same_bits(part, again)
    sent, kept = compressor.round_trip(there, there, meta, drawn)
    for part, again in zip(payload, sent, strict=True):
        assert same_bits(part, again)
    assert same_bits(arrived, kept)

    size = x.norm()
    on_cpu = compressor.decompress([part.cpu() for part in payload], meta, drawn())
    assert (on_cpu - arrived.cpu()).norm() <= 1e-5 * size
    errors = [float((y.cpu() - x).norm() / size) for y in (arrived, round_trip(compressor, x))]
    assert errors[0] == pytest.approx(errors[1], rel=0.02, abs=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rows", [8, 7])
def test_uncompressed_is_the_plain_model(recompute: bool, rows: int) -> None:
    """Law 1."""
    pipe = pipe_of(None, None, recompute=recompute)
    model = copy.deepcopy(pipe.merge())
    x, y = batch(rows)
    loss = pipe.forward_backward(x, y)
    sizes = rows_of_chunks(rows, 4)
    expected = torch.zeros((), device="cuda")
    for a, b in zip(scatter(x, sizes), scatter(y, sizes), strict=True):
        part = F.cross_entropy(model(a), b) * (len(a) / rows)
        part.backward()
        expected = expected + part.detach()
    assert torch.equal(loss, expected)
    for (name, p), q in zip(pipe.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize(("act", "grad"), TRAINED)
def test_training_resumes_exactly_and_both_ends_agree(act: str, grad: str, tmp_path: Path) -> None:
    """Laws 2, 5, 6 and 7."""

    def advance(pipe: mpcomp.Pipeline, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(pipe.forward_backward(*batch(), sample_ids=torch.arange(8)).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    pipe = pipe_of(act, grad)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    advance(pipe, optimizer, 3)
    assert pipe.wire_bytes < 0.6 * pipe.dense_bytes
    pipe.save(tmp_path / "checkpoint", optimizer=optimizer)
    pipe.evaluate([batch()])
    losses = advance(pipe, optimizer, 3)
    for link in pipe.links:
        if len(link.endpoint.ends) == 2 and all(
            store_of(end) is not None for end in link.endpoint.ends.values()
        ):
            sender, receiver = (
                store_of(link.endpoint.ends[role]) for role in ("sender", "receiver")
            )
            keys = list(sender.state_dict()["keys"].tolist())
            rows = [tuple(key) for key in keys]
            assert torch.equal(sender.read(rows), receiver.read(rows))

    again = pipe_of(act, grad)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.05, momentum=0.9)
    again.load(tmp_path / "checkpoint", optimizer=optimizer)
    assert advance(again, optimizer, 3) == losses


def test_a_nonfinite_activation_is_an_error() -> None:
    pipe = pipe_of("topk:0.1", "topk:0.1")
    x, y = batch()
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="boundary 0 act"):
        pipe.forward_backward(x, y)
    with pytest.raises(FloatingPointError, match="boundary 0 act"):
        pipe.evaluate([(x, y)])
