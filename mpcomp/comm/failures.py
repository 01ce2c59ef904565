"""Naming the rank that failed, on every rank, within the timeout.

When a rank dies or stalls, its neighbours notice first, stop, and are then missed by *their*
neighbours: an error that names the neighbour is mostly wrong. So each rank that ends leaves a
record in the store, which says either what failed on it or whom it waited for, and follows these
records until it comes to a rank that failed by itself or left no record at all::

    rank 3: waited for 2 ──> rank 2: waited for 1 ──> rank 1: (nothing)     rank 1 is the cause

A rank that has waited for long leaves its record before its own time is up, from a thread: else
rank 3 could end first, find nothing of rank 2, and blame it. Then a rank closes its connections,
which ends the waits of its neighbours at once.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

from torch._C._distributed_c10d import Store

from mpcomp.comm.answers import NoAnswer, answered, let_go, port_of

__all__ = [
    "DifferentCalls",
    "Faults",
    "PeerError",
    "PeerLost",
    "Waits",
    "first_line",
    "grace_of",
    "say_that_all_returned",
]

_T = TypeVar("_T")

#: The most seconds that a rank looks for the records of others, which end at nearly the same time.
_GRACE_S = 2.0

#: In the transport's reason, where the other end was not only slow: of a read, and of a write.
_WORDS_OF_A_CLOSED_CONNECTION = ("closed", "reset", "broken pipe")


def grace_of(timeout_s: float) -> float:
    """Seconds of a timeout that are kept for finding out who is to blame."""
    return min(_GRACE_S, timeout_s / 5)


class PeerError(RuntimeError):
    """Training cannot go on, because a rank failed; says which, where and why."""


class DifferentCalls(PeerError):
    """Training cannot go on, because ranks of the script did not make the same calls."""


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


class Waits:
    """The wait that this rank is in at the moment."""

    def __init__(self) -> None:
        #: Since when (`time.monotonic`), for which rank (None: one of several), for what.
        self.current: tuple[float, int | None, str] | None = None
        #: Number of waits for all others that have ended well, and for what the last was.
        self.got = 0, ""
        #: Called when a wait has ended well after all, though a record of it was left.
        self.take_back: Callable[[], None] | None = None

    @contextmanager
    def on(self, peer: int | None, what: str) -> Iterator[None]:
        """Runs a wait; only that, as what else raises RuntimeError is this rank's own failure.

        Raises:
            PeerLost: the transport gave up.
        """
        self.current = time.monotonic(), peer, what
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(peer, what, error) from error
        finally:
            self.current = None
        if peer is None:
            self.got = self.got[0] + 1, what
        if self.take_back is not None:
            self.take_back()

    @contextmanager
    def leaving(self, what: str, peer: int | None = None) -> Iterator[None]:
        """Begins to send or to receive, which waits for nobody; arguments and errors as of `on`."""
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(peer, what, error) from error


@dataclass(frozen=True)
class _Record:
    """A rank's last words, in the store."""

    rank: int
    where: str
    reason: str
    peer: int | None = None  # whom it waited for, if it waited for one
    waited: bool = False  # else it failed by itself, ...
    returned: bool = False  # ... or came to the end of its script
    num_got: int = 0  # number of waits for all others that had ended well, ...
    last_got: str = ""  # ... and for what the last was


#: All `Faults` of this process, for `say_that_all_returned`.
_of_this_process: weakref.WeakSet[Faults] = weakref.WeakSet()


