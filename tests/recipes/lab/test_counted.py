"""Counted messages: what arrives is what would have arrived, and they are as long."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpcomp
import stages
from mpcomp.links.build import method_of
from recipes.lab.counted import Counted, counted, is_counted

METHODS = {
    "step": ("step:0.3:centre=true:spikes=16", "step:0.5"),
    "dithered": ("step:0.4:dead_zone=0.6", "step:1:scale=tensor:rounding=dither"),
    "klt": ("auto:scratch", "auto:scratch"),
    "klt, weighted": ("klt:weighted=true+step:0.2:centre=true", "step:0.5"),
    "same": ("auto:relu", "auto:relu"),
    "memory": ("auto:memory", "auto:memory"),
    "ef21": ("ef21+step:0.5", "ef21+step:0.5"),
}


def blocks() -> nn.Sequential:
    layers = []
    for _ in range(3):
        layers += [nn.Linear(48, 48), nn.GELU(), nn.LayerNorm(48)]
    return nn.Sequential(nn.Embedding(50, 48), *layers, nn.Linear(48, 50))


def tokens():
    for step in range(6):
        x = torch.randint(50, (4, 65), generator=torch.Generator().manual_seed(step % 2))
        yield x[:, :-1], x[:, 1:], torch.arange(4) + 4 * (step % 2)


def images():
    for step in range(4):
        generator = torch.Generator().manual_seed(step % 2)
        x = torch.randn(8, 3, 32, 32, generator=generator)
        x = F.avg_pool2d(x, 5, 1, 2)
        yield x, torch.randint(10, (8,), generator=generator), torch.arange(8) + 8 * (step % 2)


def token_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def trained(method, *, count, device="cpu"):
    """Losses, weights and bytes of each link, after some steps and an evaluation."""
    torch.manual_seed(0)
    on_images = method == "same"
    model = stages.resnet18(width=8) if on_images else blocks()
    act, grad = (
        method_of(argument, spec)
        for argument, spec in zip(("act_comp", "grad_comp"), METHODS[method], strict=True)
    )
    pipe = mpcomp.pipeline(
        model,
        chunks=2,
        split="paper" if on_images else 4,
        act_comp=counted(act) if count else act,
        grad_comp=counted(grad) if count else grad,
        loss_fn=F.cross_entropy if on_images else token_loss,
        devices=device,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    losses = []
    for x, y, ids in images() if on_images else tokens():
        x, y = x.to(device), y.to(device)
        losses.append(pipe.forward_backward(x, y, sample_ids=ids).item())
        optimizer.step()
        optimizer.zero_grad()
    losses.append(float(pipe.evaluate([(x, y)])))
    sent = [link.meter.train.wire_bytes + link.meter.eval.wire_bytes for link in pipe.links]
    return losses, [p.detach() for p in pipe.parameters()], sent


@pytest.fixture
def _deterministic(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", METHODS)
def test_counted_is_coded(method, device):
    losses, weights, sent = trained(method, count=False, device=device)
    counted_losses, counted_weights, counted_sent = trained(method, count=True, device=device)
    assert counted_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, counted_weights, strict=True))
    assert counted_sent == pytest.approx(sent, rel=0.01)
    assert counted_sent != sent, "nothing was counted: these are the coder's own bytes"


@pytest.mark.parametrize("method", METHODS)
def test_a_counted_method_has_its_spec_and_counts_in_all_its_parts(method):
    for argument, spec in zip(("act_comp", "grad_comp"), METHODS[method], strict=True):
        plain = method_of(argument, spec)
        made = counted(plain)
        assert str(made) == str(plain) and is_counted(made) and not is_counted(plain)
        assert mpcomp.parse(str(made)) == plain


def test_a_method_without_a_coder_stays_what_it_is():
    plain = mpcomp.parse("ef21+topk:0.1+quant:8")
    assert counted(plain) == plain and not is_counted(counted(plain))


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_lanes_are_counted_as_they_are_coded(rounding):
    method = mpcomp.parse(f"step:0.4:rounding={rounding}:lanes=true")
    x = torch.randn(1024, 160, generator=torch.Generator().manual_seed(0))
    coded, told = (
        each.compress(x, torch.Generator().manual_seed(1))[0].numel()
        for each in (method, counted(method))
    )
    plain = mpcomp.parse(f"step:0.4:rounding={rounding}").compress(
        x, torch.Generator().manual_seed(1)
    )
    assert coded > plain[0].numel() and told == pytest.approx(coded, rel=0.001)


def test_what_is_no_longer_kept_is_an_error():
    compressor = counted(mpcomp.parse("step:0.5"))
    assert isinstance(compressor, Counted)
    x = torch.randn(8, 16)
    first = compressor.compress(x)
    for _ in range(16):
        compressor.compress(x)
    with pytest.raises(RuntimeError, match="nothing is kept"):
        compressor.decompress(first, mpcomp.TensorMeta.of(x))
