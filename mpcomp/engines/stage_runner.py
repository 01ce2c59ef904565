"""Running one stage on one microbatch, the same way in every engine.

A stage runs in threads that know nothing of the caller: its autocast is entered again, its dropout
drawn from (seed, step, stage, microbatch), and, if asked, its activations recomputed in backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stages as staging
from mpcomp.core.microbatch import map_tensors
from mpcomp.core.randomness import stage_randomness
from mpcomp.engines.repetition import Repetitions
from mpcomp.engines.updates import StashedWeights

__all__ = ["Autocast", "StageRunner", "call", "frozen_buffers"]


@dataclass(frozen=True)
class Autocast:
    """The caller's autocast, to be entered again in another thread."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def of_caller(cls, device: torch.device) -> Autocast:
        """The autocast in force in this thread for ``device``'s type."""
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def enter(self) -> AbstractContextManager[Any]:
        """A context with this setting."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)


def call(function: Callable[..., Any], value: Any, beside: Mapping[str, Any] | None = None) -> Any:
    """Calls a stage.

    Args:
        function: the stage.
        value: of the first stage the batch, a mapping as keywords, a tuple as arguments, a tensor
            as the only one; of a later one the activation.
        beside: what a later stage takes from the batch.
    """
    beside = beside or {}
    if isinstance(value, Mapping):
        return function(**value, **beside)
    if isinstance(value, tuple):
        return function(*value, **beside)
    return function(value, **beside)


@contextmanager
def frozen_buffers(module: nn.Module) -> Iterator[None]:
    """Lets ``module`` run on copies of its buffers, as BatchNorm's statistics would count a batch.

    Copies, rather than writing the old values back: autograd holds the originals and checks that
    nobody wrote to them.
    """
    saved = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    for owner, name, buffer in saved:
        owner._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for owner, name, buffer in saved:
            owner._buffers[name] = buffer


class StageRunner:
    """A stage together with how to run it.

    Args:
        stage: module from one tensor (the first stage: from the batch) to one tensor.
        index: number of the stage.
        device: where it lives.
        recompute: drop its inner activations and compute them again in backward.
        seed: of the run.

    Attributes:
        forward_s: seconds of this process in forward passes with gradients so far.
        stashed: weights of a step in which they change; None of other steps.
    """

    def __init__(
        self, stage: staging.Stage, index: int, device: torch.device, *, recompute: bool, seed: int
    ) -> None:
        self.stage = stage
        self.index = index
        self.device = device
        self._repetitions = Repetitions(stage, device) if recompute else None
        self._seed = seed
        self.forward_s = 0.0
        self.stashed: StashedWeights | None = None

    def way_back(self) -> Callable[[], None]:
        """A function that puts back what the next forward changes in the stage."""
        return Repetitions(self.stage, self.device).way_back()

    @property
    def has_trainable(self) -> bool:
        """Whether any parameter of the stage requires a gradient at the moment."""
        return any(parameter.requires_grad for parameter in self.stage.parameters())

    def inputs(self, batch: Any) -> Any:
        """The part of a microbatch that this stage needs, on its device."""
        needed = batch if self.index == 0 else self.stage.takes(batch)
        return map_tensors(needed, lambda t: t.to(self.device))

    def __call__(
        self, value: Any, beside: Mapping[str, Any], step: int, microbatch: int, autocast: Autocast
    ) -> Tensor:
        """The stage's output for one microbatch.

        Args:
            value: the batch for the first stage, the activation for a later one.
            beside: what a later one takes from the batch, of `inputs`.
            step: number of the step.
            microbatch: number of the microbatch.
            autocast: of the caller.
        """

        begin = time.perf_counter()
        output = self._output(value, beside, step, microbatch, autocast)
        if torch.is_grad_enabled():
            self.forward_s += time.perf_counter() - begin
        return output

    def _output(
        self, value: Any, beside: Mapping[str, Any], step: int, microbatch: int, autocast: Autocast
    ) -> Tensor:
        stage = self.stage if self.stashed is None else self.stashed.stage_for(microbatch)

        def run(value: Any) -> Tensor:
            with self._randomness(step, microbatch), autocast.enter():
                output = call(stage, value, beside)
            assert isinstance(output, Tensor)
            return output

        if self._repetitions is None or not torch.is_grad_enabled():
            return run(value)
        output = checkpoint(
            run,
            value,
            use_reentrant=False,
            preserve_rng_state=False,  # they do, for all generators
            context_fn=self._repetitions.contexts,
        )
        assert isinstance(output, Tensor)
        return output

    def _randomness(self, step: int, microbatch: int) -> AbstractContextManager[None]:
        if not self.stage.training:
            return nullcontext()
        return stage_randomness(self.device, self._seed, step, self.index, microbatch)
