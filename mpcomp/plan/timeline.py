"""A step of a pipeline, event by event: who computes, codes and waits when.

Every host goes through its forwards and backwards in the order of the engine's own schedule
(`mpcomp.engines.schedules`), takes a message in before each, and hands one over after each. The
first may have the last stage, too. A host computes and codes on one processor; where several share
a machine, ``num_cores`` of them at a time do. Messages then take the way that `Network` says.
Nothing else is assumed: fill, drain, bubbles, and what is hidden behind what, come out of it.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from mpcomp.engines.schedules import ring_order, warmup_of
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
        num_hosts: that have them.
    """

    step_s: float
    num_stages: int
    num_hosts: int
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
    def ends_s(self) -> list[float]:
        """Seconds at which each stage has done all of its work."""
        ends = [0.0] * self.num_stages
        for stage, _, _, _, end_s in self._work:
            ends[stage] = max(ends[stage], end_s)
        return ends

    @property
    def bubble(self) -> float:
        """The share of all hosts' time in which they waited."""
        return 1 - sum(self.busy_s) / (self.num_hosts * self.step_s)


def timeline(
    stages: Sequence[StageTimes],
    messages: Sequence[Messages],
    network: Network,
    *,
    chunks: int,
    in_flight: int | None = None,
    behind: int | None = None,
    num_cores: int | None = None,
) -> Timeline:
    """Simulates a step.

    Args:
        stages: one to a host, in order; one more is on the first host.
        messages: of every cut.
        network: of the hosts.
        chunks: microbatches of a step.
        in_flight: microbatches under way on the first stage; None for the engine's own choice.
        behind: of them, where a last stage on the first host is done with them, as `ring_order`
            has it.
        num_cores: that all hosts share; None gives each its own.

    Raises:
        ValueError: numbers of stages, cuts and hosts that do not fit, or a count below 1.
    """
    _check(stages, messages, network, chunks, in_flight, num_cores)
    return _Simulation(stages, messages, network, chunks, in_flight, behind, num_cores).run()


def _check(
    stages: Sequence[StageTimes],
    messages: Sequence[Messages],
    network: Network,
    chunks: int,
    in_flight: int | None,
    num_cores: int | None,
) -> None:
    num_hosts = len(network.host_mbps)
    # What a host alone gave itself would cross no link.
    takes = (num_hosts, num_hosts + 1) if num_hosts > 1 else (1,)
    if len(stages) not in takes or len(stages) != len(messages) + 1:
        raise ValueError(
            f"{len(stages)} stages, {len(messages)} cuts and {num_hosts} hosts: a stage has a host "
            "of its own, or is the last one and on the first host; and there is a cut between two"
        )
    for name, count in (("chunks", chunks), ("in_flight", in_flight), ("num_cores", num_cores)):
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}: pass at least 1")


@dataclass(slots=True, eq=False)
class _Passes:
    """The forwards of a stage, or its backwards: one microbatch after the other.

    Attributes:
        host: that has them.
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
        awaited: whether the host stands still for a message to these that has not been sent.
    """

    host: _Host
    stage: int
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


class _Host:
    """A host: the passes of its stages, in the order of the schedule."""

    order: Iterator[_Passes]


class _Stage:
    """A stage on a host."""

    def __init__(self, index: int, times: StageTimes, host: _Host) -> None:
        forward_s = times.decode_act_s + times.forward_s + times.encode_act_s
        backward_s = times.decode_grad_s + times.backward_s + times.encode_grad_s
        self.forward = _Passes(host, index, FORWARD, forward_s)
        self.backward = _Passes(host, index, BACKWARD, backward_s)

    def order(self, chunks: int, warmup: int) -> Iterator[_Passes]:
        """The order of `InFlight1F1B`, on a host which has this stage alone."""
        for _ in range(warmup):
            yield self.forward
        for i in range(chunks):
            yield self.backward
            if warmup + i < chunks:
                yield self.forward

    def order_with(
        self, last: _Stage, chunks: int, depth: int, num_hosts: int, behind: int | None
    ) -> Iterator[_Passes]:
        """The order of `Ring1F1B`, on the host of the first stage, this one, and of the last."""
        passes = {"F": [self.forward], "L": [last.forward, last.backward], "B": [self.backward]}
        for what, _ in ring_order(chunks, depth, num_hosts, behind):
            yield from passes.get(what, ())  # an update's time is counted nowhere


class _Simulation:
    """Events in the order of time: passes that end, and messages that a host stands still for.

    Other messages arrive without an event: the host finds them when it comes to them. Each has a
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
        behind: int | None,
        num_cores: int | None,
    ) -> None:
        num_stages, num_hosts = len(stages), len(network.host_mbps)
        self._num_stages = num_stages
        self._hosts = [_Host() for _ in range(num_hosts)]
        made = [_Stage(i, times, self._hosts[i % num_hosts]) for i, times in enumerate(stages)]
        for (one, other), sent in zip(itertools.pairwise(made), messages, strict=True):
            one.forward.send_to(other.forward, sent.act_bytes)
            other.backward.send_to(one.backward, sent.grad_bytes)
        depth = in_flight or 2 * num_stages - 1
        if behind is None:
            depth = min(chunks, depth)
        for i, (host, stage) in enumerate(zip(self._hosts, made, strict=False)):
            host.order = stage.order(chunks, min(chunks, warmup_of(i, num_stages, depth)))
        if num_stages > num_hosts:
            self._hosts[0].order = made[0].order_with(made[-1], chunks, depth, num_hosts, behind)
        self._wires = Wires(network, num_stages)
        self._free_cores = num_hosts if num_cores is None else num_cores
        #: Passes of which one could begin, in the order in which they could.
        self._ready: deque[_Passes] = deque()
        #: (when, its number, passes of which one ends or may begin, whether it ends)
        self._events: list[tuple[float, int, _Passes, bool]] = []
        self._numbers = itertools.count()
        self._work: list[_Work] = []

    def run(self) -> Timeline:
        now = 0.0
        for host in self._hosts:
            self._consider(host, now)
        self._start(now)
        while self._events:
            now, _, passes, ended = heapq.heappop(self._events)
            if ended:
                self._end(passes, now)
                self._consider(passes.host, now)
            else:
                self._ready.append(passes)
            self._start(now)
        return Timeline(now, self._num_stages, len(self._hosts), tuple(self._work))

    def _consider(self, host: _Host, now: float) -> None:
        """Has an idle host go on as soon as what its next work needs is there."""
        passes = next(host.order, None)
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
            self._work.append((passes.stage, passes.kind, passes.begun, now, end))
            passes.begun += 1
            heapq.heappush(self._events, (end, next(self._numbers), passes, True))

    def _end(self, passes: _Passes, now: float) -> None:
        self._free_cores += 1
        receiver = passes.receiver
        if receiver is None:
            return
        there = self._wires.arrival(passes.stage, receiver.stage, passes.num_bytes, now)
        number = next(self._numbers)
        if receiver.awaited:
            receiver.awaited = False
            heapq.heappush(self._events, (there, number, receiver, False))
        else:
            receiver.arrivals.append((there, number))