class Faults:
    """This rank's part in finding out who failed: it itself, or a rank that it needs.

    Args:
        store: shared by all ranks.
        rank: of this process.
        size: number of ranks.
        timeout_s: of waits.
        waits: what this rank waits for.
        name_of: names a rank, as in "rank 1 (stage 1)".
        where: says what this rank is doing: "stage 1, microbatch 3, forward".
        close: closes this rank's connections.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        waits: Waits,
        *,
        name_of: Callable[[int], str],
        where: Callable[[], str],
        close: Callable[[], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._waits = waits
        self._name_of = name_of
        self._where = where
        self._close = close
        self._ended: str | None = None
        self._noted: tuple[float, int | None, str] | None = None  # the wait of the early record
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._left = False  # whether the last record is in the store
        self._unreachable = ""  # why the store did not answer
        self._different = ""  # what ranks waited for that do not make the same calls
        _of_this_process.add(self)
        threading.Thread(
            target=_watch_waits,
            args=(weakref.ref(self), self._stopped, min(1.0, timeout_s / 10)),
            name="mpcomp-waits",
            daemon=True,
        ).start()

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
            end = self._end(self._wait(lost.what, str(lost.cause), lost.peer))
            self._ended = str(end)
            raise end from lost
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            self._ended = f"{self._name_of(self._rank)} failed at {self._where()}: {reason}"
            record = _Record(self._rank, self._where(), reason)
            self._answered(lambda: self._leave(record))
            self.stop()
            raise

    def stop(self) -> None:
        """Closes connections and ends the thread."""
        self._stopped.set()
        self._close()

    def leave_early(self) -> None:
        """Leaves a record once a wait has taken half of the timeout."""
        current = self._waits.current
        if current is None or current is self._noted:
            return
        since, peer, what = current
        if time.monotonic() - since > self._timeout_s / 2:
            self._noted = current
            reason = f"still waiting after {self._timeout_s / 2:g} s"
            self._leave(self._wait(what, reason, peer), early=True)
            self._waits.take_back = self._take_back
            if self._waits.current is not current:  # it ended meanwhile
                self._take_back()

    def say_returned(self) -> None:
        """Leaves word that this rank needs no other any more, for those that still wait for it."""
        if self._ended is None:
            self._ended = "its script has come to its end"
            record = _Record(self._rank, self._where(), "", returned=True)
            self._answered(lambda: self._leave(record))

    def _wait(self, what: str, reason: str, peer: int | None) -> _Record:
        """The record of a wait of this rank."""
        return _Record(self._rank, what, reason, peer, True, False, *self._waits.got)

    def _end(self, record: _Record) -> PeerError:
        """The error of a wait in vain, and of this pipeline."""
        self._answered(lambda: self._leave(record))
        self.stop()
        first, cause = self._answered(lambda: self._first(record)) or (record, record.peer)
        if self._unreachable and first.waited:
            return PeerError(
                f"{self._seen(record, record.peer)} The store cannot be reached either "
                f"({self._unreachable}): the machine of the rendezvous may be the one that failed."
            )
        here = f"Noticed here, on {self._name_of(self._rank)}, at: {record.where}"
        if not first.waited:
            failed = f"{self._name_of(first.rank)} failed at {first.where}: {first.reason}"
            return PeerError(f"{failed}. {here}")
        if self._different:
            return DifferentCalls(
                f"{self._different}: every rank must make the same calls, in the same order"
            )
        seen = self._seen(first, cause)
        return PeerError(seen if first.rank == self._rank else f"{seen} {here}")

    def _seen(self, record: _Record, cause: int | None) -> str:
        """A sentence: somebody waited in vain, and for whom that was in the end."""
        peer = "another rank" if cause is None else self._name_of(cause)
        closed = any(word in record.reason.lower() for word in _WORDS_OF_A_CLOSED_CONNECTION)
        how = "is gone" if closed else "did not answer in time"
        return (
            f"{peer} {how}: {self._name_of(record.rank)} waited for the {record.where} "
            f"({first_line(record.reason)})."
        )

    def _answered(self, ask: Callable[[], _T]) -> _T | None:
        """The store's answer; None if its host hangs, which it would wait for without end."""
        if self._unreachable:
            return None
        try:
            return answered(ask, 2 * grace_of(self._timeout_s))
        except NoAnswer as silence:
            self._unreachable = str(silence)
            atexit.register(let_go, silence.thread, port_of(self._store))
            return None

    def _leave(self, record: _Record, early: bool = False) -> None:
        """Stores the record; an early one only where there is no last one."""
        with self._lock:
            if early and self._left:
                return
            self._left = self._left or not early
            try:
                self._store.set(_key(self._rank), json.dumps(asdict(record)))
            except RuntimeError as error:  # its host may be the machine that is gone
                self._unreachable = first_line(str(error))

    def _take_back(self) -> None:
        """Removes the record of a wait that has ended well, so that it is not believed later."""
        self._waits.take_back = None
        with self._lock, suppress(RuntimeError):
            if not self._left:
                self._store.delete_key(_key(self._rank))

    def _first(self, own: _Record) -> tuple[_Record, int | None]:
        """The record of whoever noticed first, and the rank that is the cause.

        A rank that failed by itself is known at once. That one has left nothing is only known
        when those who are well have had the time to leave their records.
        """
        deadline = time.monotonic() + grace_of(self._timeout_s)
        while True:
            records = {own.rank: own}
            for rank in range(self._size):
                other = self._read(rank) if rank != own.rank else None
                if other is not None:
                    records[rank] = other
            failed = [r for r in records.values() if not r.waited and not r.returned]
            if failed:
                return failed[0], failed[0].rank
            if self._unreachable or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        returned = [rank for rank, record in records.items() if record.returned]
        silent = [rank for rank in range(self._size) if rank not in records]
        records = {rank: record for rank, record in records.items() if record.waited}
        record, cause = self._blamed(own, records, silent or returned)
        if cause in returned:
            self._different = (
                f"{self._name_of(cause)} ended without an error, and {self._name_of(record.rank)} "
                f"waited for the {record.where}"
            )
        elif not silent and _are_different(list(records.values())):
            waits = [f"rank {r.rank} for the {r.where}" for r in records.values()]
            self._different = "ranks waited for different things, " + ", ".join(sorted(waits))
        return record, cause

    def _blamed(
        self, own: _Record, records: dict[int, _Record], silent: list[int]
    ) -> tuple[_Record, int | None]:
        """The record of whoever noticed first, and the rank that it waited for."""
        record, seen = own, {own.rank}
        while record.peer in records and record.peer not in seen:
            record = records[record.peer]
            seen.add(record.rank)
        if record.peer is not None and record.peer not in records:
            return record, record.peer
        for other in records.values():  # of those who waited for one, not for all
            if other.peer in silent:
                return other, other.peer
        return record, silent[0] if silent else record.peer

    def _read(self, rank: int) -> _Record | None:
        try:
            if not self._store.check([_key(rank)]):
                return None
            return _record(rank, self._size, self._store.get(_key(rank)))
        except RuntimeError as error:  # the store went meanwhile: what is known must do
            self._unreachable = first_line(str(error))
            return None


