"""Updates of weights within a step: an asynchronous pipeline, which does not drain between them.

A stage whose gradients of some microbatches are complete changes its weights at once, while later
ones are on their way, so that nobody waits for the last gradient to come back::

    stage 0   F0 F1 F2 ....... B0 U F3 B1 U F4 B2 U ...
    stage 1      F0 F1 ....... B0 U F2 B1 U F3 B2 U ...      U: an update
    stage 2         F0 B0 U F1 B1 U F2 B2 U ...

As in PipeDream (Narayanan et al. 2019): the microbatches of update ``t`` run forward in a stage
with the weights that it had after ``t - lag`` updates, where ``lag`` is the number of stages that
follow, and backward with the same ones (weight stashing). By which weights a gradient was made
depends on nothing else, so results are the same whatever the links and the engine.

Of stages that are together (`stages.together`) the last one runs where the first does, and a tied
weight is there once. Neither use waits for the other: an update takes the last stage's gradients as
soon as they are complete, and with them those of the first stage that have come back by then, of
earlier microbatches::

    rank 0   F0 F1 .. L0 U F2 .. L1 B0 U F3 .. L2 B1 U     F, B: the first stage; L: the last, both

So the last stage's weights lack nothing, as in any pipeline. A microbatch is half of its way behind
it when L has it, and the first stage's gradient comes so many updates late. The last update of a
step takes all that is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

from mpcomp.core.embeddings import check_max_norm

__all__ = [
    "StashedWeights",
    "Updates",
    "behind_of",
    "check_stashable",
    "in_flight_of",
    "lag_of",
    "late_of",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Updates:
    """The updates of a step.

    Attributes:
        function: changes the weights of this rank by their gradients, and sets those to zero.
        count: of updates in a step.
        microbatches: of each update.
    """

    function: Callable[[], object]
    count: int
    microbatches: int

    def number_of(self, microbatch: int) -> int:
        """The update that a microbatch belongs to."""
        return microbatch // self.microbatches

    def taking(self, microbatch: int, late: int = 0) -> int:
        """The update that takes the gradients of a microbatch, which come so many updates late."""
        return min(self.number_of(microbatch) + late, self.count - 1)

    def follows(self, microbatch: int) -> bool:
        """Whether an update follows the backward of this microbatch."""
        return (microbatch + 1) % self.microbatches == 0

    def completed(
        self,
        stashed: Sequence[StashedWeights],
        added_up: Callable[[], AbstractContextManager[None]],
    ) -> Updates:
        """The same ones, with a function that does all that belongs to an update.

        Args:
            stashed: weights of this rank's stages.
            added_up: a context in which tied weights have the sum of both uses' gradients.
        """

        def function() -> None:
            for each in stashed:
                each.complete()
            with added_up():
                self.function()
            for each in stashed:
                each.updated()

        return replace(self, function=function)


def in_flight_of(microbatches: int, num_stages: int) -> int:
    """Microbatches under way on the first stage, of so many an update: all that its lag allows."""
    return microbatches * (num_stages - 1) + 1


def behind_of(microbatches: int, num_stages: int) -> int:
    """Microbatches of these that the last stage is done with, where it is beside the first."""
    return microbatches * late_of(0, num_stages, together=True)


def lag_of(stage: int, num_stages: int, *, together: bool = False) -> int:
    """Updates that a stage's weights lack when it runs a microbatch forward, once it is filled.

    Args:
        stage: its number.
        num_stages: of the pipeline.
        together: whether the last stage is beside the first.
    """
    return num_stages - 1 - stage - late_of(stage, num_stages, together=together)


def late_of(stage: int, num_stages: int, *, together: bool) -> int:
    """Updates that do not wait for a stage's gradients of their microbatches; as `lag_of`."""
    return num_stages // 2 if together and stage == 0 else 0


