"""Parameters that FSDP2 gathers in few bits, and steps in which nothing is compressed."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everyday import slow_after
from ranks import preload
from replica_runs import digest
from sharded_runs import Run, Training, kept_of
from torch import Tensor, nn

preload("replica_runs", "sharded_runs", "torch.distributed.fsdp")


@contextlib.contextmanager
def seen_by(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The weights that layers compute with, by name."""
    seen: dict[str, Tensor] = {}
    names = {module: name for name, module in model.named_modules()}

    def see(module: nn.Module, *_: Any) -> None:
        seen[names[module]] = module.weight.detach().clone()

    hooks = [m.register_forward_hook(see) for m in names if isinstance(m, nn.Linear)]
    yield seen
    for hook in hooks:
        hook.remove()


def few_bits(specs: list[str]) -> list[Any]:
    found = []
    for spec in specs:
        options = (("param_comp", spec),)
        training = Training(Run("ef+topk:0.2", options, steps=10))
        assert training.handle is not None
        exact = {n: p.clone() for n, p in training.weights().items()}
        with seen_by(training.model) as seen:
            training.loss(0).backward()
        off = {name: float((w - exact[f"{name}.weight"]).abs().max()) for name, w in seen.items()}
        largest = {name: float(exact[f"{name}.weight"].abs().max()) for name in seen}
        training.optimizer.zero_grad()
        unchanged = digest(training.weights()) == digest(exact)
        with training.handle.uncompressed(), seen_by(training.model) as whole:
            training.loss(0).backward()
        same = all(torch.equal(w, exact[f"{name}.weight"]) for name, w in whole.items())
        training.optimizer.zero_grad()
        before = dict(training.handle.report()["parameters"])
        losses = training.go(1, 11)
        report = training.handle.report()["parameters"]
        found.append((digest(seen), off, largest, unchanged, same, losses, before, report))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", slow_after(1, [2, 4]))
def test_parameters_of_few_bits(ranks, num_ranks):
    """All ranks compute with equal weights; those of the optimizer stay as they are."""
    bits = {8: "quant:8:scale=32", 4: "quant:4:scale=32", 2: "quant:3:rounding=stochastic"}
    results = ranks(few_bits, num_ranks, list(bits.values()))
    for i, (b, spec) in enumerate(bits.items()):
        for of_rank in results:
            digested, off, largest, unchanged, same, losses, _before, report = of_rank[i]
            assert digested == results[0][i][0] and unchanged and same, spec
            for name, error in off.items():
                assert error <= 1.01 * largest[name] / 2 ** (b - 1), (spec, name)
            assert max(off.values()) > 1e-4
            assert losses[-1] < losses[0]
            assert report["wire_bytes"] < report["dense_bytes"]
            assert report["gathers"] > 0


def forth_and_back() -> list[Any]:
    """Whether backward computes with the weights that forward did, drawn at random."""
    training = Training(Run("none", (("param_comp", "quant:2:rounding=stochastic"),)))
    seen: list[Tensor] = []

    def see(module: nn.Module, *_: Any) -> None:
        seen.append(module.weight.detach().clone())

    training.model.blocks[0].up.register_forward_hook(see)
    training.model.blocks[0].up.register_full_backward_pre_hook(see)
    training.go(0, 3)
    pairs = zip(seen[::2], seen[1::2], strict=True)
    return [(torch.equal(forth, back), digest({"": forth})) for forth, back in pairs]


def test_backward_computes_with_the_weights_of_forward(ranks):
    results = ranks(forth_and_back, 2)
    assert results[0] == results[1]
    assert all(same for same, _ in results[0]) and len({d for _, d in results[0]}) == 3


def uncompressed_steps() -> list[Any]:
    """A step in `uncompressed()` sends the gradient and all that is owed; on two ranks exactly."""
    training = Training(Run("ef+topk:0.1"))
    plain = Training(Run(None))
    assert training.handle is not None
    training.backward(0)
    training.optimizer.zero_grad()
    owed = {
        name: kept_of(memory)
        for name, memory in training.handle.exchange._state.ends.items()
        if memory.keeps
    }
    with training.handle.uncompressed():
        training.backward(1)
    plain.backward(1)
    rank, found = dist.get_rank(), []
    for name, p in training.model.named_parameters():
        mean = owed.get(f"{name}/{rank}")
        of_other = [None, None]
        dist.all_gather_object(of_other, owed)
        if mean is None or p.dim() < 2:
            continue
        total = sum(of_rank[f"{name}/{rank}"] for of_rank in of_other) / 2
        expected = dict(plain.model.named_parameters())[name].grad.to_local().reshape(-1) + total
        found.append(float((p.grad.to_local().reshape(-1) - expected).abs().max()))
    left = max(
        float(kept_of(m).abs().max())
        for m in training.handle.exchange._state.ends.values()
        if m.keeps
    )
    entry = training.handle.history[-1]
    return [max(found), left, entry["wire_bytes"] == entry["dense_bytes"]]


def test_a_step_without_compression_pays_what_is_owed(ranks):
    for error, left, whole in ranks(uncompressed_steps, 2):
        assert error < 1e-6 and left == 0 and whole
