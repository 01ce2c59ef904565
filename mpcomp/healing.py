"""Training that goes on by itself after a process has died.

Each rank becomes two processes: one that has loaded all that takes long, and does nothing but wait,
and a fork of it that trains. Where a fork dies, those of the other ranks end too, since their
connections break; then all are forked anew, join anew, and go on from the last checkpoint::

    rank 0   waits ─┬─ attempt 0 trains ── PeerError     ┬─ attempt 1 loads, trains ── done
    rank 1   waits ─┴─ attempt 0 trains ── killed        ┴─ attempt 1 loads, trains ── done

What was imported and loaded before stays, so this takes about as long as building the pipeline.
Ranks learn from each other through the store of the rendezvous, which is in none of the forks. A
launcher that is lost takes those that wait with it. Started again, it joins the others' next
attempt; where it had the store, they end, and are to be started again, too.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

import mpcomp.api.build  # noqa: F401  # seconds that would else be spent in each fork
from mpcomp.comm.failures import DifferentCalls, PeerError, say_that_all_returned
from mpcomp.comm.lasting_store import LastingStore
from mpcomp.comm.mesh import ATTEMPT, HEALING, attempt_of_launcher, launched
from mpcomp.comm.parent import die_with_parent

__all__ = ["heal"]

#: Exit status of a fork that can do nothing about its end, as another rank is gone (sysexits.h).
_AGAIN: Final = 75
#: Seconds between two looks at the store.
_POLL_S: Final = 0.2
#: Seconds for which a rank that cannot go on waits for the store of the rendezvous, for the others
#: to come to a new attempt, and for a sign of life. All wait from moments of their own, each until
#: the slowest has noticed, so this is three times what is to be outlived: a home link that is away
#: for five minutes, or a machine that boots. To give up sooner saves nothing: no rank can go on.
_PATIENCE_S: float = 900.0
#: Seconds of such a wait after which it is said.
_SAY_S: Final = 10.0
#: Seconds for which the process that has the store waits for the others at the end.
_PART_S: Final = 60.0
#: What asks a process to end.
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)
#: Calls of `heal` so far in this process: all ranks make them in the same order.
_calls = itertools.count()


def heal(train: Callable[[], Any], *, restarts: int = 100, grace_s: float = 0.5) -> None:
    """Runs ``train`` in forks of this process until it has come to its end on all ranks.

    ``train`` builds the pipeline, loads the last checkpoint, if there is one, and saves some as it
    goes. It is called anew, in a new fork on each rank, whenever a rank's fork is killed by a
    signal or another rank is gone. An error of its own ends all ranks, as without this, and so do
    ranks that make different calls. What it returns is lost with its process: results belong into
    files::

        def train():
            pipe = mpcomp.pipeline(model, chunks=8, loss_fn=F.cross_entropy)
            ...

        dataset = load()        # once, not in each attempt
        mpcomp.heal(train)

    A signal to end (SIGTERM, SIGINT) that one rank gets is passed on to the forks of all ranks,
    which may save before they end. This process dies with torchrun, and its fork with it, on Linux.

    Args:
        train: without arguments; it must not rely on what an earlier attempt has left in memory.
        restarts: the most attempts after the first.
        grace_s: seconds in which a fork may end by itself, once that of another rank has, before
            it is killed.

    Raises:
        ValueError: this process cannot be forked: it has used a GPU, joined a process group or
            begun threads of torch.
        SystemExit: an error of ``train``, here or on another rank, a signal, no restart left, or a
            rank or the rendezvous that is out of reach for fifteen minutes, as its torchrun, its
            machine or the way to it is gone.
    """
    if restarts < 0:
        raise ValueError(f"restarts={restarts}: expected 0 or more")
    _check_forkable()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # else the parent is a shell, which may go
        die_with_parent(os.getppid())
    call = next(_calls)
    stop = _Stop()
    with stop.heard(), _last_words():
        others = _Others(call, stop) if launched() else None
        first, ending = (0, _Ending()) if others is None else others.arrive()
        for attempt in () if ending.done else range(first, restarts + 1):
            if attempt and others is not None and not others.gather(attempt, stop):
                continue
            fork = _Fork(train, call, attempt, stop)
            try:
                ending = _watched(fork, others, stop, grace_s)
            finally:
                fork.kill()  # at an error here: Python would wait for it
            if stop.signal is not None or not ending.again:
                break
            if ending.why:
                last = "no attempt is left" if attempt == restarts else "all ranks begin again"
                print(f"{ending.why}; {last}", file=sys.stderr, flush=True)
        if others is not None:
            others.part()
    if stop.signal is not None:
        sys.exit(128 + stop.signal)
    if not ending.done:
        sys.exit(ending.status)


@contextmanager
def _last_words() -> Iterator[None]:
    """Ends this process, and says why, where the others are out of reach for good."""
    try:
        yield
    except PeerError as error:
        sys.exit(f"heal: {error}")


@dataclass(frozen=True)
class _Ending:
    """An attempt's end on this rank.

    Attributes:
        done: ``train`` has returned, on all ranks.
        again: it ended through what a new attempt may not meet.
        killed: some rank was ended by a signal, from which errors of others may follow.
        status: for this process to end with, where it is neither.
        why: what happened here; empty where it happened to another rank.
    """

    done: bool = False
    again: bool = False
    killed: bool = False
    status: int = 1
    why: str = ""


class _Fork:
    """The process that trains in one attempt."""

    def __init__(self, train: Callable[[], Any], call: int, attempt: int, stop: _Stop) -> None:
        self.attempt = attempt
        self.process = multiprocessing.get_context("fork").Process(
            target=_train, args=(train, call, attempt, os.getpid()), name=f"attempt {attempt}"
        )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else both processes would write what is buffered
        with stop.waiting_for(self.process):
            self.process.start()

    def ending(self) -> _Ending | None:
        """The end that this process alone has come to; None while it runs."""
        status = self.process.exitcode
        if status is None:
            return None
        if status == 0:
            return _Ending(done=True)
        if status == _AGAIN:
            return _Ending(again=True)
        if status < 0:
            by = signal.Signals(-status).name
            rank = f"rank {os.environ['RANK']} (" if launched() else "training ("
            why = f"{rank}process {self.process.pid}) was ended by {by}"
            return _Ending(again=True, killed=True, why=why)
        return _Ending(status=status)

    def kill(self) -> None:
        """Ends it at once, if it has not ended."""
        self.process.kill()
        self.process.join()


def _train(train: Callable[[], Any], call: int, attempt: int, parent: int) -> None:
    """The whole life of a fork."""
    os.setpgid(0, 0)  # a terminal's signal then comes by the parent alone, and once
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    os.environ[HEALING], os.environ[ATTEMPT] = str(call), str(attempt)
    try:
        train()
    except SystemExit as leaving:
        if leaving.code:
            raise
    except DifferentCalls:
        raise  # as it would be in the next attempt
    except PeerError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(_AGAIN)
    say_that_all_returned()


def _watched(fork: _Fork, others: _Others | None, stop: _Stop, grace_s: float) -> _Ending:
    """The attempt's end, once all ranks have come to it.

    Raises:
        PeerError: this rank's fork has ended, and the others are out of reach.
    """
    over_since: float | None = None
    failed_since: float | None = None
    while True:
        fork.process.join(_POLL_S)
        own = told = fork.ending()
        if own is not None and not own.done and not own.again:
            failed_since = failed_since or time.monotonic()
            if time.monotonic() - failed_since < grace_s:
                told = None  # it may be what comes of a kill that is not told yet
        verdict = None
        if others is not None:
            try:
                others.share(stop, patient=own is not None)
                if stop.signal is None:
                    verdict = others.verdict(fork.attempt, told)
            except PeerError:
                if own is not None and stop.signal is None:
                    raise
                # else it trains, which may need no store, or is to end anyway
        if others is None or stop.signal is not None:
            if own is not None:
                return own
            continue
        if verdict is None or (own is not None and told is None and not verdict.killed):
            continue
        if own is None:
            over_since = over_since or time.monotonic()
            if time.monotonic() - over_since < grace_s:
                continue
            fork.kill()
        return own if own is not None and own.again and verdict.again else verdict


class _Others:
    """Messages between the processes that wait, through the store of the rendezvous.

    Each is set once, by one rank, and says so wherever it is read: a question may be asked twice.
    """

    def __init__(self, call: int, stop: _Stop) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._lasting = _store()
        self._lasting.patience_s = _PATIENCE_S
        self._lasting.hurried = lambda: stop.signal is not None
        prefix = f"mpcomp/heal/{attempt_of_launcher()}/{call}"
        self._store: Store = PrefixStore(prefix, self._lasting)
        self._told: set[int] = set()
        #: Of each rank the last sign of life, and when it was new.
        self._signs: dict[int, tuple[bytes, float]] = {}
        self._gave_sign = self._looked = -math.inf

    def arrive(self) -> tuple[int, _Ending]:
        """The attempt that this process begins with, or the end of all of them.

        It is the first, unless an earlier process had this rank: with a launcher that was killed,
        say. The others have seen that rank die, or see it now, and wait for it.
        """
        attempt, ending = 0, _Ending()
        if self._is_said("alive", self.rank):
            attempt = int(self._store.get("attempt")) if self._store.check(["attempt"]) else 0
            if self._is_said_by_all(f"{attempt}/done"):
                ending = _Ending(done=True)
            elif not attempt or self._is_said(f"{attempt}/here", self.rank):
                self.tell(attempt, _Ending(again=True, killed=True))
                attempt += 1
        self._give_sign()
        return attempt, ending

    def gather(self, attempt: int, stop: _Stop) -> bool:
        """Waits until all ranks have come to an attempt, or one has told of an error.

        Returns:
            Whether the attempt is to begin: it is over where a rank has died in it already.

        Raises:
            SystemExit: some have not in `_PATIENCE_S` seconds, or there is a signal to end.
        """
        self._lasting.patience_s = _PATIENCE_S
        self._store.set("attempt", str(attempt))  # by all, before any can come to the next one
        self._say(f"{attempt}/here")
        begin, said = time.monotonic(), False
        while not self._is_said_by_all(f"{attempt}/here"):
            self.share(stop)
            if stop.signal is not None:
                sys.exit(128 + stop.signal)
            if self._store.check(["failed"]):
                return True
            if self._store.check([f"{attempt}/again"]):
                return False
            seconds = time.monotonic() - begin
            late = [str(r) for r in range(self.size) if not self._is_said(f"{attempt}/here", r)]
            if late and seconds > _PATIENCE_S:
                self.tell(attempt, _Ending())
                sys.exit(
                    f"rank {', '.join(late)} did not begin again within {_PATIENCE_S:g} s: its "
                    "torchrun or its machine is gone. Start the same command on all machines"
                )
            if late and seconds > _SAY_S and not said:
                said = True
                print(
                    f"heal: waiting for rank {', '.join(late)}, for {_PATIENCE_S:g} s: if its "
                    "torchrun has ended, start it again",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(_POLL_S)
        return True

    def share(self, stop: _Stop, *, patient: bool = True) -> None:
        """Tells the others of a signal to end, or hears of theirs; gives a sign of life.

        Args:
            stop: the signal.
            patient: whether what is asked from now on may wait for a connection that is lost.
        """
        self._lasting.patience_s = _PATIENCE_S if patient else 0.0
        self._give_sign()
        if stop.signal is not None:
            self._store.set("stopped", str(int(stop.signal)))
        elif self._store.check(["stopped"]):
            stop.hear(int(self._store.get("stopped")))

    def tell(self, attempt: int, ending: _Ending) -> None:
        """Says how this rank's fork has ended; once."""
        if attempt in self._told:
            return
        if ending.done:
            self._say(f"{attempt}/done")
        elif ending.again:
            if ending.killed:
                self._store.set(f"{attempt}/killed", "")
            self._store.set(f"{attempt}/again", "")
        else:
            self._store.set("failed", json.dumps(ending.status))
        self._told.add(attempt)

    def verdict(self, attempt: int, own: _Ending | None) -> _Ending | None:
        """The end of the attempt on all ranks; None while some may still be training.

        Args:
            attempt: its number.
            own: the end on this rank, which is told to the others; None while there is none.

        Raises:
            PeerError: the store is out of reach, or a rank that is not known to have ended.
        """
        if own is not None:
            self.tell(attempt, own)
        if self._store.check(["failed"]):
            return _Ending(status=json.loads(self._store.get("failed")))
        if self._store.check([f"{attempt}/again"]):
            return _Ending(again=True, killed=self._store.check([f"{attempt}/killed"]))
        if own is not None:
            if self._is_said_by_all(f"{attempt}/done"):
                return _Ending(done=True)
            self._look_for_signs(attempt)
        return None

    def part(self) -> None:
        """Has the rank that has the store itself wait until the others have read there."""
        self._lasting.patience_s = 0.0
        deadline = time.monotonic() + _PART_S
        with suppress(PeerError):  # who has no store has none to wait for, and needs none
            self._say("parted")
            while self._lasting.is_host and not self._is_said_by_all("parted"):
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_S)

    def _give_sign(self) -> None:
        """Says now and then that this process lives."""
        now = time.monotonic()
        if now - self._gave_sign > _PATIENCE_S / 30:
            self._store.set(f"alive/{self.rank}", str(now))
            self._gave_sign = now

    def _look_for_signs(self, attempt: int) -> None:
        """Raises PeerError if a rank that has not ended has given no sign of life for long."""
        now = time.monotonic()
        if now - self._looked < _PATIENCE_S / 30:
            return
        self._looked = now
        for rank in range(self.size):
            if self._is_said(f"{attempt}/done", rank):
                continue
            sign = self._store.get(f"alive/{rank}") if self._is_said("alive", rank) else b""
            last, since = self._signs.get(rank, (None, now))
            if sign != last:
                self._signs[rank] = sign, now
            elif now - since > _PATIENCE_S:
                raise PeerError(
                    f"rank {rank} has given no sign of life for {_PATIENCE_S:g} s: its torchrun, "
                    "its machine or its way to the rendezvous is gone"
                )

    def _say(self, what: str) -> None:
        self._store.set(f"{what}/{self.rank}", "")

    def _is_said(self, what: str, rank: int) -> bool:
        return self._store.check([f"{what}/{rank}"])

    def _is_said_by_all(self, what: str) -> bool:
        return self._store.check([f"{what}/{rank}" for rank in range(self.size)])


