"""The checkpoints of a training loop: when one is due, which are kept, and a last one at a signal.

    with mpcomp.Checkpoints(pipe, "run/last", optimizer=optimizer, every_minutes=10) as checkpoints:
        for step in range(checkpoints.restore().get("step", 0), last):
            ...                                       # forward_backward, optimizer.step
            if checkpoints.step({"step": step + 1}):  # True once told to end, and saved
                break

All ranks make these calls after the same steps of training, so what is saved is of one step. What
only one of them knows, that it has caught a signal or that minutes have gone by, they tell each
other in a small message, at most about every `Checkpoints.AGREE_S` seconds: it costs a round trip.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar, Protocol

import torch

from mpcomp.checkpoint.finding import exists
from mpcomp.checkpoint.locking import FolderLock
from mpcomp.checkpoint.replacing import new_token
from mpcomp.comm.agreement import SharedOutcome
from mpcomp.comm.handshake import check_alike
from mpcomp.comm.loader_workers import attend_to_the_rank_alone
from mpcomp.comm.mesh import Mesh

__all__ = ["Checkpoints"]

Extra = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None


class _Pipe(Protocol):
    """A pipeline, as far as it is needed here."""

    mesh: Mesh

    def save(
        self,
        folder: str | Path,
        *,
        optimizer: torch.optim.Optimizer | None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        extra: Mapping[str, Any] | None,
        keep: int | None,
    ) -> None: ...

    def load(
        self,
        folder: str | Path,
        *,
        optimizer: torch.optim.Optimizer | None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    ) -> dict[str, Any]: ...


class Checkpoints:
    """The checkpoints of one training loop, under one name; every rank makes one.

    The newest is ``folder`` itself. Those before it, where they are kept, are called by their steps
    of training: ``folder-step-00000120``. While this is open no other run can write the folder, and
    a signal ends the loop after the step at hand, with a checkpoint; the second one at once.

    Args:
        pipe: the pipeline.
        folder: on each rank's own disk, or on one that they share.
        optimizer: as of `mpcomp.Pipeline.save`.
        scheduler: likewise.
        every_steps: number of calls of `step` between two checkpoints; None for no such number.
        every_minutes: minutes between two checkpoints, by the first rank's clock, likewise.
        keep: number of checkpoints that are kept.
        signals: what ends the loop; caught in the main thread alone, as Python has it.

    Attributes:
        stopped: number of the signal that has ended the loop; 0 before.

    Raises:
        ValueError: a number that cannot be, ranks that were given others, or another run that is
            writing the folder.
    """

    #: Seconds between two agreements of several ranks, as far as their steps are shorter.
    AGREE_S: ClassVar[float] = 1.0

    def __init__(
        self,
        pipe: _Pipe,
        folder: str | Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 1,
        signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        self._pipe = pipe
        self._mesh = pipe.mesh
        self._folder = Path(folder)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._every_steps = every_steps
        self._every_s = None if every_minutes is None else 60 * every_minutes
        self._keep = keep
        self.stopped = 0
        given = {"every_steps": every_steps, "every_minutes": every_minutes, "keep": keep}
        with SharedOutcome(self._mesh) as start:
            _check(**given)
            start.value = [new_token(), given]
        check_alike(
            [of_rank for _, of_rank in start.values],
            lambda found: (
                f"ranks were given different checkpoints: rank {found[0].rank} has "
                f"{found[0].name}={found[0].value}, rank {found[0].first} has "
                f"{found[0].expected}. Pass the same numbers on every rank"
            ),
        )
        self._lock = FolderLock(self._folder, start.values[0][0])
        try:
            with SharedOutcome(self._mesh):
                self._lock.take()
            with SharedOutcome(self._mesh):
                self._lock.check()
        except BaseException:
            self._lock.release()
            raise
        self._caught = 0
        self._former: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            attend_to_the_rank_alone()
            self._process = os.getpid()
            self._former = {each: signal.signal(each, self._catch) for each in signals}
        self._begin()
        self._period = self._until = 1
        self._agreed_at = time.monotonic()

    def restore(self) -> dict[str, Any]:
        """Loads the newest checkpoint that all ranks have, and returns its ``extra``.

        Returns:
            Of a folder without a checkpoint an empty mapping; nothing has changed then.

        Raises:
            ValueError: there is one, and it cannot be loaded; see `mpcomp.Pipeline.load`.
        """
        if not any(self._mesh.all_gather_object(exists(self._folder), "checkpoints there are")):
            return {}
        extra = self._pipe.load(self._folder, optimizer=self._optimizer, scheduler=self._scheduler)
        self._begin()
        return extra

    def step(self, extra: Extra = None) -> bool:
        """Ends a step of the loop: saves if that is due, or if a signal says that it is the last.

        Args:
            extra: for `restore`, as far as the loop knows better than this where it is; or what
                gives it, to be called if it is needed.

        Returns:
            Whether the loop is to end; a checkpoint of this step is saved then.

        Raises:
            OSError: the checkpoint cannot be written.
        """
        if self.stopped:
            return True
        self._steps += 1
        signal_number, is_late = self._agreed()
        if signal_number or is_late or self._steps == self._every_steps:
            self.save(extra)
        self.stopped = signal_number
        return bool(signal_number)

    def save(self, extra: Extra = None) -> None:
        """Saves now, on all ranks; the next is due from here on.

        Raises:
            OSError: the checkpoint cannot be written.
        """
        self._pipe.save(
            self._folder,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            extra=extra() if callable(extra) else extra,
            keep=self._keep,
        )
        self._begin()

    def close(self) -> None:
        """Lets other runs write the folder, and signals do what they did before."""
        self._lock.release()
        for each, former in self._former.items():
            signal.signal(each, former)
        self._former = {}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Counts steps and time to the next checkpoint."""
        self._steps = 0
        self._saved_at = time.monotonic()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a fork of this one has no loop to end
            signal.signal(number, self._former[number])
            signal.raise_signal(number)
            return
        if self._caught:  # whoever asks twice does not want to wait for the end of a step
            self.close()
            signal.raise_signal(number)
        self._caught = number

    def _agreed(self) -> tuple[int, bool]:
        """The signal that some rank has caught, and whether the time is up; alike on all ranks."""
        now = time.monotonic()
        is_late = self._every_s is not None and now - self._saved_at >= self._every_s
        if self._mesh.num_ranks == 1:
            return self._caught, is_late
        self._until -= 1
        if self._until:
            return 0, False
        spent_ms = int(1000 * (now - self._agreed_at)) + 1
        said = self._mesh.all_gather([self._caught, is_late, spent_ms], "agreement to save")
        # From what all have heard: so all are silent for as many steps.
        step_s = max(ms for _, _, ms in said) / 1000 / self._period
        self._until = self._period = min(2 * self._period, max(1, int(self.AGREE_S / step_s)))
        self._agreed_at = now
        return max(number for number, _, _ in said), bool(said[0][1])


def _check(every_steps: Any, every_minutes: Any, keep: Any) -> None:
    for name, value in (("every_steps", every_steps), ("keep", keep)):
        if (value is not None or name == "keep") and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r}: pass a whole number from 1")
    if every_minutes is not None and not (
        isinstance(every_minutes, int | float) and every_minutes > 0
    ):
        raise ValueError(f"every_minutes={every_minutes!r}: pass a number of minutes above 0")
