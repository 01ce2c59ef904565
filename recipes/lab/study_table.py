"""Statistics of a study's runs, its tables, and a verdict on each claim of the papers.

Runs are compared in pairs of one seed, which share initial weights and the order of samples.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import scipy.stats

from recipes.lab.account import FORMER, REFERENCE, reference_among, reference_note
from recipes.metric import Metric

#: Of the intervals that are shown, and that verdicts go by: a mean is beyond a bound if its whole
#: interval is.
PERCENT: Final = 95
#: Fewest seeds of a verdict: an interval of two has one degree of freedom.
FEWEST: Final = 3
#: Below every table of paired differences.
PAIRED: Final = f"Differences are paired by seed, +- half of Student's interval of {PERCENT} %."

# How a row is judged, and how a formula says so; most are with compression on at inference.
AT: Final = {"on": "", "off": ", off at inference", "training": ", in training"}

Run = Mapping[str, Any]  # a line of the results file


@dataclass(frozen=True)
class Results:
    """The finished runs: row -> seed -> line of the results file; rows in the table's order."""

    runs: Mapping[str, Mapping[int, Run]]
    diverged: Mapping[str, int]  # row -> runs that ended in NaN or Inf, which are not in `runs`

    @classmethod
    def of(cls, lines: Iterable[Run], order: Sequence[str] = ()) -> Results:
        """Groups the lines, the later of two of one row and seed; rows not in `order` come last."""
        found: dict[str, dict[int, Run]] = {}
        for line in lines:
            found.setdefault(line["row"], {})[line["seed"]] = line
        rank = {row: position for position, row in enumerate(order)}
        # What others were held to in results from before stands where that does now.
        rank |= {
            row.removesuffix(REFERENCE) + FORMER: position
            for row, position in rank.items()
            if row.endswith(REFERENCE)
        }
        rows = sorted(found, key=lambda row: rank.get(row, len(rank)))
        runs = {
            row: {seed: run for seed, run in found[row].items() if "diverged" not in run}
            for row in rows
        }
        return cls(runs, {row: len(found[row]) - len(runs[row]) for row in rows})

    @property
    def reference(self) -> str:
        """The row that others are held to."""
        return reference_among(self.runs)

    def of_row(self, row: str) -> list[Run]:
        """Its runs that did not diverge."""
        return list(self.runs.get(row, {}).values())

    def label(self, row: str, name: str | None = None) -> str:
        """The row, by its own or another name, with how many of its runs diverged."""
        name = row if name is None else name
        num_diverged = self.diverged.get(row, 0)
        return f"{name} ({num_diverged} diverged)" if num_diverged else name

    def values(self, row: str, value: Callable[[Run], float]) -> dict[int, float]:
        """Seed -> ``value`` of its run."""
        return {seed: value(run) for seed, run in self.runs.get(row, {}).items()}

    def differences(
        self,
        first: str,
        second: str,
        value: Callable[[Run], float],
        value_of_second: Callable[[Run], float] | None = None,
    ) -> list[float]:
        """``value`` of the first row less that of the second, for each seed that both have."""
        own, other = self.values(first, value), self.values(second, value_of_second or value)
        return [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]

    def paired(self, row: str, against: str, metric: Metric) -> str:
        """The mean difference of two rows in a metric, with its interval, in words.

        Args:
            row: the difference is of this row
            against: less this one.
            metric: of the lines, under its own name.
        """
        differences = self.differences(row, against, lambda run: metric.scale * run[metric.name])
        if not differences:
            return "-"
        mean = statistics.mean(differences)
        if len(differences) == 1:
            return f"{mean:+.2f}"
        return f"{mean:+.2f} +- {half_interval(differences, PERCENT):.2f}"

    def table(
        self, names: Mapping[str, str], cells: Callable[[str, list[Run]], Iterable[Any]]
    ) -> list[list[Any]]:
        """A line for each row: its name, the number of runs, and ``cells`` of them if there are.

        Args:
            names: by row, in the order of the table.
            cells: of a row and its runs.
        """
        found = {row: self.of_row(row) for row in names}
        return [
            [
                self.label(row, name),
                len(found[row]),
                *(cells(row, found[row]) if found[row] else ()),
            ]
            for row, name in names.items()
        ]


