"""The number that a model is judged by: its name in files, and how tables and plots show it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that evaluation gives, with compression on and off at inference."""

    name: str  # in files: accuracy_compressed, accuracy_uncompressed
    unit: str  # of what is shown; "" for a plain number
    axis: str  # of a plot
    scale: float  # shown is scale times the number
    higher_is_better: bool
    logarithmic: bool  # that axis

    @property
    def on(self) -> str:
        """Its key with compression at inference."""
        return f"{self.name}_compressed"

    @property
    def off(self) -> str:
        """Its key without."""
        return f"{self.name}_uncompressed"

    def best(self, values: list[float]) -> float:
        """The best of several."""
        return max(values) if self.higher_is_better else min(values)

    def title(self, words: str) -> str:
        """For the head of a column: ``accuracy on %``."""
        return f"{self.name} {words} {self.unit}".rstrip()


ACCURACY: Final = Metric(
    name="accuracy",
    unit="%",
    axis="test accuracy [%]",
    scale=100.0,
    higher_is_better=True,
    logarithmic=False,
)
PERPLEXITY: Final = Metric(
    name="perplexity",
    unit="",
    axis="perplexity of held-out text",
    scale=1.0,
    higher_is_better=False,
    logarithmic=True,
)
# On text that the uncompressed model would write, a model's loss is larger by their divergence.
OWN_TEXT: Final = replace(
    PERPLEXITY,
    name="perplexity of the model's own text",
    axis="perplexity of the model's own text",
)
