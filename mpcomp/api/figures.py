"""The figures of a pipeline: what it has sent, how long it took, and who is told of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import stages as staging
from mpcomp.api.training_steps import TrainingSteps
from mpcomp.comm.mesh import Mesh
from mpcomp.core.account import Account
from mpcomp.core.sent import Sent
from mpcomp.data_parallel.replica_sync import ReplicaSync
from mpcomp.engines.base import Engine
from mpcomp.links.adaptation import Adaptation
from mpcomp.links.link import Link
from mpcomp.links.tied_weights import TiedWeights
from mpcomp.monitor.report import names_of_crossings, print_report, report_of
from mpcomp.monitor.step_log import ScalarWriter, StepLog
from mpcomp.monitor.step_window import Clock, StepWindow
from mpcomp.monitor.tracing import Tracing

__all__ = ["Figures"]


class Figures:
    """The part of `mpcomp.Pipeline` that counts, times and tells."""

    cut_stages: list[staging.Stage]
    ties: list[TiedWeights]
    engine: Engine
    mesh: Mesh
    replica_sync: ReplicaSync | None
    _here: list[int]
    _steps: TrainingSteps
    #: Seconds of `evaluate` and `compare` on this rank so far, which are part of no step.
    _beside_s = 0.0

    @property
    def links(self) -> list[Link]:
        """All links: of each cut first activations, then gradients; then ties."""
        return self._steps.links

    # -- so far -------------------------------------------------------------------------------

    @property
    def wire_bytes(self) -> int:
        """Bytes of all messages of training so far, headers included; of all ranks."""
        return int(self.sent.wire_bytes)

    @property
    def dense_bytes(self) -> int:
        """Bytes that training so far would have sent uncompressed, in the tensors' own dtypes."""
        return int(self.sent.dense_bytes)

    def account(self) -> Account:
        """All that training so far has sent, of all ranks, by what it was for; every rank calls it.

        Replicas that average by DDP or share parameters, and what first ranks tell the others of
        their data, count from the last checkpoint that was loaded.
        """
        return self._steps.account()

    @property
    def sent(self) -> Sent:
        """All that training so far has sent over cuts and ties, of all ranks; see `account`."""
        return self._steps.sent

    @property
    def num_steps(self) -> int:
        """Training steps so far, skipped ones counted."""
        return self._steps.num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._steps.num_steps = number

    @property
    def step_skipped(self) -> bool:
        """Whether the last step was skipped (non-finite under a loss scaler)."""
        return self._steps.skipped

    @property
    def step_times(self) -> Sequence[tuple[float, float]]:
        """Of the last steps on this rank: seconds, and of these waiting for messages."""
        return self._steps.times

    @property
    def adaptation(self) -> Adaptation:
        """The adaptive links, and what they have measured and decided."""
        return self._steps.adaptation

    @property
    def adaptive_history(self) -> list[dict[str, Any]]:
        """An entry for each of the last 1,000 steps; see `mpcomp.links.adaptation`."""
        return list(self.adaptation.history)

    def report(self, *, show: bool = True) -> dict[str, Any]:
        """Bytes of a step, and of each boundary and direction, with fidelity and time.

        First comes all that a step sends, below bf16, and what most of it is for
        (`mpcomp.core.account`); then what crosses each cut and tie.

        With several processes every rank calls it. The figures are of all ranks together,
        links are measured, and it says whether compression pays (`mpcomp.monitor.payoff`).
        Fidelity is that of one microbatch a step, by turns. ``replicas`` is what replicas have
        exchanged with a ``dp_comp``: bytes of all ranks, paths of one replica, seconds of the
        slowest rank.

        Args:
            show: print the table as well (on the first rank).

        Returns:
            The figures as a dict of plain numbers and words.
        """
        account = self.account()
        report = report_of(
            self.engine,
            self.links,
            after=names_of_crossings(self.cut_stages, self.ties),
            adaptation=self.adaptation,
            exchange=None if self.replica_sync is None else self.replica_sync.exchange,
            step_times=self.step_times,
            num_steps=self.num_steps,
            account=account,
            of_step=self._steps.of_step(account),
            chosen=self._steps.chosen,
        )
        if show and self.mesh.rank == 0:
            print_report(report)
        return report

    @contextmanager
    def trace(self, path: str | Path, *, steps: int = 1, skip: int = 0) -> Iterator[None]:
        """Within this context calls of `forward_backward` are traced: who does what, and when.

        All ranks enter it and leave it together. The file is written as soon as there are enough
        steps, or else at the end; https://ui.perfetto.dev and chrome://tracing open it. Numbers of
        the training do not change. Accelerators are waited for at both ends of each span, so that
        its times are right: traced steps take longer there, and several of them in one process do
        not overlap.

        Args:
            path: of the file, which the first rank writes.
            steps: calls to trace.
            skip: calls to let pass before these: the first ones of a run take longer than others.

        Raises:
            ValueError: there is nothing to trace, no folder for the file, or a trace under way.
        """
        devices = [self.engine.device_of(stage) for stage in self._here]
        tracing = Tracing(self.mesh, devices, Path(path), steps=steps, skip=skip)
        with self._steps.traced(tracing):
            yield

    # -- step by step ------------------------------------------------------------------------------

    def log_to(self, writer: ScalarWriter | Callable[..., Any] | None, *, every: int = 1) -> None:
        """Writes figures of `forward_backward`'s steps from now on; every rank calls it.

        They are the loss, seconds (without evaluation) and bytes of a step, all of them, with how
        many times below bf16 they and those of cuts are; and per cut and direction the bytes, that
        factor, their ratio to dense ones, and the fidelity. The first rank writes; that of the
        others may be None.

        Args:
            writer: has ``add_scalar(tag, value, step)``, as TensorBoard's SummaryWriter, or is
                called with a mapping and ``step=``, as ``wandb.log``.
            every: steps from one entry to the next; of bytes and seconds it has the mean.

        Raises:
            TypeError: a writer that is neither.
            ValueError: ``every`` is no positive whole number.
        """
        window = self.step_window()
        log = StepLog(writer, every, window, self.links, writes=self.mesh.rank == 0)
        self._steps.logs.append(log)

    def step_window(self) -> StepWindow:
        """A window over the steps to come, from which all ranks gather figures; see there."""
        steps = self._steps

        def clock() -> Clock:
            seconds = time.perf_counter() - self._beside_s
            return Clock(seconds, steps.trained_s, steps.waited_s)

        return StepWindow(self.mesh, self.links, self.replica_sync, clock)

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """A context whose seconds are part of no step."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._beside_s += time.perf_counter() - begin
