"""A step of a pipeline, event by event: who computes, codes and waits when.

Every stage goes through its forwards and backwards in the order of the engine's own schedule
(`mpcomp.engines.schedules`), takes a message in before each, and hands one over after each. A rank
computes and codes on one processor; where several ranks share a machine, ``num_cores`` of them at a
time do. Messages then take the way that `Network` says. Nothing else is assumed: fill, drain,
bubbles, and what is hidden behind what, come out of it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from mpcomp.engines.schedules import warmup_of
from mpcomp.plan.network import Network, Wires

__all__ = ["BACKWARD", "FORWARD", "Messages", "Span", "StageTimes", "Timeline", "timeline"]

FORWARD: Final = "forward"
BACKWARD: Final = "backward"


class StageTimes(NamedTuple):
    """Seconds of one microbatch on a stage's processor.

    Attributes:
        forward_s: of computing.
        backward_s: likewise.
        encode_act_s: of what the stage sends forward; 0 on the last.
        decode_act_s: of what comes to it; 0 on the first.
        encode_grad_s: of what it sends back; 0 on the first.
        decode_grad_s: of what comes back to it; 0 on the last.
    """

    forward_s: float
    backward_s: float
    encode_act_s: float = 0.0
    decode_act_s: float = 0.0
    encode_grad_s: float = 0.0
    decode_grad_s: float = 0.0


class Messages(NamedTuple):
    """Bytes of the messages of one microbatch over one cut."""

    act_bytes: float
    grad_bytes: float


class Span(NamedTuple):
    """Work of a stage on a microbatch, from its start to its end in seconds, coding included."""

    stage: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step from its first forward to its last backward.

    Attributes:
        step_s: its seconds.
        spans: all work, in the order in which it began.
        num_stages: of the pipeline.
    """

    step_s: float
    spans: tuple[Span, ...]
    num_stages: int

    @property
    def busy_s(self) -> list[float]:
        """Seconds in which each stage computed or coded."""
        sums = [0.0] * self.num_stages
        for span in self.spans:
            sums[span.stage] += span.end_s - span.start_s
        return sums

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they waited."""
        return 1 - sum(self.busy_s) / (self.num_stages * self.step_s)


def timeline(
    stages: Sequence[StageTimes],
    messages: Sequence[Messages],
    network: Network,
    *,
    chunks: int,
    in_flight: int | None = None,
    num_cores: int | None = None,
) -> Timeline:
    """Simulates a step.

    Args:
        stages: one to a host, in order.
        messages: of every cut.
        network: of the hosts.
        chunks: microbatches of a step.
        in_flight: microbatches under way on the first stage; None for the engine's own choice.
        num_cores: that all stages share; None gives each its own.

    Raises:
        ValueError: numbers of stages, cuts and hosts that do not fit, or a count below 1.
    """
    _check(stages, messages, network, chunks, in_flight, num_cores)
    return _Simulation(stages, messages, network, chunks, in_flight, num_cores).run()


def _check(
    stages: Sequence[StageTimes],
    messages: Sequence[Messages],
    network: Network,
    chunks: int,
    in_flight: int | None,
    num_cores: int | None,
) -> None:
    if not len(stages) == len(messages) + 1 == len(network.host_mbps):
        raise ValueError(
            f"{len(stages)} stages, {len(messages)} cuts and {len(network.host_mbps)} hosts: a "
            "stage has a host of its own, and there is a cut between two"
        )
    for name, count in (("chunks", chunks), ("in_flight", in_flight), ("num_cores", num_cores)):
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}: pass at least 1")


class _Work(NamedTuple):
    """A pass of a microbatch through a stage."""

    kind: str
    microbatch: int


class _Simulation:
    """Events in the order of time: work that ends, and messages that arrive."""

    def __init__(
        self,
        stages: Sequence[StageTimes],
        messages: Sequence[Messages],
        network: Network,
        chunks: int,
        in_flight: int | None,
        num_cores: int | None,
    ) -> None:
        self._stages, self._messages = stages, messages
        self._wires = Wires(network)
        depth = min(chunks, in_flight or 2 * len(stages) - 1)
        self._todo = [deque(_order(i, len(stages), chunks, depth)) for i in range(len(stages))]
        self._last = len(stages) - 1
        self._free_cores = len(stages) if num_cores is None else num_cores
        #: Stages that could go on, in the order in which they could.
        self._ready: deque[int] = deque()
        #: Whether a stage is at work, or needs nothing but a core for it.
        self._busy = [False] * len(stages)
        self._arrived: list[set[_Work]] = [set() for _ in stages]
        #: (when, a number that keeps ties in order, stage, the work that ended or may begin, ended)
        self._events: list[tuple[float, int, int, _Work, bool]] = []
        self._numbers = itertools.count()
        self._spans: list[Span] = []

    def run(self) -> Timeline:
        for stage in range(len(self._stages)):
            self._consider(stage)
        now = 0.0
        self._start(now)
        while self._events:
            now, _, stage, work, ended = heapq.heappop(self._events)
            if ended:
                self._end(stage, work, now)
            else:
                self._arrived[stage].add(work)
            self._consider(stage)
            self._start(now)
        return Timeline(max(s.end_s for s in self._spans), tuple(self._spans), len(self._stages))

    def _consider(self, stage: int) -> None:
        """Notes a stage as ready if it is idle and what its next work needs is there."""
        if self._busy[stage] or not self._todo[stage]:
            return
        work = self._todo[stage][0]
        # The first stage's inputs are there, and so is the last one's gradient after its forward.
        at_hand = stage == (0 if work.kind == FORWARD else self._last)
        if at_hand or work in self._arrived[stage]:
            self._busy[stage] = True
            self._ready.append(stage)

    def _start(self, now: float) -> None:
        while self._ready and self._free_cores:
            stage = self._ready.popleft()
            work = self._todo[stage].popleft()
            self._free_cores -= 1
            end = now + self._seconds(stage, work)
            self._spans.append(Span(stage, *work, now, end))
            heapq.heappush(self._events, (end, next(self._numbers), stage, work, True))

    def _end(self, stage: int, work: _Work, now: float) -> None:
        self._busy[stage] = False
        self._free_cores += 1
        target = stage + 1 if work.kind == FORWARD else stage - 1
        if not 0 <= target <= self._last:
            return
        sent = self._messages[min(stage, target)]
        num_bytes = sent.act_bytes if work.kind == FORWARD else sent.grad_bytes
        there = self._wires.arrival(stage, target, num_bytes, now)
        heapq.heappush(self._events, (there, next(self._numbers), target, work, False))

    def _seconds(self, stage: int, work: _Work) -> float:
        times = self._stages[stage]
        if work.kind == FORWARD:
            return times.decode_act_s + times.forward_s + times.encode_act_s
        return times.decode_grad_s + times.backward_s + times.encode_grad_s


def _order(stage: int, num_stages: int, chunks: int, depth: int) -> list[_Work]:
    """The passes of a stage, as `InFlight1F1B` orders them."""
    warmup = min(chunks, warmup_of(stage, num_stages, depth))
    order = [_Work(FORWARD, i) for i in range(warmup)]
    for i in range(chunks):
        order.append(_Work(BACKWARD, i))
        if warmup + i < chunks:
            order.append(_Work(FORWARD, warmup + i))
    return order