class StashedWeights:
    """The weights of a stage, those of before its last updates among them.

    A forward gets copies of the weights. Its backward finds these as they were, whatever update
    came in between, and adds the gradients to those of the parameters themselves.

    Args:
        stage: whose parameters they are.
        updates: of the step.
        lag: of the stage; of each parameter by name, where a whole model stands for all stages.
        kept: how many updates back weights can still be asked for.
        late: updates that do not wait for the stage's gradients of their microbatches.
    """

    def __init__(
        self,
        stage: nn.Module,
        updates: Updates,
        lag: int | Mapping[str, int],
        *,
        kept: int,
        late: int = 0,
    ) -> None:
        self._stage, self._updates, self._lag = stage, updates, lag
        self._late = late
        self._num_updates = 0
        #: What was gathered apart, by the number of the update that takes it.
        self._apart: dict[int, dict[nn.Parameter, Tensor | None]] = {}
        self._versions: deque[dict[str, Tensor]] = deque([self._copied()], maxlen=kept + 1)

    def _trained(self) -> dict[str, nn.Parameter]:
        """Parameters, each by one name; a second use of a weight is one of its own."""
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self._stage.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, name)
        return {name: parameter for parameter, name in names.items() if parameter.requires_grad}

    def _copied(self) -> dict[str, Tensor]:
        """Copies that lead gradients on to the parameters."""
        return {name: parameter.clone() for name, parameter in self._trained().items()}

    @contextmanager
    def gathering(self, microbatch: int) -> Iterator[None]:
        """Within it gradients that come late gather apart, for the update that takes them.

        Others gather in the parameters, as ever.
        """
        if not self._late:
            yield
            return
        number = self._updates.taking(microbatch, self._late)
        apart = self._apart.setdefault(number, dict.fromkeys(self._trained().values()))
        _swap(apart)
        try:
            yield
        finally:
            _swap(apart)

    def complete(self) -> None:
        """Adds what was gathered apart for the update that is made next."""
        for parameter, grad in self._apart.pop(self._num_updates, {}).items():
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def updated(self) -> None:
        """Takes note of an update."""
        self._num_updates += 1
        if self._num_updates < self._updates.count:
            self._versions.append(self._copied())
        else:  # nothing runs forward behind the last one
            self._versions.clear()

    def call(self, microbatch: int, function: Callable[[], T]) -> T:
        """Calls a function while the stage has the weights for a microbatch."""
        weights = self._weights(microbatch, "stage.")
        found: T = functional_call(_Holding(self._stage), weights, (function,))
        return found

    def stage_for(self, microbatch: int) -> Callable[..., Any]:
        """The stage with the weights for a microbatch, to be called as the stage is."""
        weights = self._weights(microbatch)
        return lambda *args, **kwargs: functional_call(self._stage, weights, args, kwargs)

    def _weights(self, microbatch: int, prefix: str = "") -> dict[str, Tensor]:
        number = self._updates.number_of(microbatch)
        weights = {}
        for name in self._versions[-1]:
            lag = self._lag if isinstance(self._lag, int) else self._lag[name]
            version = self._versions[max(0, number - lag) - self._num_updates - 1]
            weights[prefix + name] = version[name]
        return weights


class _Holding(nn.Module):
    """A module that has a stage, and calls any function."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, function: Callable[[], T]) -> T:
        return function()


def _swap(gradients: dict[nn.Parameter, Tensor | None]) -> None:
    """Gives parameters these gradients for those that they have, and the other way round."""
    for parameter, grad in gradients.items():
        gradients[parameter], parameter.grad = parameter.grad, grad


def check_stashable(stages: Sequence[nn.Module]) -> None:
    """Raises ValueError for a module whose weights cannot be replaced for a forward pass."""
    for stage in stages:
        check_max_norm(
            stage, "with updates within a step it would change a copy, and not the parameter"
        )
        for name, module in stage.named_modules():
            if isinstance(module, nn.RNNBase):
                raise ValueError(
                    f"updates within a step, and {name} is an {type(module).__name__}, which keeps "
                    "its weights in a list of its own: leave update out, or train another model"
                )
