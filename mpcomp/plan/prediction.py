"""A step's time, from what stages compute, what cuts code and send, and the links between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpcomp.comm.all_gather import num_rounds
from mpcomp.plan.coding import Coding
from mpcomp.plan.network import Network
from mpcomp.plan.timeline import Messages, StageTimes, Timeline, timeline

__all__ = ["Compute", "Prediction", "predict"]


class Compute(NamedTuple):
    """Seconds of a stage's forward and backward of one microbatch."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Prediction:
    """A step as it will be.

    Attributes:
        timeline: of the microbatches.
        agreement_s: of what all ranks agree on before and after them.
    """

    timeline: Timeline
    agreement_s: float

    @property
    def step_s(self) -> float:
        """Seconds from call to return."""
        return self.timeline.step_s + self.agreement_s


def predict(
    compute: Sequence[Compute],
    coding: Coding,
    messages: Messages,
    network: Network,
    *,
    chunks: int,
    in_flight: int | None = None,
    num_cores: int | None = None,
) -> Prediction:
    """Simulates a step whose cuts are alike.

    Args:
        compute: of every stage, in order; one to a host.
        coding: of a microbatch at any cut.
        messages: of a microbatch over any cut.
        network: of the hosts.
        chunks: microbatches of a step.
        in_flight: microbatches under way on the first stage; None for the engine's own choice.
        num_cores: that all stages share; None gives each its own.

    Raises:
        ValueError: numbers of stages and hosts that do not fit, or a count below 1.
    """
    last = len(compute) - 1
    stages = [
        StageTimes(
            *own,
            encode_act_s=coding.encode_act_s if i < last else 0.0,
            decode_act_s=coding.decode_act_s if i else 0.0,
            encode_grad_s=coding.encode_grad_s if i else 0.0,
            decode_grad_s=coding.decode_grad_s if i < last else 0.0,
        )
        for i, own in enumerate(compute)
    ]
    simulated = timeline(
        stages,
        [messages] * last,
        network,
        chunks=chunks,
        in_flight=in_flight,
        num_cores=num_cores,
    )
    # Once before the first microbatch and once after the last, between all ranks.
    longest = max(network.latency_s, default=0.0)
    return Prediction(simulated, 2 * num_rounds(len(compute)) * longest)
