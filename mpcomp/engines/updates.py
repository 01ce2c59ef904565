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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from mpcomp.core.embeddings import check_max_norm

__all__ = ["StashedWeights", "Updates", "check_stashable", "in_flight_of", "lag_of"]


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

    def follows(self, microbatch: int) -> bool:
        """Whether an update follows the backward of this microbatch."""
        return (microbatch + 1) % self.microbatches == 0


def in_flight_of(microbatches: int, num_stages: int) -> int:
    """Microbatches under way on the first stage, of so many an update: all that its lag allows."""
    return microbatches * lag_of(0, num_stages) + 1


def lag_of(stage: int, num_stages: int) -> int:
    """Updates that a stage's weights lack when it runs a microbatch forward, once it is filled."""
    return num_stages - 1 - stage


class StashedWeights:
    """The weights of a stage, those of before its last updates among them.

    A forward gets copies of the weights. Its backward finds these as they were, whatever update
    came in between, and adds the gradients to those of the parameters themselves.

    Args:
        stage: whose parameters they are.
        updates: of the step.
        lag: of the stage; of each parameter by name, where a whole model stands for all stages.
        kept: how many updates back weights can still be asked for.
    """

    def __init__(
        self, stage: nn.Module, updates: Updates, lag: int | Mapping[str, int], *, kept: int
    ) -> None:
        self._stage, self._updates, self._lag = stage, updates, lag
        self._num_updates = 0
        self._versions: deque[dict[str, Tensor]] = deque([self._copied()], maxlen=kept + 1)

    def _copied(self) -> dict[str, Tensor]:
        """Copies that lead gradients on to the parameters."""
        return {
            name: parameter.clone()
            for name, parameter in self._stage.named_parameters()
            if parameter.requires_grad
        }

    def updated(self) -> None:
        """Takes note of an update."""
        self._num_updates += 1
        if self._num_updates < self._updates.count:  # nothing runs forward behind the last one
            self._versions.append(self._copied())

    def stage_for(self, microbatch: int) -> Callable[..., Any]:
        """The stage with the weights for a microbatch, to be called as the stage is."""
        number = self._updates.number_of(microbatch)
        weights = {}
        for name in self._versions[-1]:
            lag = self._lag if isinstance(self._lag, int) else self._lag[name]
            weights[name] = self._versions[max(0, number - lag) - self._num_updates - 1][name]
        return lambda *args, **kwargs: functional_call(self._stage, weights, args, kwargs)


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
