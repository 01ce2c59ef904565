"""Naming the rank that failed, on every rank, within the timeout.

When a rank dies or stalls, its neighbours notice first, stop, and are then missed by *their*
neighbours: an error that names the neighbour is mostly wrong. So each rank that ends leaves a
record in the store, which says either what failed on it or whom it waited for, and follows these
records until it comes to a rank that failed by itself or left no record at all::

    rank 3: waited for 2 ──> rank 2: waited for 1 ──> rank 1: (nothing)     rank 1 is the cause

Then it closes its connections, which ends the waits of its neighbours at once.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store

__all__ = ["Faults", "PeerError", "PeerLost"]

#: Seconds that a rank looks for the records of others: they end at nearly the same time.
_GRACE_S = 2.0


class PeerError(RuntimeError):
    """Training cannot go on, because a rank failed; says which, where and why."""


class PeerLost(Exception):
    """A wait for another rank ended without what was waited for.

    Args:
        peer: number of the rank waited for; None for one of several.
        what: what was waited for.
        cause: the transport's words.
    """

    def __init__(self, peer: int | None, what: str, cause: Exception) -> None:
        super().__init__(f"{what}: {cause}")
        self.peer = peer
        self.what = what
        self.cause = cause


@dataclass(frozen=True)
class _Record:
    """What a rank leaves behind."""

    rank: int
    where: str
    reason: str
    peer: int | None = None  # whom it waited for; None if it failed by itself
    waited: bool = False


class Faults:
    """What this rank does when it, or a rank it needs, fails.

    Args:
        store: shared by all ranks.
        rank: of this process.
        size: number of ranks.
        timeout_s: of waits; a record that takes longer to come is not waited for.
        name_of: names a rank, as in "rank 1 (stage 1)".
        close: closes this rank's connections.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        name_of: Callable[[int], str],
        close: Callable[[], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._grace_s = min(_GRACE_S, timeout_s / 5)
        self._name_of = name_of
        self._close = close
        self._ended: str | None = None
        #: Where this rank is, for its record: "stage 1, microbatch 3, forward".
        self.where = "start"

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Runs a block that needs other ranks.

        Raises:
            PeerError: another rank failed, or has failed before.
        """
        if self._ended is not None:
            raise PeerError(f"this pipeline has ended: {self._ended}")
        try:
            yield
        except PeerError:
            raise  # a block within this one has dealt with it
        except PeerLost as lost:
            for error in (lost, lost.cause):  # frames that still hold the connection
                traceback.clear_frames(error.__traceback__)
            record = _Record(self._rank, lost.what, str(lost.cause), lost.peer, waited=True)
            self._ended = self._end(record)
            raise PeerError(self._ended) from lost
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            self._ended = f"{self._name_of(self._rank)} failed at {self.where}: {reason}"
            self._leave(_Record(self._rank, self.where, reason))
            self._close()
            raise

    def _end(self, record: _Record) -> str:
        unreachable = self._leave(record)
        self._close()
        if unreachable:
            return f"{self._seen(record)} {unreachable}"
        first = self._first(record)
        if first.rank == self._rank:
            return self._seen(first)
        if not first.waited:
            return (
                f"{self._name_of(first.rank)} failed at {first.where}: {first.reason}. "
                f"Noticed here, on {self._name_of(self._rank)}, at: {record.where}"
            )
        return f"{self._seen(first)} Noticed here, on {self._name_of(self._rank)}, next."

    def _seen(self, record: _Record) -> str:
        """What it means that somebody waited in vain."""
        peer = "a rank" if record.peer is None else self._name_of(record.peer)
        how = "did not answer in time" if "imed out" in record.reason else "is gone"
        return (
            f"{peer} {how}: {self._name_of(record.rank)} waited for the {record.where} "
            f"({_first_line(record.reason)})."
        )

    def _leave(self, record: _Record) -> str:
        """Stores the record; returns why that was not possible, if so."""
        try:
            self._store.set(_key(self._rank), json.dumps(asdict(record)))
        except RuntimeError as error:  # its host may be the machine that is gone
            return (
                f"The store cannot be reached either ({_first_line(str(error))}): the machine of "
                "the rendezvous may be the one that failed."
            )
        return ""

    def _first(self, record: _Record) -> _Record:
        """Follows records to the first failure; waits a little for those still to be written."""
        deadline = time.monotonic() + self._grace_s
        seen = {record.rank}
        while record.waited:
            others = [record.peer] if record.peer is not None else self._others(seen)
            found = [r for r in map(self._read, others) if r is not None]
            found.sort(key=lambda r: r.waited)  # who failed by itself before who waited
            if found and found[0].rank not in seen:
                record = found[0]
                seen.add(record.rank)
            elif found or time.monotonic() > deadline:
                break
            else:
                time.sleep(0.05)
        return record

    def _others(self, seen: set[int]) -> list[int]:
        return [rank for rank in range(self._size) if rank not in seen]

    def _read(self, rank: int) -> _Record | None:
        try:
            if not self._store.check([_key(rank)]):
                return None
            return _Record(**json.loads(self._store.get(_key(rank))))
        except RuntimeError:  # the store went meanwhile: what is known must do
            return None


def _key(rank: int) -> str:
    return f"fault/{rank}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no reason given"
