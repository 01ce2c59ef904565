"""A step's time, from what stages compute, what cuts code and send, and the links between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpcomp.comm.all_gather import num_rounds
from mpcomp.engines.updates import behind_of, in_flight_of
from mpcomp.plan.coding import Coding, CutCost
from mpcomp.plan.network import Network
from mpcomp.plan.timeline import StageTimes, Timeline, timeline

__all__ = ["Compute", "Prediction", "predict"]


class Compute(NamedTuple):
    """Seconds of a stage's forward and backward of one microbatch."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Prediction:
    """A step as it will be.

    Attributes:
        timeline: of the microbatches of a call.
        agreement_s: of what all ranks agree on before and after them.
        updates: steps of the optimizer within the call.
    """

    timeline: Timeline
    agreement_s: float
    updates: int = 1

    @property
    def step_s(self) -> float:
        """Seconds from call to return, for each of its updates."""
        return (self.timeline.step_s + self.agreement_s) / self.updates


def predict(
    compute: Sequence[Compute],
    cuts: Sequence[CutCost],
    network: Network,
    *,
    chunks: int,
    updates: int = 1,
    in_flight: int | None = None,
    num_cores: int | None = None,
) -> Prediction:
    """Simulates a step, or a call with several.

    Args:
        compute: of every stage, in order; one to a host, and one more on the first.
        cuts: of every cut, for a microbatch.
        network: of the hosts.
        chunks: microbatches of a step.
        updates: steps between which the pipeline does not drain (`mpcomp.engines.updates`).
        in_flight: microbatches under way on the first stage, where there is one step; None for the
            engine's own choice.
        num_cores: that all hosts share; None gives each its own.

    Raises:
        ValueError: numbers of stages, cuts and hosts that do not fit, or a count below 1.
    """
    if updates < 1:
        raise ValueError(f"updates is {updates}: pass at least 1")
    behind = None
    if updates > 1:
        in_flight = in_flight_of(chunks, len(compute))
        if len(compute) > len(network.host_mbps):
            behind = behind_of(chunks, len(compute))
    chunks *= updates
    none = Coding()
    after = [*(cut.coding for cut in cuts), none]
    before = [none, *(cut.coding for cut in cuts)]
    stages = [
        StageTimes(
            *own,
            # Of one message a call the sender meters the fidelity, which takes a decoding.
            encode_act_s=following.encode_act_s + following.decode_act_s / chunks,
            decode_act_s=preceding.decode_act_s,
            encode_grad_s=preceding.encode_grad_s + preceding.decode_grad_s / chunks,
            decode_grad_s=following.decode_grad_s,
        )
        for own, preceding, following in zip(compute, before, after, strict=False)
    ]
    simulated = timeline(
        stages,
        [cut.messages for cut in cuts],
        network,
        chunks=chunks,
        in_flight=in_flight,
        behind=behind,
        num_cores=num_cores,
    )
    # Once before the first microbatch and once after the last, between all ranks.
    longest = max(network.latency_s, default=0.0)
    return Prediction(simulated, 2 * num_rounds(len(network.host_mbps)) * longest, updates)
