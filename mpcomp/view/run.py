"""A run as its folder tells it: configuration, steps, epochs, figures of ranks and links.

Folders of `mpcomp.RunLog` have steps; those of recipes a configuration and epochs as well.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mpcomp.core.account import Account, agreed_in_step
from mpcomp.core.sent import Sent
from mpcomp.core.traffic import FIDELITY
from mpcomp.view.files import RunFiles
from mpcomp.view.json_files import JsonLinesTail, read_json, read_json_lines

__all__ = ["PARTS", "Run", "sent_by_link"]

#: Parts of a step's time on a rank, which add up to it.
PARTS: Final = ("compute", "coding", "wait", "exchange", "other")
#: Ends of the names of a metric, with compression on and off at inference.
ON, OFF = "_compressed", "_uncompressed"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        files: of its folder.
        about: ranks, stages and links, as `mpcomp.RunLog` has written them.
        steps: its steps; `figures` stands in the last one of each window.
        config: of a recipe's run; else empty.
        epochs: of a recipe's run; else empty.
        finished: whether it has come to its end.
    """

    files: RunFiles
    about: dict[str, Any]
    steps: list[dict[str, Any]]
    config: dict[str, Any]
    epochs: list[dict[str, Any]]
    finished: bool

    @classmethod
    def read(cls, folder: Path, steps: JsonLinesTail | None = None) -> Run:
        """The run in a folder.

        Args:
            folder: its path.
            steps: of its file of steps, for one who comes again.

        Raises:
            ValueError: it has no run with steps, or a file in it is broken.
        """
        files = RunFiles(folder)
        about = read_json(files.about)
        if about is None:
            words = "is no folder" if not folder.is_dir() else f"has no {files.about.name}"
            raise ValueError(
                f"{folder} {words}: pass the folder that a recipe printed when it began, or that "
                "mpcomp.RunLog was given"
            )
        rows = read_json_lines(files.steps) if steps is None else steps.read()
        total = about["total_steps"]
        return cls(
            files=files,
            about=about,
            steps=rows,
            config=read_json(files.config) or {},
            epochs=read_json_lines(files.metrics),
            finished=files.summary.exists() or (total is not None and len(rows) >= total),
        )

    # -- names --------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """Methods of its links, in a line."""
        found: dict[str, list[str]] = {}
        for link in self.about["links"]:
            methods = found.setdefault(link["direction"], [])
            if link["method"] not in methods:
                methods.append(link["method"])
        act, grad = (" ".join(found.get(name, ["none"])) for name in ("act", "grad"))
        label = act if act == grad else f"{act} / {grad}"
        if "replicas" in found:
            between = f"replicas {' '.join(found['replicas'])}"
            label = between if label == "none" else f"{label} / {between}"
        return "uncompressed" if label in ("none", "replicas none") else label

    def link_name(self, number: int) -> str:
        """A link in words."""
        link = self.about["links"][number]
        words = {
            "act": "cut {} →",
            "grad": "cut {} ←",
            "tie_first": "tied weight →",
            "tie_last": "tied weight ←",
            "replicas": "replicas",
        }
        return words[link["direction"]].format(link["boundary"])

    @property
    def metric(self) -> str | None:
        """Name of what it is judged by; None where no epoch says."""
        for row in self.epochs:
            for key in row:
                if key.endswith(ON) and not key.endswith(OFF):
                    return str(key.removesuffix(ON))
        return None

    # -- figures ------------------------------------------------------------------------------

    @property
    def windows(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The steps that have figures, and these."""
        return [(row, row["figures"]) for row in self.steps if "figures" in row]

    @property
    def _agreed(self) -> Sent:
        """The agreements of a step."""
        num_links = sum(link["direction"] != "replicas" for link in self.about["links"])
        return agreed_in_step(self.about["ranks"], num_links)

    def account(self) -> Account:
        """The mean of what all steps have sent, by what it was for."""
        found = Account()
        for _, window in self.windows:
            replicas = Sent()
            links = []
            for link, sent in zip(self.about["links"], sent_by_link(window), strict=True):
                if link["direction"] == "replicas":
                    replicas = sent
                else:
                    links.append((link["direction"], sent))
            found += window["steps"] * Account.of_links(
                links, replicas=replicas, agreements=self._agreed
            )
        num_steps = sum(int(window["steps"]) for _, window in self.windows)
        return (1 / max(1, num_steps)) * found

    def sent(self) -> list[Sent]:
        """Totals of what was sent up to each step."""
        links = [link["direction"] for link in self.about["links"]]
        between = links.index("replicas") if "replicas" in links else None
        agreed = self._agreed
        found: list[Sent] = []
        begun = 0
        for i, row in enumerate(self.steps):
            found.append(Sent.from_dict(row) + agreed)
            if "figures" in row:
                # Steps know what crosses cuts and ties; what replicas exchange is a window's.
                if between is not None:
                    own = sent_by_link(row["figures"])[between]
                    found[begun:] = [each + own for each in found[begun:]]
                begun = i + 1
        return list(itertools.accumulate(found))

    def rank_times(self, windows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
        """Mean seconds of a step by part, of each rank, over windows of steps."""
        total = sum(window["steps"] for window in windows)
        return [
            {
                part: sum(w["ranks"][part][rank] * w["steps"] for w in windows) / total
                for part in PARTS
            }
            for rank in range(self.about["ranks"] if windows else 0)
        ]

    def link_figures(self, windows: Sequence[dict[str, Any]]) -> list[dict[str, float | None]]:
        """Of each link, over windows of steps: bytes of a step, below bf16, and mean fidelity."""
        total = sum(window["steps"] for window in windows)
        found: list[dict[str, float | None]] = []
        for i in range(len(self.about["links"]) if windows else 0):
            sums = [w["steps"] * sent_by_link(w)[i] for w in windows]
            mean = (1 / total) * sum(sums, Sent())
            figures: dict[str, float | None] = {
                "wire_bytes": mean.wire_bytes,
                "dense_bytes": mean.dense_bytes,
                "ratio": mean.wire_ratio if mean.dense_bytes else None,
                "below_bf16": mean.below_bf16,
            }
            for name in FIDELITY:
                # Older logs have fewer of them.
                values = [w["links"][name][i] for w in windows if name in w["links"]]
                known = [value for value in values if value is not None]
                figures[name] = statistics.fmean(known) if known else None
            found.append(figures)
        return found

    def step_seconds(self, last: int | None = None) -> float | None:
        """Median seconds of a step, of the last ones where that is given; None before the first."""
        times = [row["time"] for row in self.steps[-(last + 1) if last else 0 :]]
        between = [b - a for a, b in itertools.pairwise(times)]
        if not between:
            return float(self.steps[0]["time"]) if self.steps else None
        return float(statistics.median(between))

    @property
    def seconds_since_step(self) -> float | None:
        """Seconds since the last step was written; None before the first."""
        return time.time() - self.files.steps.stat().st_mtime if self.steps else None

    def samples_per_second(self, last: int | None = None) -> float | None:
        """Rate of samples, at the pace of a median step."""
        seconds = self.step_seconds(last)
        if not seconds:
            return None
        of_steps = [row["samples"] for row in self.steps[-(last or 0) :]]
        return float(statistics.median(of_steps)) / seconds


def sent_by_link(figures: Mapping[str, Any]) -> list[Sent]:
    """Totals of each link in a step, by the figures of a window."""
    links = figures["links"]
    columns = {name: links[name] for name in Sent().to_dict() if name in links}
    return [
        Sent.from_dict(dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]