def _watch_waits(
    faults_of: weakref.ref[Faults], stopped: threading.Event, interval_s: float
) -> None:
    """A thread's loop, which ends with its `Faults`, and keeps nobody alive."""
    while not stopped.wait(interval_s):
        faults = faults_of()
        if faults is None:
            return
        faults.leave_early()
        del faults


def _record(rank: int, size: int, raw: bytes) -> _Record | None:
    """A rank's record as it lies in the store; None of what is no record."""
    try:
        match json.loads(raw):
            case {
                "where": str(where),
                "reason": str(reason),
                "peer": peer,
                "waited": bool(waited),
                "returned": bool(returned),
                "num_got": int(num_got),
                "last_got": str(last_got),
            }:
                known = peer if type(peer) is int and 0 <= peer < size else None
                return _Record(rank, where, reason, known, waited, returned, num_got, last_got)
    except (ValueError, RecursionError):
        pass  # who cannot say it is as one who has said nothing
    return None


def _are_different(records: list[_Record]) -> bool:
    """Whether these ranks waited for all others in different calls.

    Not so where one has got what another waits for: then a message has been lost between them.
    """
    waits = {(record.num_got + 1, record.where) for record in records if record.peer is None}
    got = {(record.num_got, record.last_got) for record in records}
    return len({where for _, where in waits}) > 1 and not waits & got


def _key(rank: int) -> str:
    return f"fault/{rank}"


def first_line(text: str) -> str:
    """The reason that the transport gives, without the place in its source and its advice."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    # gloo begins with the place in its own source.
    reason = line.rpartition(".cc:")[2].partition("] ")[2] if ".cc:" in line else line
    return reason.partition(". This is typically")[0][:160]


def say_that_all_returned() -> None:
    """Leaves word for the other ranks that this one's script has come to its end."""
    for faults in list(_of_this_process):
        faults.say_returned()
