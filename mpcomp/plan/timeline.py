"""A step of a pipeline, event by event: who computes, codes and waits when.

Every stage goes through its forwards and backwards in the order of the engine's own schedule
(`mpcomp.engines.schedules`), takes a message in before each, and hands one over after each. A rank
computes and codes on one processor; where several ranks share a machine, ``num_cores`` of them at a
time do. Messages then take the way that `Network` says. Nothing else is assumed: fill, drain,
bubbles, and what is hidden behind what, come out of it.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

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


#: Fields of a `Span`. Spans are made when somebody asks for them: the garbage collector soon leaves
#: plain tuples of numbers alone, but would look through all that have names again and again.
_Work: TypeAlias = tuple[int, str, int, float, float]


@dataclass(frozen=True)
class Timeline:
    """A step from its first forward to its last backward.

    Attributes:
        step_s: its seconds.
        num_stages: of the pipeline.
    """

    step_s: float
    num_stages: int
    _work: tuple[_Work, ...] = field(repr=False)

    @functools.cached_property
    def spans(self) -> tuple[Span, ...]:
        """All work, in the order in which it began."""
        return tuple(map(Span._make, self._work))

    @property
    def busy_s(self) -> list[float]:
        """Seconds in which each stage computed or coded."""
        sums = [0.0] * self.num_stages
        for stage, _, _, start_s, end_s in self._work:
            sums[stage] += end_s - start_s
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


@dataclass(slots=True, eq=False)
class _Passes:
    """The forwards of a stage, or its backwards: one microbatch after the other.

    Attributes:
        stage: of them.
        kind: of them.
        seconds: of each.
        begun: how many have.
        receiver: passes that need what these hand over; None where nobody does.
        num_bytes: of a message to them.
        at_hand: whether inputs need no message: the first stage has its own, and the last one the
            gradient after its forward.
        arrivals: of messages that have been sent to passes to come, in the order of microbatches:
            when, and the event's number.
        awaited: whether the stage stands still for a message to these that has not been sent.
    """

    stage: _Stage
    kind: str
    seconds: float
    begun: int = 0
    receiver: _Passes | None = None
    num_bytes: float = 0.0
    at_hand: bool = True
    arrivals: deque[tuple[float, int]] = field(default_factory=deque)
    awaited: bool = False

    def send_to(self, receiver: _Passes, num_bytes: float) -> None:
        self.receiver, self.num_bytes = receiver, num_bytes
        receiver.at_hand = False


class _Stage:
    """A stage with its order of passes, which is that of `InFlight1F1B`."""

    def __init__(self, index: int, times: StageTimes, chunks: int, warmup: int) -> None:
        self.index, self._chunks, self._warmup = index, chunks, warmup
        forward_s = times.decode_act_s + times.forward_s + times.encode_act_s
        backward_s = times.decode_grad_s + times.backward_s + times.encode_grad_s
        self.forward = _Passes(self, FORWARD, forward_s)
        self.backward = _Passes(self, BACKWARD, backward_s)

    def next(self) -> _Passes | None:
        """Passes of which the next one is the stage's next; None after the last."""
        forwards, backwards = self.forward.begun, self.backward.begun
        if forwards < self._chunks and forwards - backwards < self._warmup:
            return self.forward
        return self.backward if backwards < self._chunks else None


class _Simulation:
    """Events in the order of time: passes that end, and messages that a stage stands still for.

    Other messages arrive without an event: the stage finds them when it comes to them. Each has a
    number from when it is sent all the same, as events of one time come in the order in which they
    became certain.
    """

    def __init__(
        self,
        stages: Sequence[StageTimes],
        messages: Sequence[Messages],
        network: Network,
        chunks: int,
        in_flight: int | None,
        num_cores: int | None,
    ) -> None:
        num_stages = len(stages)
        depth = min(chunks, in_flight or 2 * num_stages - 1)
        self._stages = [
            _Stage(i, times, chunks, warmup_of(i, num_stages, depth))
            for i, times in enumerate(stages)
        ]
        for (one, other), sent in zip(itertools.pairwise(self._stages), messages, strict=True):
            one.forward.send_to(other.forward, sent.act_bytes)
            other.backward.send_to(one.backward, sent.grad_bytes)
        self._wires = Wires(network)
        self._free_cores = num_stages if num_cores is None else num_cores
        #: Passes of which one could begin, in the order in which they could.
        self._ready: deque[_Passes] = deque()
        #: (when, its number, passes of which one ends or may begin, whether it ends)
        self._events: list[tuple[float, int, _Passes, bool]] = []
        self._numbers = itertools.count()
        self._work: list[_Work] = []

    def run(self) -> Timeline:
        now = 0.0
        for stage in self._stages:
            self._consider(stage, now)
        self._start(now)
        while self._events:
            now, _, passes, ended = heapq.heappop(self._events)
            if ended:
                self._end(passes, now)
                self._consider(passes.stage, now)
            else:
                self._ready.append(passes)
            self._start(now)
        return Timeline(now, len(self._stages), tuple(self._work))

    def _consider(self, stage: _Stage, now: float) -> None:
        """Has an idle stage go on as soon as what its next work needs is there."""
        passes = stage.next()
        if passes is None:
            return
        if passes.at_hand:
            self._ready.append(passes)
        elif not passes.arrivals:
            passes.awaited = True
        else:
            there, number = passes.arrivals.popleft()
            if there < now:
                self._ready.append(passes)
            else:
                heapq.heappush(self._events, (there, number, passes, False))

    def _start(self, now: float) -> None:
        while self._ready and self._free_cores:
            passes = self._ready.popleft()
            self._free_cores -= 1
            end = now + passes.seconds
            self._work.append((passes.stage.index, passes.kind, passes.begun, now, end))
            passes.begun += 1
            heapq.heappush(self._events, (end, next(self._numbers), passes, True))

    def _end(self, passes: _Passes, now: float) -> None:
        self._free_cores += 1
        receiver = passes.receiver
        if receiver is None:
            return
        source, target = passes.stage.index, receiver.stage.index
        there = self._wires.arrival(source, target, passes.num_bytes, now)
        number = next(self._numbers)
        if receiver.awaited:
            receiver.awaited = False
            heapq.heappush(self._events, (there, number, receiver, False))
        else:
            receiver.arrivals.append((there, number))