@functools.cache
def _store() -> LastingStore:
    """The store of the rendezvous, as long as this process lives."""
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    store = LastingStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_host=not of_torchrun and os.environ["RANK"] == "0",
        say=lambda words: print(f"heal: {words}", file=sys.stderr, flush=True),
    )
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)  # no fork makes one of its own
    return store


class _Stop:
    """A signal to end that this process has got, or heard of, and passed on."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._is_own = False
        self._fork: ForkProcess | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """A context in which SIGTERM and SIGINT are passed on.

        Outside the main thread, to which Python gives no signals, they are not.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._get) for number in _ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def waiting_for(self, fork: ForkProcess) -> Iterator[None]:
        """A context in which a fork begins; signals wait until it can have them."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            yield
            self._fork = fork
            if self.signal is not None:  # since the fork before has ended
                self._pass_on(self.signal)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def hear(self, number: int) -> None:
        """Passes on what another rank has got, unless this one has."""
        if self.signal is None:
            self.signal = number
            self._pass_on(number)

    def _get(self, number: int, frame: Any) -> None:
        was_passed_on = self.signal is not None and not self._is_own
        self.signal, self._is_own = number, True
        if not was_passed_on:  # a fork takes the second for a wish to end at once
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self._fork is not None and self._fork.pid is not None and self._fork.is_alive():
            os.kill(self._fork.pid, number)


def _check_forkable() -> None:
    what = None
    if not hasattr(os, "fork"):
        what = "this system has no fork: start the script with torchrun --max-restarts"
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        what = "a GPU is in use already, which forks cannot share: move that into the function"
    elif dist.is_available() and dist.is_initialized():
        what = "the process group is there already: make it, and the pipeline, in the function"
    elif torch.get_num_threads() > 1 and _num_threads() > 1:
        what = (
            "torch's threads have begun, and are not there in a fork, which would wait for them "
            "for ever: set OMP_NUM_THREADS=1, as torchrun does, or move what computes into the "
            "function"
        )
    if what is not None:
        raise ValueError(f"heal: {what}")


def _num_threads() -> int:
    """Threads of this process, those of libraries too; 1 where the system does not tell."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1
