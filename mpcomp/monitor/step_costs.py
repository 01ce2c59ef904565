"""The costs of a step, from what ranks have metered: what stages compute, what cuts code and send.

In one process all stages take turns, so a stage's part is that of its forward passes, and the
coding of a link is shared out evenly between its two ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from mpcomp.engines.base import Engine
from mpcomp.monitor.payoff import CutTimes, RankTimes
from mpcomp.plan import Coding, Messages

__all__ = ["StepCosts", "cut_times", "stage_times", "step_costs"]


#: Of an element.
_BF16_BYTES: Final = 2


class _Way(NamedTuple):
    """One direction of a cut, for one message."""

    messages: int
    wire_bytes: float
    dense_bytes: float
    bf16_bytes: float
    encode_s: float
    decode_s: float

    @classmethod
    def of(cls, states: Sequence[Mapping[str, Any]]) -> _Way | None:
        """The figures of what all ranks have counted; None if nothing was sent."""
        senders = [state for state in states if state["messages"]]
        if not senders:
            return None
        messages = senders[0]["messages"]
        total = sum(state["messages"] for state in senders)
        encode_s = max(state["seconds"] for state in senders) / messages
        if len(states) == 1:
            encode_s = decode_s = encode_s / 2
        else:
            others = (state["seconds"] for state in states if not state["messages"])
            decode_s = max(others, default=0.0) / messages
        return cls(
            messages,
            sum(state["wire_bytes"] for state in senders) / total,
            dense := sum(state["dense_bytes"] for state in senders) / total,
            min(dense, _BF16_BYTES * sum(state["num_elements"] for state in senders) / total),
            encode_s,
            decode_s,
        )


def cut_times(
    links: Sequence[Sequence[Mapping[str, Any]]],
    probed: Sequence[tuple[float, float] | None],
) -> list[CutTimes] | None:
    """Costs of one microbatch at each cut; None if nothing was sent over one of them.

    Args:
        links: of each cut the link of activations, then that of gradients: the state of its
            traffic on every rank.
        probed: of each cut Mbit/s and seconds of a round trip, if they were measured.
    """
    ways = [way for states in links if (way := _Way.of(states)) is not None]
    if len(ways) < len(links):
        return None
    return [
        CutTimes(
            Coding(act.encode_s, act.decode_s, grad.encode_s, grad.decode_s),
            Messages(act.wire_bytes, grad.wire_bytes),
            Messages(act.dense_bytes, grad.dense_bytes),
            Messages(act.bf16_bytes, grad.bf16_bytes),
            link,
        )
        for act, grad, link in zip(ways[::2], ways[1::2], probed, strict=True)
    ]


def stage_times(
    ranks: Sequence[Sequence[float]],
    shares: Sequence[Sequence[float]],
    cuts: Sequence[CutTimes],
    chunks: int,
    *,
    together: bool = False,
) -> list[RankTimes]:
    """Times in a step of each machine, as if each stage had one.

    Args:
        ranks: of each seconds of a step, of these waiting and coding.
        shares: of each rank's stages in its computing.
        cuts: between stages.
        chunks: microbatches of a step.
        together: whether the last stage is on the machine of the first.
    """
    if len(ranks) > 1 or len(shares[0]) == 1:
        lasts = [own[-1] if len(own) > 1 else 0.0 for own in shares]
        return [
            RankTimes(step_s, waited_s, coding_s, last)
            for (step_s, waited_s, coding_s), last in zip(ranks, lasts, strict=True)
        ]
    (times,), (own,) = ranks, shares
    num_machines = len(own) - together
    computed, coding = [0.0] * num_machines, [0.0] * num_machines
    for i, share in enumerate(own):
        computed[i % num_machines] += share * RankTimes(*times).computed_s
    for i, cut in enumerate(cuts):
        coding[i] += chunks * (cut.coding.encode_act_s + cut.coding.decode_grad_s)
        later = (i + 1) % num_machines
        coding[later] += chunks * (cut.coding.decode_act_s + cut.coding.encode_grad_s)
    found = [RankTimes(a + b, 0.0, b) for a, b in zip(computed, coding, strict=True)]
    if together:
        found[0] = replace(found[0], last_share=own[-1] / ((own[0] + own[-1]) or 1.0))
    return found


class StepCosts(NamedTuple):
    """The costs of a step: times of machines, costs of cuts, and its microbatches."""

    ranks: list[RankTimes]
    cuts: list[CutTimes]
    chunks: int


def step_costs(
    engine: Engine,
    found: Sequence[Mapping[str, Any]],
    links: Sequence[Sequence[Mapping[str, Any]]],
    num_steps: int,
    probe: Callable[[], Sequence[tuple[float, float] | None]],
) -> StepCosts | None:
    """The costs of some steps, of all ranks together; None where such steps are not simulated.

    That is without a cut, before anything has been sent, on accelerators with several stages in a
    process, whose clocks are not its own, and with several stages a rank: but for the first and the
    last stage on the first rank.

    Args:
        engine: that ran them.
        found: of each rank ``times`` (seconds of a step, of these waiting and coding) and
            ``shares`` of its stages.
        links: as of `cut_times`.
        num_steps: how many.
        probe: gives Mbit/s and round trip of each cut, or nothing; called by every rank or none.
    """
    places = engine.mesh.pp_size
    unknown = [None] * (len(links) // 2)
    num_stages = sum(len(rank["shares"]) for rank in found[:places])
    if not links or len(unknown) != num_stages - 1:
        return None
    if not all(rank["shares"] and rank["times"] for rank in found):
        return None
    if cut_times(links, unknown) is None:
        return None
    cuts = cut_times(links, probe() or unknown)
    assert cuts is not None
    messages: int = max(state["messages"] for state in links[0])
    chunks = round(messages / num_steps)
    # Of replicas the one whose step takes longest.
    slowest = [max(found[place::places], key=lambda rank: rank["times"]) for place in range(places)]
    times, shares = ([rank[name] for rank in slowest] for name in ("times", "shares"))
    return StepCosts(
        stage_times(times, shares, cuts, chunks, together=engine.together), cuts, chunks
    )
