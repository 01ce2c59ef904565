"""The processes of a recipe under torchrun: the first one speaks for all, and all end alike.

    with joined() as ranks:
        config = ranks.together(lambda: read(path))     # a mistake on one is raised on all

A recipe that was started alone is rank 0 of 1, and nothing here communicates.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist

import mpcomp
from mpcomp.comm.handshake import exchange, show_secret
from mpcomp.comm.joining import join
from mpcomp.comm.mesh import ProcessMesh, launched
from recipes.launcher import end_with_launcher, heals, reach_store, within

T = TypeVar("T")

# Before training one rank may have to wait while another downloads a data set.
START_TIMEOUT_S: Final = 1800.0

# In which the processes find each other, unless --timeout says otherwise.
RENDEZVOUS_S: Final = 300.0

# By then the first rank has noticed the failure of another, or is gone itself.
GRACE_S: Final = 10.0


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this machine
    local_size: int = 1
    machine: int = 0
    world: ProcessMesh | None = None  # where they can be reached, if there are others
    _turns: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def speaks(self) -> bool:
        """Whether this is the one process that shows what all do."""
        return self.rank == 0

    @property
    def writes(self) -> bool:
        """Whether this is the one process of its machine that writes files."""
        return self.local_rank == 0

    def gather(self, value: Any) -> list[Any]:
        """A value that JSON can hold, of every rank, by rank; every rank calls it."""
        if self.world is None:
            return [value]
        world, what = self.world, f"recipe/{next(self._turns)}"
        return within(world.timeout_s + GRACE_S, lambda: exchange(world, what, value))

    def together(self, work: Callable[[], T]) -> T:
        """The result of ``work`` here; every rank calls it, and does in it what is its own.

        Raises:
            ValueError: it did so on some rank; with the same message on all.
        """
        result: T | None = None
        own: ValueError | None = None
        try:
            result = work()
        except ValueError as error:
            own = error
        said = self.gather(None if own is None else str(own))
        failed = [rank for rank, message in enumerate(said) if message is not None]
        if failed:
            where = "" if len(failed) == self.size else f"rank {failed[0]}: "
            raise ValueError(f"{where}{said[failed[0]]}") from own
        return result  # type: ignore[return-value]  # no error, so it has been set

    def fail(self, error: Exception) -> NoReturn:
        """Ends this process with an error, in one line, which one process on each machine says.

        torchrun ends all processes as soon as one has ended, so the others wait for that one.

        Raises:
            PeerError: that is the error, and this process will be replaced.
        """
        of_another = isinstance(error, mpcomp.PeerError)
        if of_another and heals():
            raise error
        line = f"error: {error}"
        if self.world is None:
            sys.exit(line)
        world = self.world
        with suppress(mpcomp.PeerError):  # the store may be gone, with the machine that has it
            if not self.writes and within(2 * GRACE_S, lambda: self._is_said(line, of_another)):
                sys.exit(1)
        print(line, file=sys.stderr, flush=True)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun ends with what is there
            about = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(path).write_text(json.dumps({"message": about}))
        with suppress(RuntimeError, mpcomp.PeerError):
            within(GRACE_S, lambda: world.store.set(f"said/{self.machine}", line))
        sys.exit(1)

    def _is_said(self, line: str, of_another: bool) -> bool:
        """Whether another process of this machine says so.

        Args:
            line: what there is to say.
            of_another: it is only that another process failed, which each tells in its own words.
        """
        assert self.world is not None
        store, key = self.world.store, f"said/{self.machine}"
        try:
            store.wait([key], timedelta(seconds=GRACE_S))
            return of_another or bool(store.get(key).decode() == line)
        except RuntimeError:  # nobody has
            with suppress(RuntimeError):
                return of_another and bool(store.add(f"{key}/by", 1) > 1)
        return False


class Stopped(Exception):
    """The end of a run at a signal, after a step of which there is a checkpoint.

    Args:
        number: of the signal.
        epoch: the step's, from 1.
        step: of that epoch, from 1.
    """

    def __init__(self, number: int, epoch: int, step: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name} after step {step} of epoch {epoch}; go on "
            "with --resume and the folder of the run"
        )
        self.number = number


@contextmanager
def joined(timeout_s: float = RENDEZVOUS_S) -> Iterator[Ranks]:
    """Joins torchrun's other processes, if there are some, and leaves them at the end.

    Within it only the first rank prints. A mistake in the input, numbers that are not finite and
    the failure of another rank end the process with one line. So does the end of torchrun, without
    one.

    Args:
        timeout_s: in which the processes are to find each other.
    """
    already = dist.is_initialized()
    try:
        ranks = _join(timeout_s, already) if launched() else Ranks()
    except (ValueError, mpcomp.PeerError) as error:
        if heals() and isinstance(error, mpcomp.PeerError):
            raise
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # all on this machine would say the same
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    try:
        with nullcontext() if ranks.speaks else _silence():
            yield ranks
            ranks.gather(None)  # none leaves while another may still need it
    except (ValueError, FloatingPointError, mpcomp.PeerError) as error:
        ranks.fail(error)
    except Stopped as stopped:
        if ranks.speaks:
            print(f"\n{stopped}", flush=True)
        sys.exit(128 + stopped.number)
    except KeyboardInterrupt:
        if ranks.size == 1:
            raise
        if ranks.writes:  # not as many tracebacks as processes
            print("interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        if dist.is_initialized() and not already:
            dist.destroy_process_group()


def _meeting_place() -> torch.device:
    """The kind of device by which processes are connected: GPUs, where each can have its own.

    NCCL refuses processes that share one, as those of ``--device cuda:0`` do; gloo serves them.
    """
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.device("cuda" if local_size <= torch.cuda.device_count() else "cpu")


def _join(timeout_s: float, already: bool) -> Ranks:
    device = _meeting_place()
    if not already:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # else the parent is a shell, which may go
            end_with_launcher()
        # By torchrun's own processes; started by hand, the first has the store itself.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or os.environ["RANK"] != "0":
            reach_store(timeout_s)
        join(device, timeout_s)
    mesh = ProcessMesh(1, START_TIMEOUT_S, device)
    show_secret(mesh)
    return Ranks(
        rank=mesh.rank,
        size=mesh.num_ranks,
        local_rank=int(os.environ.get("LOCAL_RANK", mesh.rank)),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", mesh.num_ranks)),
        machine=int(os.environ.get("GROUP_RANK", 0)),
        world=mesh,
    )


@contextmanager
def _silence() -> Iterator[None]:
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield
