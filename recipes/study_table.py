"""From the results of the study to its table and to a verdict on each claim of the paper.

Runs are compared in pairs of one seed, which share initial weights and the order of images.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

#: More points than this is severe harm, or a significant degradation.
SEVERE_POINTS: Final = 3.0
#: Fewer points than this is nearly as good.
NEAR_POINTS: Final = 1.0
#: The verdict's rule: a mean is beyond a bound if it is so by this many standard errors.
NUM_ERRORS: Final = 2.0

RULE: Final = (
    "Differences are taken seed by seed, in points of accuracy, as mean ± standard deviation (n). "
    "A claim is confirmed where the mean lies on the claimed side of its bound by more than "
    f"{NUM_ERRORS:g} standard errors, not confirmed where it lies on the other side by as much, "
    "and undecided in between or with fewer than two seeds. Severe harm is more than "
    f"{SEVERE_POINTS:g} points, nearly as good is within {NEAR_POINTS:g}."
)


@dataclass(frozen=True)
class Results:
    """The finished runs: row -> seed -> line of the results file; rows in the table's order."""

    runs: Mapping[str, Mapping[int, Mapping[str, Any]]]
    diverged: Mapping[str, int]  # row -> runs that ended in NaN or Inf, which are not in `runs`

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]], order: Sequence[str]) -> Results:
        """Groups the lines; rows that `order` does not name come last."""
        runs: dict[str, dict[int, Mapping[str, Any]]] = {}
        diverged: Counter[str] = Counter()
        for line in lines:
            finished = runs.setdefault(line["row"], {})
            if "diverged" in line:
                diverged[line["row"]] += 1
            else:
                finished[line["seed"]] = line
        rank = {row: position for position, row in enumerate(order)}
        rows = sorted(runs, key=lambda row: rank.get(row, len(rank)))
        return cls({row: runs[row] for row in rows}, diverged)

    def points(self, row: str, at_inference: str) -> dict[int, float]:
        """Seed -> accuracy in percent, with compression ``on`` or ``off`` at inference."""
        key = {"on": "accuracy_compressed", "off": "accuracy_uncompressed"}[at_inference]
        return {seed: 100 * run[key] for seed, run in self.runs.get(row, {}).items()}


@dataclass(frozen=True)
class Claim:
    """``mean(first − second) > bound`` (or ``<``), in points, paired by seed.

    Both rows with compression on at inference, unless `second_off`.
    """

    number: int  # the direction it belongs to
    text: str
    first: str
    second: str
    above: bool  # which side of the bound is claimed
    bound: float = 0.0
    second_off: bool = False

    @property
    def formula(self) -> str:
        """What is measured and claimed, for the table."""
        second = f"{self.second}{', off at inference' if self.second_off else ''}"
        return f"({self.first}) − ({second}) {'>' if self.above else '<'} {self.bound:g}"

    def differences(self, results: Results) -> list[float]:
        """One number for each seed that both rows have."""
        first = results.points(self.first, "on")
        second = results.points(self.second, "off" if self.second_off else "on")
        return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def verdict(differences: Sequence[float], *, above: bool, bound: float) -> str:
    """``confirmed``, ``not confirmed`` or ``undecided``, by `RULE`."""
    if len(differences) < 2:
        return "undecided"
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    excess = statistics.fmean(differences) - bound
    if not above:
        excess = -excess
    if excess > NUM_ERRORS * error:
        return "confirmed"
    return "not confirmed" if excess < -NUM_ERRORS * error else "undecided"


def _harm(number: int, row: str, *, severe: bool) -> Claim:
    text = f"{row}: {'' if severe else 'no '}severe harm"
    return Claim(number, text, "none", row, above=severe, bound=SEVERE_POINTS)


def _needs_compression(row: str) -> Claim:
    text = f"{row}: needs compression at inference"
    return Claim(3, text, row, row, above=True, bound=NEAR_POINTS, second_off=True)


def _feedback(name: str) -> tuple[Claim, Claim]:
    plain, row = "top 10 %, after warm-up", f"top 10 %, {name}"
    return (
        Claim(4, f"{name}: no better than plain", row, plain, above=False, bound=NEAR_POINTS),
        Claim(
            4,
            f"{name}: nearly as good without compression at inference",
            row,
            row,
            above=False,
            bound=NEAR_POINTS,
            second_off=True,
        ),
    )


CLAIMS: Final[tuple[Claim, ...]] = (
    Claim(
        1,
        "Top-5 % harms gradients more than activations",
        "top act 5 % grad 20 %",
        "top act 20 % grad 5 %",
        above=True,
    ),
    Claim(1, "4 bits harm gradients", "quant fw4-bw8", "quant fw4-bw4", above=True),
    _harm(2, "top 10 %", severe=False),
    _harm(2, "top 5 %", severe=True),
    _needs_compression("top 10 %"),
    _needs_compression("top 5 %"),
    _needs_compression("top 2 %"),
    *_feedback("EF"),
    *_feedback("EF on gradients"),
    *_feedback("EF21"),
    *_feedback("EFMixed"),
    _harm(5, "top 10 %, AQ-SGD", severe=True),
    _harm(5, "top 30 %, AQ-SGD", severe=False),
)


def render(results: Results) -> str:
    """Both tables as Markdown."""
    return f"{render_rows(results)}\n\n{render_claims(results)}"


def render_rows(results: Results) -> str:
    """A line for each row: accuracies on and off, megabytes of an epoch, ratio to dense."""
    lines = [
        "| compression | accuracy, on % | accuracy, off % | n | MB/epoch | sent/dense |",
        "|---|---|---|---|---|---|",
    ]
    for row, runs in results.runs.items():
        if num_diverged := results.diverged.get(row, 0):
            row_name = f"{row} ({num_diverged} diverged)"
        else:
            row_name = row
        if not runs:
            lines.append(f"| {row_name} | | | 0 | | |")
            continue
        on, off = (spread(list(results.points(row, word).values())) for word in ("on", "off"))
        epoch_bytes = statistics.fmean(run["wire_bytes"] / run["epochs"] for run in runs.values())
        ratio = statistics.fmean(run["wire_ratio"] for run in runs.values())
        lines.append(
            f"| {row_name} | {on} | {off} | {len(runs)} | {epoch_bytes / 1e6:.1f} | {ratio:.3f} |"
        )
    return "\n".join(lines)


def render_claims(results: Results) -> str:
    """A line for each claim that the results can speak to, and the rule."""
    lines = ["| direction | claim | measured, points | effect | verdict |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        if differences := claim.differences(results):
            found = verdict(differences, above=claim.above, bound=claim.bound)
            effect = f"{spread(differences, sign=True)} ({len(differences)})"
            cells = (str(claim.number), claim.text, claim.formula, effect, found)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", RULE])


def spread(values: Sequence[float], *, sign: bool = False) -> str:
    """Mean ± standard deviation; the mean alone of one value."""
    mean = f"{statistics.fmean(values):{'+' if sign else ''}.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean
