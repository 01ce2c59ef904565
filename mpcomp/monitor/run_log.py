"""A log of a run in a folder: what every step, rank and link does, for `mpcomp top` and `report`.

    log = mpcomp.RunLog(pipe, "runs/mine", total_steps=1000, samples="images")
    for x, y in loader:
        loss = pipe.forward_backward(x, y)
        optimizer.step(); optimizer.zero_grad()
        log.step(loss, num_samples=len(x))
    log.close()

A step is one line of ``steps.jsonl``: all that the first rank knows of it anyway. What other ranks
know, their seconds and their links' bytes and fidelity, is gathered about once a second, or less
often where gathering takes long, as the mean over the steps since then; it stands in the line of
the last of these. Losses are read from the device as seldom.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from mpcomp.core.sent import Sent
from mpcomp.core.traffic import FIDELITY, Traffic
from mpcomp.data_parallel.replica_sync import ReplicaSync
from mpcomp.engines.base import Engine
from mpcomp.links.link import Link
from mpcomp.links.tied_weights import TiedWeights
from mpcomp.monitor.report import names_of_crossings
from mpcomp.monitor.step_window import StepFigures, StepWindow
from mpcomp.view.files import RunFiles
from mpcomp.view.json_files import append_json_lines, read_json_lines, replace_text, write_json
from stages import Stage

__all__ = ["RunLog"]

#: Seconds between two gatherings, at least.
EVERY_S: Final = 1.0
#: Part of the time that gathering may take, at most.
SHARE: Final = 0.02
#: Steps between two gatherings, at most: of more a history in memory forgets.
MOST_STEPS: Final = 500


class LoggedRun(Protocol):
    """The part of a `mpcomp.Pipeline` that a `RunLog` reads."""

    cut_stages: list[Stage]
    ties: list[TiedWeights]
    engine: Engine
    replica_sync: ReplicaSync | None
    chunks: int

    @property
    def num_steps(self) -> int: ...

    @property
    def step_skipped(self) -> bool: ...

    @property
    def links(self) -> list[Link]: ...

    @property
    def sent(self) -> Sent: ...

    def step_window(self) -> StepWindow: ...


class RunLog:
    """The log of one run; every rank makes one, once the pipeline is loaded, and makes its calls.

    A run that goes on in a folder replaces the lines of steps that it does again.

    Args:
        pipe: the pipeline.
        folder: is made; the first rank writes there.
        total_steps: of the optimizer in the whole run, for the time that is left.
        samples: whereof there are several in a batch, as in "images" or "tokens".
        steps_done: steps of the optimizer before this log; by default those in which the pipeline
            has trained.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        pipe: LoggedRun,
        folder: str | Path,
        *,
        total_steps: int | None = None,
        samples: str = "samples",
        steps_done: int | None = None,
    ) -> None:
        self._pipe = pipe
        self._writes = pipe.engine.mesh.rank == 0
        self._files = RunFiles(Path(folder))
        self._steps = pipe.num_steps if steps_done is None else steps_done
        self._rows: list[dict[str, Any]] = []
        self._losses: list[Tensor | float] = []
        self._wait_for = 1  # steps until the next gathering
        before = 0.0
        if self._writes:
            self._files.path.mkdir(parents=True, exist_ok=True)
            before = self._forget_later()
            write_json(self._files.about, _about(pipe, total_steps, samples))
        self._start = time.perf_counter() - before
        self._sent = pipe.sent
        self._window = pipe.step_window()

    def step(self, loss: Tensor | float, *, num_samples: int = 0, lr: float | None = None) -> None:
        """Takes down a step of the optimizer.

        Args:
            loss: its mean loss, 0-d, as `Pipeline.forward_backward` gives it.
            num_samples: of all replicas.
            lr: learning rate.
        """
        pipe = self._pipe
        before, self._sent = self._sent, pipe.sent
        sent = self._sent - before
        self._rows.append(
            {
                "step": self._steps,
                "time": round(time.perf_counter() - self._start, 4),
                "lr": lr,
                "samples": num_samples,
                **sent.to_dict(),
                "skipped": pipe.step_skipped,
            }
        )
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        self._steps += 1
        if len(self._rows) >= self._wait_for:
            self.flush()

    def flush(self) -> None:
        """Writes what there is; every rank calls it."""
        if not self._rows:
            return
        figures = self._window.gathered(len(self._rows))
        if self._writes:
            for row, loss in zip(self._rows, _numbers(self._losses), strict=True):
                row["loss"] = loss
            self._rows[-1]["figures"] = _figures(figures)
            append_json_lines(self._files.steps, self._rows)
        # From what all ranks have been told, so that all gather again after the same step.
        interval = max(EVERY_S, figures.gathering_s / SHARE)
        step_s = max(rank["seconds"] for rank in figures.ranks)
        self._wait_for = min(MOST_STEPS, max(1, round(interval / max(step_s, 1e-6))))
        self._rows, self._losses = [], []
        self._window.begin()

    def close(self) -> None:
        """Writes what there is left; every rank calls it."""
        self.flush()

    def _forget_later(self) -> float:
        """Drops lines of steps to come; seconds that those before have taken."""
        rows = read_json_lines(self._files.steps)
        kept = [row for row in rows if row["step"] < self._steps]
        if len(kept) < len(rows):
            replace_text(self._files.steps, "")
            append_json_lines(self._files.steps, kept)
        return float(kept[-1]["time"]) if kept else 0.0


