"""The files of a run's folder that are looked at, while it trains and afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["RunFiles"]


@dataclass(frozen=True)
class RunFiles:
    """Paths of the parts of a run."""

    path: Path

    @property
    def config(self) -> Path:
        """Its configuration, of a recipe's run."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """Epochs, of a recipe's run: a line each."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The outcome, of a recipe's run that has ended."""
        return self.path / "summary.json"

    @property
    def about(self) -> Path:
        """Ranks, stages and links, of `mpcomp.RunLog`."""
        return self.path / "run.json"

    @property
    def steps(self) -> Path:
        """Steps, of `mpcomp.RunLog`: a line each."""
        return self.path / "steps.jsonl"

    @property
    def trace(self) -> Path:
        """A few steps, of `Pipeline.trace`."""
        return self.path / "trace.json"

    @property
    def page(self) -> Path:
        """The page of the run."""
        return self.path / "report.html"
