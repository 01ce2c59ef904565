"""Jobs in processes of their own, each with a time limit: what a job has said by then is kept.

    for event in run_jobs(jobs, workers=1, until=time.monotonic() + 370):
        if isinstance(event, Said):
            write(event.row)                # at once: the next moment may be the last

A job that hangs, or that dies with its GPU, takes nothing with it. Processes are forked from a
server that has imported the modules and touched no GPU, so that each begins within a moment.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

__all__ = ["DONE", "FAILED", "GRACE_S", "STOPPED", "Ended", "Job", "Reporter", "Said", "run_jobs"]

#: How a job ended: by itself, with an error, or at its limit.
DONE, FAILED, STOPPED = "done", "failed", "stopped"
#: Seconds beyond its limit after which a job is killed; within them it may write a checkpoint.
GRACE_S: Final = 8.0


class Reporter:
    """The way of a job to whoever runs it.

    Args:
        end: of a pipe.
        until: the moment at which the job should end, by `time.monotonic`.
    """

    def __init__(self, end: Connection, until: float) -> None:
        self._end = end
        self._until = until

    def say(self, row: dict[str, Any]) -> None:
        """Hands over a result that JSON can hold; it is written at once."""
        self._end.send((None, row))

    @property
    def left_s(self) -> float:
        """Seconds until the job should end by itself."""
        return self._until - time.monotonic()


@dataclass(frozen=True)
class Job:
    """Work for a process.

    Attributes:
        name: of the job.
        run: called as ``run(reporter, *arguments)``; at the top level of a module.
        seconds: its limit.
        arguments: further ones.
    """

    name: str
    run: Callable[..., None]
    seconds: float
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Said:
    """A row that a job has reported."""

    job: Job
    row: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """The end of a job.

    Attributes:
        job: which.
        state: `DONE`, `FAILED` or `STOPPED`.
        why: the error, or what it was stopped at; empty of one that is done.
        seconds: that it took.
    """

    job: Job
    state: str
    why: str
    seconds: float


@dataclass
class _Running:
    """A job under way."""

    job: Job
    process: BaseProcess
    end: Connection
    limit: float
    began: float = field(default_factory=time.monotonic)
    error: str | None = None
    killed: bool = False


def run_jobs(
    jobs: Sequence[Job],
    *,
    until: float,
    workers: int = 1,
    preload: Sequence[str] = (),
    least_s: float = 1.0,
) -> Generator[Said | Ended, None, None]:
    """Runs jobs in their order, and gives what they say as they say it.

    A generator: its end, or an exception of its reader, kills what still runs.

    Args:
        jobs: each gets its own limit, or what is left of the time.
        until: the moment at which all end, by `time.monotonic`; jobs that would begin within
            ``least_s`` of it do not begin.
        workers: jobs at a time.
        preload: modules that all processes have imported when they begin; none may use a GPU.
        least_s: seconds without which a job is not begun.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    _wait_for_server(context)
    waiting, running = list(jobs), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < workers and until - time.monotonic() > least_s:
                running.append(_begin(context, waiting.pop(0), until))
            if not running:
                return
            yield from _events(running)
    finally:
        for one in running:
            _kill(one.process)


def _wait_for_server(context: Any) -> None:
    """Returns when the server has imported its modules, for which no job's time is spent."""
    process = context.Process(target=os.getpid)
    process.start()
    process.join()


def _begin(context: Any, job: Job, until: float) -> _Running:
    limit = min(until, time.monotonic() + job.seconds)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, limit, job.run, job.arguments))
    process.start()
    there.close()
    return _Running(job, process, here, limit)


def _events(running: list[_Running]) -> Iterator[Said | Ended]:
    """Waits until something is said, or a limit has come; removes the jobs that have ended."""
    limits = [one.limit + GRACE_S for one in running if not one.killed]
    left_s = None if not limits else max(0.0, min(limits) - time.monotonic())
    ready = wait([one.end for one in running], timeout=left_s)
    for one in list(running):
        if one.end in ready:
            try:
                error, row = one.end.recv()
            except EOFError:
                running.remove(one)
                yield _ended(one)
                continue
            if error is None:
                yield Said(one.job, row)
            else:
                one.error = error
        elif not one.killed and time.monotonic() >= one.limit + GRACE_S:
            one.killed = True
            _kill(one.process)  # its pipe ends behind what it had said


def _ended(one: _Running) -> Ended:
    one.process.join()
    _kill(one.process)  # what it has started
    seconds = time.monotonic() - one.began
    if one.killed:
        return Ended(one.job, STOPPED, f"killed after {seconds:.0f} s", seconds)
    if one.error is not None:
        return Ended(one.job, FAILED, one.error, seconds)
    if one.process.exitcode:
        return Ended(one.job, FAILED, f"died with exit code {one.process.exitcode}", seconds)
    if time.monotonic() >= one.limit:
        return Ended(one.job, STOPPED, f"at its limit, after {seconds:.0f} s", seconds)
    return Ended(one.job, DONE, "", seconds)


def _kill(process: BaseProcess) -> None:
    """Ends a job and all that it has started, which is in its process group."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _work(
    end: Connection, limit: float, run: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """A job's process."""
    os.setpgid(0, 0)
    _end_with_parent()
    try:
        run(Reporter(end, limit), *arguments)
    except BaseException as error:
        if not isinstance(error, ValueError):  # which says what to pass
            traceback.print_exc()
        end.send((f"{type(error).__name__}: {error}", {}))
    end.close()
    os._exit(0)  # without destructors, which may wait for peers that are gone


def _end_with_parent() -> None:
    """Ends this process, and what it has started, when whoever runs it ends, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
