"""A whole model that computes as the stages of an asynchronous pipeline do, in one process.

`mpcomp.engines.updates` has it for models that the library cuts. Here it is for those that are not
cut: the weights of a stage lack as many updates as stages follow it, none at the beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import functional_call

from mpcomp.engines.updates import lag_of


class Lagging:
    """A model with the weights that its stages have after some updates of a call.

    Args:
        model: the whole.
        stage_of: of every parameter, by name.
        num_stages: of the pipeline that it stands for.
    """

    def __init__(self, model: nn.Module, stage_of: Mapping[str, int], num_stages: int) -> None:
        self._model = model
        self._lags = {name: lag_of(stage, num_stages) for name, stage in stage_of.items()}
        self._versions: deque[dict[str, Tensor]] = deque([self._copied()], maxlen=num_stages)

    def _copied(self) -> dict[str, Tensor]:
        """Copies that lead gradients on to the parameters."""
        return {name: parameter.clone() for name, parameter in self._model.named_parameters()}

    def updated(self) -> None:
        """Takes note of an update."""
        self._versions.append(self._copied())

    def __call__(self, x: Tensor) -> Tensor:
        """The model's output."""
        oldest = len(self._versions) - 1
        weights = {
            name: self._versions[oldest - min(lag, oldest)][name]
            for name, lag in self._lags.items()
        }
        output: Tensor = functional_call(self._model, weights, (x,))
        return output
