"""The tables of `recipes.lab.time_to_loss`: steps, seconds, and their product."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tabulate import tabulate

from mpcomp.plan import Coding
from recipes.decoder import SIZES
from recipes.lab.race import smoothed
from recipes.lab.race_speed import Bits, Links, benchmark_step_s, step_s
from recipes.lab.study import Line
from recipes.lab.study_table import Results, Run, half_interval

REFERENCE: Final = "bf16"
#: End of the names of rows whose pipeline does not drain between steps.
ASYNCHRONOUS: Final = ", asynchronous"
MISSING: Final = "–"
#: Conditions of the first table, and of the second one.
HEADLINES: Final = (Links(200, 50), Links(10, 20))
#: Of the third table, each way.
CONNECTIONS: Final = 4
RATES: Final = (10.0, 100.0, 200.0, 1000.0)
LATENCIES_MS: Final = (0.0, 20.0, 50.0)

LEGEND: Final = """\
steps to the target, mean and interval of 95 % by t; bits an element of activations / gradients
x: times less time to the target than bf16, seed by seed, on 8 hosts with such links (one way); \
computing and coding as measured on one core
four connections: each way, with stripes of every message on all of them; first against bf16 over \
one connection, as in torch's own pipeline, then over four
benchmark's shape: the same steps, with the messages and the link rules of Protocol NanoGPT \
(8 x 1024 wide, 64 microbatches of 8,192 tokens, 200 Mbit/s, 50 ms); computing hidden as there, \
coding free, on one core of this machine, or on a GPU and a core; –: coding was not measured"""


def render(
    lines: Sequence[Line],
    speed: Mapping[str, Any] | None,
    own_shape: Mapping[str, Any] | None = None,
    order: Sequence[str] = (),
) -> str:
    """The tables.

    Args:
        lines: of the results file.
        speed: of `recipes.lab.race_speed.measure`; without it, or without a run of the
            reference, only steps are shown.
        own_shape: likewise, of the benchmark's own size: one more column.
        order: of rows; others come last.
    """
    results = Results.of(lines, order)
    rows = {row: runs for row, runs in results.runs.items() if runs}
    diverged = [results.label(row) for row in results.runs if results.diverged[row]]
    tables = _tables(rows, speed, own_shape)
    return f"{tables}\n\n{', '.join(diverged)}" if diverged else tables


def _tables(
    rows: Mapping[str, Mapping[int, Run]],
    speed: Mapping[str, Any] | None,
    own_shape: Mapping[str, Any] | None,
) -> str:
    if speed is None or REFERENCE not in rows:
        return _steps(rows)
    return "\n\n".join(
        (_headlines(rows, speed, own_shape), _grid(rows, speed), _connections(rows, speed), LEGEND)
    )


def _steps(rows: Mapping[str, Mapping[int, Run]]) -> str:
    headers = ("row", "n", "steps", "bits", "loss in the end")
    table = [
        (row, *_of_steps(list(runs.values())), _last_loss(list(runs.values())))
        for row, runs in rows.items()
    ]
    return tabulate(table, headers, disable_numparse=True)


def _last_loss(runs: Sequence[Run]) -> str:
    """The loss of the last readings, on or off, whichever is less: its mean over the seeds."""
    readings = [run["readings"] for run in runs]
    return _interval([smoothed(each)[-1][1] for each in readings], ".3f") if all(readings) else ""


def _of_steps(runs: Sequence[Run]) -> tuple[str, str, str]:
    """Runs that reached the target of all, their steps, and the bits of all."""
    reached = [run["steps"] for run in runs if run["steps"] is not None]
    bits = _bits(runs)
    most = max(run["trained_steps"] for run in runs)
    steps = _interval(reached, ".0f") if reached else f"above {most}"
    return f"{len(reached)}/{len(runs)}", steps, f"{bits.act:.2f} / {bits.grad:.2f}"


def _bits(runs: Sequence[Run]) -> Bits:
    return Bits(*(statistics.fmean(run[key] for run in runs) for key in ("act_bits", "grad_bits")))


def _headlines(
    rows: Mapping[str, Mapping[int, Run]],
    speed: Mapping[str, Any],
    own_shape: Mapping[str, Any] | None,
) -> str:
    headers = ["row", "n", "steps", "bits"]
    for links in HEADLINES:
        headers += [f"s a step, {links}", "x"]
    headers += ["s a step, benchmark's shape", "x", "coded on a core"]
    if own_shape is not None:
        headers.append(f"coded on {own_shape['machine']['device']} and a core")
    table = []
    for row, runs in rows.items():
        cells = [row, *_of_steps(list(runs.values()))]
        for links in HEADLINES:
            seconds = _seconds(row, runs, links, speed)
            base = _seconds(REFERENCE, rows[REFERENCE], links, speed)
            cells += [_in_words(seconds), _gain(rows, row, seconds, base)]
        bits = _bits(list(runs.values()))
        base = benchmark_step_s(_bits(list(rows[REFERENCE].values())), Coding())
        codings = [Coding(), _coding(row, runs, speed)]
        if own_shape is not None:
            codings.append(_coding(row, runs, own_shape))
        # With 64 microbatches a step is long: what one that does not drain lacks was not counted.
        # Nor was what the stage more of a tied model takes.
        counted = _updates(runs) == 1 and not _tied(runs)
        seconds_at_shape = [
            None if coding is None or not counted else benchmark_step_s(bits, coding)
            for coding in codings
        ]
        cells.append(MISSING if seconds_at_shape[0] is None else f"{seconds_at_shape[0]:.1f}")
        cells += [_gain(rows, row, seconds, base) for seconds in seconds_at_shape]
        table.append(cells)
    return tabulate(table, headers, disable_numparse=True)


def _grid(rows: Mapping[str, Mapping[int, Run]], speed: Mapping[str, Any]) -> str:
    conditions = [Links(rate, latency) for rate in RATES for latency in LATENCIES_MS]
    table = []
    for row, runs in rows.items():
        cells = [row]
        for links in conditions:
            seconds = _seconds(row, runs, links, speed)
            base = _seconds(REFERENCE, rows[REFERENCE], links, speed)
            gains = _gains(rows, row, seconds, base)
            cells.append(f"{statistics.fmean(gains):.2f}" if gains else MISSING)
        table.append(cells)
    headers = ("x", *(f"{each.mbps:g} / {each.latency_ms:g}" for each in conditions))
    return f"Mbit/s / ms\n{tabulate(table, headers, disable_numparse=True)}"


def _connections(rows: Mapping[str, Mapping[int, Run]], speed: Mapping[str, Any]) -> str:
    headers = ["row"]
    for links in HEADLINES:
        headers += [f"s a step, {links}", "x", "x, bf16 likewise"]
    table = []
    for row, runs in rows.items():
        cells = [row]
        for links in HEADLINES:
            several = links._replace(connections=CONNECTIONS)
            seconds = _seconds(row, runs, several, speed)
            cells.append(_in_words(seconds))
            for of_base in (links, several):
                base = _seconds(REFERENCE, rows[REFERENCE], of_base, speed)
                cells.append(_gain(rows, row, seconds, base))
        table.append(cells)
    return f"{CONNECTIONS} connections\n{tabulate(table, headers, disable_numparse=True)}"


def _seconds(
    row: str, runs: Mapping[int, Run], links: Links, speed: Mapping[str, Any]
) -> float | None:
    """Of a step; None if its coding or stages were not measured."""
    coding, bits = _coding(row, runs, speed), _bits(list(runs.values()))
    if coding is None or _tied(runs):
        return None
    size = SIZES["small"]
    codes = coding.times(size.message_elements)
    return step_s(size, bits, links, speed["compute"], codes, _updates(runs))


def _updates(runs: Mapping[int, Run]) -> int:
    """Steps between which the pipeline of a row does not drain; lines of before do not say so."""
    found: int = max(run.get("updates", 1) for run in runs.values())
    return found


def _tied(runs: Mapping[int, Run]) -> bool:
    """Whether the last stage of a row's model is one more, on the first host."""
    return any(run.get("tied", False) for run in runs.values())


def _in_words(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{seconds:.3f}"


def _coding(row: str, runs: Mapping[int, Run], speed: Mapping[str, Any]) -> Coding | None:
    """Of an element; None if it was not measured.

    What a rival does at a cut is part of its stages, and of no account.
    """
    if any(run["rival"] is not None for run in runs.values()):
        return Coding()
    measured = speed["coding"].get(row.removesuffix(ASYNCHRONOUS))  # which codes the same
    return None if measured is None else Coding(*measured).times(1 / speed["elements"])


def _gains(
    rows: Mapping[str, Mapping[int, Run]],
    row: str,
    seconds: float | None,
    base_seconds: float | None,
) -> list[float]:
    """Time to the target of the reference ÷ that of a row, of each seed in which both reached."""
    if seconds is None or base_seconds is None:
        return []
    base, own = rows[REFERENCE], rows[row]
    return [
        base[seed]["steps"] * base_seconds / (own[seed]["steps"] * seconds)
        for seed in sorted(base.keys() & own.keys())
        if base[seed]["steps"] is not None and own[seed]["steps"] is not None
    ]


def _gain(
    rows: Mapping[str, Mapping[int, Run]],
    row: str,
    seconds: float | None,
    base_seconds: float | None,
) -> str:
    gains = _gains(rows, row, seconds, base_seconds)
    return _interval(gains, ".2f") if gains else MISSING


def _interval(values: Sequence[float], form: str) -> str:
    mean = format(statistics.fmean(values), form)
    if len(values) < 2:
        return mean
    return f"{mean} ± {half_interval(values, 95):{form}}"
