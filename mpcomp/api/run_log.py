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
from typing import Any, Final

import torch
from torch import Tensor

from mpcomp.api.pipeline import Pipeline
from mpcomp.core.sent import Sent
from mpcomp.core.traffic import Traffic
from mpcomp.view.files import RunFiles
from mpcomp.view.json_files import append_json_lines, read_json_lines, replace_text, write_json

__all__ = ["RunLog"]

#: Seconds between two gatherings, at least.
EVERY_S: Final = 1.0
#: Part of the time that gathering may take, at most.
SHARE: Final = 0.02
#: Steps between two gatherings, at most: of more a history in memory forgets.
MOST_STEPS: Final = 500


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
        pipe: Pipeline,
        folder: str | Path,
        *,
        total_steps: int | None = None,
        samples: str = "samples",
        steps_done: int | None = None,
    ) -> None:
        self._pipe = pipe
        self._files = RunFiles(Path(folder))
        self._steps = pipe.num_steps if steps_done is None else steps_done
        self._rows: list[dict[str, Any]] = []
        self._losses: list[Tensor | float] = []
        self._wait_for = 1  # steps until the next gathering
        self._gathering_s = 0.0  # that the last one took here
        before = 0.0
        if pipe.rank == 0:
            self._files.path.mkdir(parents=True, exist_ok=True)
            before = self._forget_later()
            write_json(self._files.about, _about(pipe, total_steps, samples))
        self._start = time.perf_counter() - before
        self._sent = pipe.sent
        self._begin_window()

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
        begin = time.perf_counter()
        window = self._window(len(self._rows))
        ranks = self._pipe.collect({**window, "gathering_s": self._gathering_s})
        if self._pipe.rank == 0:
            for row, loss in zip(self._rows, _numbers(self._losses), strict=True):
                row["loss"] = loss
            self._rows[-1]["figures"] = _figures(ranks, len(self._rows))
            append_json_lines(self._files.steps, self._rows)
        # From what all ranks have been told, so that all gather again after the same step.
        interval = max(EVERY_S, max(rank["gathering_s"] for rank in ranks) / SHARE)
        step_s = max(rank["seconds"] for rank in ranks)
        self._wait_for = min(MOST_STEPS, max(1, round(interval / max(step_s, 1e-6))))
        self._rows, self._losses = [], []
        self._begin_window()
        self._gathering_s = time.perf_counter() - begin

    def close(self) -> None:
        """Writes what there is left; every rank calls it."""
        self.flush()

    # -- a window of steps --------------------------------------------------------------------

    def _begin_window(self) -> None:
        self._before = self._counts()

    def _counts(self) -> dict[str, Any]:
        """Totals on this rank so far."""
        pipe, exchange = self._pipe, self._pipe.exchange
        traffic = [link.meter.train for link in pipe.links]
        totals = None if exchange is None else exchange.totals
        between = 0.0 if totals is None else totals.encode_s + totals.wait_s + totals.decode_s
        return {
            "seconds": time.perf_counter() - pipe.evaluated_s,  # an evaluation is part of no step
            "training": pipe.trained_s,
            "wait": pipe.engine.waited_s,
            "coding": sum(each.seconds for each in traffic),
            "exchange": between,
            "sent": [each.sent for each in traffic] + ([] if totals is None else [totals.sent]),
            # Sums are replaced and never changed, so these are those of now.
            "energies": [t.energies for t in traffic],
        }

    def _window(self, num_steps: int) -> dict[str, Any]:
        """Means over the steps of the window, on this rank; of links sums."""
        now, before = self._counts(), self._before
        mean = {
            name: (now[name] - before[name]) / num_steps
            for name in ("seconds", "training", "wait", "coding", "exchange")
        }
        compute = mean["training"] - mean["wait"] - mean["coding"] - mean["exchange"]
        return {
            "seconds": mean["seconds"],
            "compute": max(0.0, compute),
            "coding": mean["coding"],
            "wait": mean["wait"],
            "exchange": mean["exchange"],
            "other": max(0.0, mean["seconds"] - mean["training"]),
            "sent": [list(b - a) for a, b in zip(before["sent"], now["sent"], strict=True)],
            "energies": _differences(before["energies"], now["energies"]),
        }

    def _forget_later(self) -> float:
        """Drops lines of steps to come; seconds that those before have taken."""
        rows = read_json_lines(self._files.steps)
        kept = [row for row in rows if row["step"] < self._steps]
        if len(kept) < len(rows):
            replace_text(self._files.steps, "")
            append_json_lines(self._files.steps, kept)
        return float(kept[-1]["time"]) if kept else 0.0


def _differences(before: Sequence[Any], now: Sequence[Any]) -> list[list[float] | None]:
    """Energies that were added to each link's; None of those to which nothing was."""
    found: list[list[float] | None] = []
    for first, last in zip(before, now, strict=True):
        if last is None or last is first:
            found.append(None)
        else:
            found.append((last if first is None else last - first.to(last.device)).tolist())
    return found


def _numbers(losses: Sequence[Tensor | float]) -> list[float | None]:
    """Losses as JSON has them: what is not finite is null."""
    # One transfer for all.
    tensors = [torch.as_tensor(loss, dtype=torch.float64) for loss in losses]
    values: list[float] = torch.stack([t.to(tensors[0].device) for t in tensors]).tolist()
    return [value if math.isfinite(value) else None for value in values]


def _figures(ranks: Sequence[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Figures of a window: seconds of a step by rank; bytes of a step and fidelity by link."""
    parts = ("seconds", "compute", "coding", "wait", "exchange", "other")
    sent = [
        (1 / num_steps) * sum((Sent(*own) for own in of_link), Sent())
        for of_link in zip(*(rank["sent"] for rank in ranks), strict=True)
    ]
    links: dict[str, list[Any]] = {
        name: [each.to_dict()[name] for each in sent] for name in Sent().to_dict()
    }
    # Replicas' exchange, the last one where there is one, has no fidelity.
    merged = [
        Traffic.merged({"messages": 1, "energies": own} for own in of_link if own is not None)
        for of_link in zip(*(rank["energies"] for rank in ranks), strict=True)
    ]
    known = [traffic.energies is not None for traffic in merged]
    rest: list[None] = [None] * (len(sent) - len(merged))
    for name in ("relative_error", "cosine"):
        values = [getattr(t, name) if ok else None for t, ok in zip(merged, known, strict=True)]
        links[name] = [
            None if v is None or not math.isfinite(v) else round(v, 6) for v in values
        ] + rest
    return {
        "steps": num_steps,
        "ranks": {name: [round(rank[name], 6) for rank in ranks] for name in parts},
        "links": links,
    }


def _about(pipe: Pipeline, total_steps: int | None, samples: str) -> dict[str, Any]:
    """Facts of a run that steps have in common."""
    after = [stage.block_names[-1] for stage in pipe.cut_stages[:-1]]
    after += [tie.name for tie in pipe.ties]
    links = [
        {
            "boundary": link.boundary,
            "after": after[link.boundary],
            "direction": link.direction,
            "method": str(link.method),
        }
        for link in pipe.links
    ]
    if pipe.exchange is not None:
        method = str(pipe.exchange.method)
        links.append({"boundary": None, "after": "", "direction": "replicas", "method": method})
    return {
        "total_steps": total_steps,
        "samples": samples,
        "engine": pipe.engine.name,
        "ranks": pipe.num_ranks,
        "replicas": pipe.num_replicas,
        "stages": len(pipe.cut_stages),
        "chunks": pipe.chunks,
        "links": links,
    }
