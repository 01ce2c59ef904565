"""Figures of the steps since the last time, of all ranks, for `RunLog` and `log_to`.

Each rank counts what it does itself, and the two ends of a link are on two ranks. A window is
begun, steps go by, and it is gathered: the differences of all counts, from all ranks, put together
by link and by rank. Nothing is sent in between, and no accelerator is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from mpcomp.comm.mesh import Mesh
from mpcomp.core.account import Account, agreed_in_step
from mpcomp.core.sent import Sent
from mpcomp.core.traffic import ReplicaTraffic, Traffic
from mpcomp.data_parallel.replica_sync import ReplicaSync
from mpcomp.links.link import Link

__all__ = ["Clock", "StepFigures", "StepWindow"]

#: The whole of a step on a rank, and the parts that add up to it.
_SECONDS: Final = ("seconds", "compute", "coding", "wait", "exchange", "other")


class Clock(NamedTuple):
    """Seconds on one rank so far: outside evaluation; of these in training, and waiting there."""

    seconds: float
    training: float
    wait: float


@dataclass(frozen=True)
class StepFigures:
    """The figures of some steps, of all ranks.

    Attributes:
        num_steps: how many these are.
        links: of each link the traffic of both ends, summed over the steps.
        exchange: what replicas sent each other, likewise; None for one replica.
        account: all that was sent, by what it was for, likewise.
        ranks: of each rank the mean seconds of a step, whole and by part.
        gathering_s: the most seconds that the last gathering took on a rank.
    """

    num_steps: int
    links: list[Traffic]
    exchange: Sent | None
    account: Account
    ranks: list[dict[str, float]]
    gathering_s: float


class StepWindow:
    """The steps since `begin`; every rank has one, and makes its calls.

    Args:
        mesh: the ranks.
        links: all links.
        replica_sync: of this rank's stages; None for one replica.
        clock: of this rank.
    """

    def __init__(
        self,
        mesh: Mesh,
        links: Sequence[Link],
        replica_sync: ReplicaSync | None,
        clock: Callable[[], Clock],
    ) -> None:
        self._mesh = mesh
        self._links = list(links)
        self._sync = replica_sync
        self._clock = clock
        self._asked: float | None = None  # when it was last gathered
        self._gathering_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Begins anew; what has happened since `gathered` is in no window."""
        self._before = self._counts()
        if self._asked is not None:
            self._gathering_s = time.perf_counter() - self._asked

    def gathered(self, num_steps: int) -> StepFigures:
        """The figures of so many steps since `begin`; all ranks call it after the same step."""
        self._asked = time.perf_counter()
        found = self._mesh.all_gather_object(self._own(num_steps), "figures of steps")
        by_link = zip(*(rank["links"] for rank in found), strict=True)
        between = [Sent.from_dict(rank["exchange"]) for rank in found if rank["exchange"]]
        links = [Traffic.merged(states) for states in by_link]
        exchange = sum(between, Sent()) if between else None
        account = Account.of_links(
            ((link.direction, own.sent) for link, own in zip(self._links, links, strict=True)),
            replicas=exchange or Sent(),
            agreements=num_steps * agreed_in_step(self._mesh.num_ranks, len(links)),
        )
        return StepFigures(
            num_steps=num_steps,
            links=links,
            exchange=exchange,
            account=account,
            ranks=[dict(zip(_SECONDS, rank["seconds"], strict=True)) for rank in found],
            gathering_s=max(rank["gathering_s"] for rank in found),
        )

    def _own(self, num_steps: int) -> dict[str, Any]:
        """The part of this rank."""
        now, before = self._counts(), self._before
        links = [own.since(then) for own, then in zip(now.links, before.links, strict=True)]
        exchange = now.exchange.since(before.exchange)
        seconds, training, wait = (b - a for a, b in zip(before.clock, now.clock, strict=True))
        coding = sum(each.seconds for each in links)
        between = exchange.encode_s + exchange.wait_s + exchange.decode_s
        compute = max(0.0, training - wait - coding - between)
        whole = (seconds, compute, coding, wait, between, max(0.0, seconds - training))
        return {
            "links": [each.to_state() for each in links],
            "exchange": None if self._sync is None else _since(now.sent, before.sent).to_dict(),
            "seconds": [each / num_steps for each in whole],
            "gathering_s": self._gathering_s,
        }

    def _counts(self) -> _Counts:
        sync = self._sync
        exchange = None if sync is None else sync.exchange
        return _Counts(
            self._clock(),
            [replace(link.meter.train) for link in self._links],
            replace(ReplicaTraffic() if exchange is None else exchange.totals),
            Sent() if sync is None else sync.sent,
        )


class _Counts(NamedTuple):
    """All that a rank has counted so far."""

    clock: Clock
    links: list[Traffic]
    exchange: ReplicaTraffic
    sent: Sent


def _since(now: Sent, before: Sent) -> Sent:
    """The difference; all of it where counting began anew, as where a checkpoint was loaded."""
    return now if now.wire_bytes < before.wire_bytes else now - before
