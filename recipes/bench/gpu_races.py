"""The part of `recipes.bench.gpu_check` about races: late tensors, and memory that kernels use.

    python -m recipes.bench.gpu_check --parts races

Before each activation, gradient, message and decoded tensor its stream sleeps. Who does not wait
for it has other numbers, and other losses than one process without sleeps. compute-sanitizer looks
at kernels in Triton. A dry run sleeps on the CPU, where threads take turns otherwise then.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final
from unittest import mock

import torch
from torch import nn

from mpcomp.links.link import Link
from recipes.bench.gpu_forks import alone, together
from recipes.bench.gpu_parts import device_of, output_of
from recipes.bench.gpu_ranks import apart, load_coder, perceptron
from recipes.bench.jobs import Reporter

__all__ = ["races", "sleeping"]

METHODS: Final = ("none", "quant:4", "step:0.3")
#: About 5 ms of a GPU; seconds of a CPU.
CYCLES: Final = 10_000_000
CPU_S: Final = 0.0005
STEPS: Final = 3
#: After which ranks have hung.
RANKS_S: Final = 20.0
TOOLS: Final = ("memcheck", "racecheck")


def races(reporter: Reporter, dry: bool) -> None:
    """Reports whether late tensors change losses, then what compute-sanitizer finds."""
    load_coder()
    device = "cpu" if dry else "cuda:0"
    expected = alone(_losses, device, False, "local", False)
    for background in (False, True):
        outcome = together(_losses, 2, device, background, None, True, seconds=RANKS_S)
        text = outcome.text
        if outcome.values is not None:
            far = {
                method: apart([rank[method] for rank in outcome.values], expected[method])
                for method in METHODS
            }
            other = [f"{method} {most:.1e}" for method, most in far.items() if most != 0]
            text += f", losses apart: {', '.join(other)}" if other else ", losses equal"
        coded = "in the background" if background else "in turn"
        row = {"check": f"sleeps, coded {coded}", "methods": ", ".join(METHODS)}
        reporter.say({**row, "outcome": text})
    for tool in TOOLS:
        row = {"check": f"compute-sanitizer, {tool}", "methods": "kernels in Triton"}
        reporter.say({**row, "outcome": _why_not(dry) or _sanitized(tool, reporter)})


def _losses(
    device: str, background: bool, engine: str | None, late: bool
) -> dict[str, list[float]]:
    """Losses of a few steps with each method: of this rank, or of one process without sleeps."""
    torch.set_num_threads(1)
    os.environ["MPCOMP_BACKGROUND"] = str(int(background))
    losses: dict[str, list[float]] = {}
    with sleeping(torch.device(device)) if late else nullcontext():
        for method in METHODS:
            torch.manual_seed(0)
            pipe, batch = perceptron(
                act_comp=method, grad_comp=method, devices=device, engine=engine
            )
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            own = losses[method] = []
            for _ in range(STEPS):
                own.append(pipe.forward_backward(*batch).item())
                optimizer.step()
                optimizer.zero_grad()
    return losses


@contextmanager
def sleeping(device: torch.device) -> Iterator[None]:
    """A context in which the current stream sleeps before layers, their gradients, and coding.

    Args:
        device: whose stream it is; on the CPU the thread sleeps.
    """

    def sleep() -> None:
        if device.type == "cpu":
            time.sleep(CPU_S)
        else:
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]

    def after(call: Callable[..., Any]) -> Callable[..., Any]:
        def slept(*args: Any, **kwargs: Any) -> Any:
            sleep()
            return call(*args, **kwargs)

        return slept

    def layer(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        sleep()
        y = forward(linear, x)
        if y.requires_grad:
            y.register_hook(lambda _: sleep())  # type: ignore[no-untyped-call]
        return y

    forward = nn.Linear.forward
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(nn.Linear, "forward", layer))
        for name in ("encode", "decode"):
            slow = after(getattr(Link, name))
            patched.enter_context(mock.patch.object(Link, name, slow))
        yield


def _why_not(dry: bool) -> str | None:
    if dry:
        return "not run: a dry run has no GPU"
    if shutil.which("compute-sanitizer") is None:
        return "not run: compute-sanitizer is not installed"
    if importlib.util.find_spec("triton") is None:
        return "not run: Triton is not installed"
    return None


def _sanitized(tool: str, reporter: Reporter) -> str:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, "-m", "recipes.bench.gpu_kernels", str(device_of(False))]
    code, lines = output_of(command, reporter)
    if code is None:
        return "stopped at its limit"
    summary = [line for line in lines if "SUMMARY" in line] or lines[-1:]
    return f"exit code {code}: {' '.join(summary)}"