def _numbers(losses: Sequence[Tensor | float]) -> list[float | None]:
    """Losses as JSON has them: what is not finite is null."""
    # One transfer for all.
    tensors = [torch.as_tensor(loss, dtype=torch.float64) for loss in losses]
    values: list[float] = torch.stack([t.to(tensors[0].device) for t in tensors]).tolist()
    return [value if math.isfinite(value) else None for value in values]


def _figures(window: StepFigures) -> dict[str, Any]:
    """Figures of a window as a line has them: of ranks and links, means over its steps."""
    sent = [traffic.sent for traffic in window.links]
    fidelity = [_fidelity(traffic) for traffic in window.links]
    if window.exchange is not None:  # which has no fidelity
        sent.append(window.exchange)
        fidelity.append(dict.fromkeys(FIDELITY))
    means = [((1 / window.num_steps) * each).to_dict() for each in sent]
    links: dict[str, list[Any]] = {
        name: [mean[name] for mean in means] for name in Sent().to_dict()
    }
    by_name = {name: [each[name] for each in fidelity] for name in FIDELITY}
    return {
        "steps": window.num_steps,
        "ranks": {
            name: [round(rank[name], 6) for rank in window.ranks] for name in window.ranks[0]
        },
        "links": {**links, **by_name},
    }


def _fidelity(traffic: Traffic) -> dict[str, float | None]:
    """The figures of `FIDELITY`; None where nothing was compared, or there is no such number."""
    if traffic.energies is None:
        return dict.fromkeys(FIDELITY)
    return {name: _rounded(getattr(traffic, name)) for name in FIDELITY}


def _rounded(value: float | None) -> float | None:
    return round(value, 6) if value is not None and math.isfinite(value) else None


def _about(pipe: LoggedRun, total_steps: int | None, samples: str) -> dict[str, Any]:
    """Facts of a run that steps have in common."""
    after = names_of_crossings(pipe.cut_stages, pipe.ties)
    links = [
        {
            "boundary": link.boundary,
            "after": after[link.boundary],
            "direction": link.direction,
            "method": str(link.method),
        }
        for link in pipe.links
    ]
    sync, mesh = pipe.replica_sync, pipe.engine.mesh
    if sync is not None:
        method = "none" if sync.exchange is None else str(sync.exchange.method)
        links.append({"boundary": None, "after": "", "direction": "replicas", "method": method})
    return {
        "total_steps": total_steps,
        "samples": samples,
        "engine": pipe.engine.name,
        "ranks": mesh.num_ranks,
        "replicas": mesh.num_replicas,
        "stages": len(pipe.cut_stages),
        "chunks": pipe.chunks,
        "links": links,
    }