@dataclass(frozen=True)
class Claim:
    """``mean(first − second) > bound`` (or ``<``), in the table's effects, paired by seed.

    Each row as `first_at` and `second_at` say (`AT`).
    """

    number: int | str  # the direction it belongs to
    text: str
    first: str
    second: str
    above: bool  # which side of the bound is claimed
    bound: float = 0.0
    first_at: str = "on"
    second_at: str = "on"

    @property
    def formula(self) -> str:
        """The measured difference and the claim, for the table."""
        first = f"({self.first}{AT[self.first_at]})"
        second = f"({self.second}{AT[self.second_at]})"
        return f"{first} − {second} {'>' if self.above else '<'} {self.bound:g}"

    def held_to(self, reference: str) -> Claim:
        """The claim with the reference that the results have."""
        first, second = (
            reference if row == REFERENCE else row for row in (self.first, self.second)
        )
        return dataclasses.replace(self, first=first, second=second)

    def differences(self, results: Results, table: Table) -> list[float]:
        """One number for each seed that both rows have."""
        values = table.effects[self.first_at], table.effects[self.second_at]
        return results.differences(self.first, self.second, *values)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column with the mean of a number of the runs."""

    title: str
    value: Callable[[Run], float]
    digits: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """The two tables of a study that is held against claims: its rows, and the claims.

    Attributes:
        metric: that the runs are judged by.
        effects: the numbers whose differences are taken, of a run, by the words of `AT`.
        unit: of the effects, in words; `short_unit` in a column's head.
        severe: bound on an effect; more is severe harm.
        near: bound on an effect; less is nearly as good.
        columns: after the metric's.
        claims: in the order of the table.
        notes: sentences below the rows, from the results.
        beside: row -> a word on what its numbers also hold, beside its name in both tables; the
            notes explain it.
    """

    metric: Metric
    effects: Mapping[str, Callable[[Run], float]]
    unit: str
    short_unit: str
    severe: float
    near: float
    columns: Sequence[Column]
    claims: Sequence[Claim]
    notes: Callable[[Results], Sequence[str]] = lambda results: ()
    beside: Mapping[str, str] = field(default_factory=dict)

    def with_word(self, name: str, *rows: str) -> str:
        """A name, and in brackets what is said beside these rows."""
        words = dict.fromkeys(self.beside[row] for row in rows if row in self.beside)
        return f"{name} ({', '.join(words)})" if words else name

    @property
    def rule(self) -> str:
        """Rules of verdicts."""
        return (
            f"Differences are taken seed by seed, in {self.unit}, as mean ± half of Student's "
            f"interval of {PERCENT} % (n). A claim is confirmed where that interval lies on the "
            "claimed side of its bound, not confirmed where it lies on the other side, and "
            f"undecided in between or with fewer than {FEWEST} seeds. "
            f"Severe harm is more than {self.severe:g} {self.short_unit}, nearly as good is "
            f"within {self.near:g}."
        )


def verdict(differences: Sequence[float], *, above: bool, bound: float) -> str:
    """``confirmed``, ``not confirmed`` or ``undecided``, by `Table.rule`."""
    if len(differences) < FEWEST:
        return "undecided"
    half_width = half_interval(differences, PERCENT)
    excess = statistics.mean(differences) - bound
    if not above:
        excess = -excess
    if excess > half_width:
        return "confirmed"
    return "not confirmed" if excess < -half_width else "undecided"


def render(results: Results, table: Table) -> str:
    """Both tables as Markdown."""
    return f"{render_rows(results, table)}\n\n{render_claims(results, table)}"


def render_rows(results: Results, table: Table) -> str:
    """A line for each row: the metric on and off, the number of runs, and the columns."""
    metric = table.metric
    on_off = [f"{metric.name}, {word} {metric.unit}".rstrip() for word in ("on", "off")]
    titles = ["compression", *on_off, "n", *(one.title for one in table.columns)]
    lines = [_cells(titles), "|" + "---|" * len(titles)]
    for row, runs in results.runs.items():
        row_name = table.with_word(results.label(row), row)
        if not runs:
            lines.append(f"| {row_name} | | | 0 |" + " |" * len(table.columns))
            continue
        on, off = (
            spread([metric.scale * run[key] for run in runs.values()])
            for key in (metric.on, metric.off)
        )
        means = [
            f"{statistics.mean(results.values(row, one.value).values()):.{one.digits}f}"
            for one in table.columns
        ]
        lines.append(_cells([row_name, on, off, str(len(runs)), *means]))
    return "\n".join([*lines, "", *table.notes(results), reference_note(results.reference)])


def render_claims(results: Results, table: Table) -> str:
    """A line for each claim that the results can speak to, and the rule."""
    measured = f"measured, {table.short_unit}"
    lines = [_cells(["direction", "claim", measured, "effect", "verdict"]), "|---|---|---|---|---|"]
    for claim in (claim.held_to(results.reference) for claim in table.claims):
        if differences := claim.differences(results, table):
            found = verdict(differences, above=claim.above, bound=claim.bound)
            effect = f"{interval(differences)} ({len(differences)})"
            said = table.with_word(claim.text, claim.first, claim.second)
            lines.append(_cells([str(claim.number), said, claim.formula, effect, found]))
    return "\n".join([*lines, "", table.rule])


def spread(values: Sequence[float], *, sign: bool = False, between: str = "±") -> str:
    """Mean ± standard deviation; the mean alone of one value."""
    mean = f"{statistics.mean(values):{'+' if sign else ''}.2f}"
    return f"{mean} {between} {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def interval(values: Sequence[float], *, digits: int = 2) -> str:
    """Mean ± half of its interval; the mean alone of one value."""
    mean = f"{statistics.mean(values):+.{digits}f}"
    return f"{mean} ± {half_interval(values, PERCENT):.{digits}f}" if len(values) > 1 else mean


def standard_error(values: Sequence[float]) -> float:
    """The standard deviation of the mean of two or more values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def half_interval(values: Sequence[float], percent: float) -> float:
    """Half of Student's two-sided interval round the mean of two or more values."""
    # To the three digits of printed tables of t, with which all results so far were shown.
    quantile = round(float(scipy.stats.t.ppf(0.5 + percent / 200, len(values) - 1)), 3)
    return quantile * standard_error(values)


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
