"""A picture of a run in a terminal: progress, the parts of a step by rank, traffic by link."""

from __future__ import annotations

import math
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mpcomp.core.sent import below_bf16_text
from mpcomp.view.run import PARTS, Run

__all__ = ["frame"]

#: Steps that rates are of.
LAST: Final = 50
#: Windows that figures of ranks and links are of.
WINDOWS: Final = 5
#: Characters of a bar, and of the curve of losses.
WIDTH: Final = 24
#: Seconds after which a run that says nothing is said to be silent.
SILENT_S: Final = 30.0
#: A letter and a colour, as colours alone are not told apart by everybody.
LOOKS: Final = {
    "compute": ("█", "blue"),
    "coding": ("▓", "yellow"),
    "wait": ("░", "red"),
    "exchange": ("▒", "magenta"),
    "other": ("·", "bright_black"),
}
_LEVELS: Final = "▁▂▃▄▅▆▇█"


def frame(run: Run) -> RenderableType:
    """The picture of a run as it is now."""
    windows = [window for _, window in run.windows[-WINDOWS:]]
    parts: list[RenderableType] = [_head(run), _progress(run)]
    if windows:
        parts += [Text(), _ranks(run, windows), _legend(run), Text(), _links(run, windows)]
    else:
        parts.append(Text("no step has ended yet", style="bright_black"))
    title = f"{run.files.path}: {run.label}"
    return Panel(Group(*parts), title=title, title_align="left", padding=(1, 2))


def _head(run: Run) -> Text:
    about = run.about
    words = f"{_several(about['stages'], 'stage', 's')} on "
    words += _several(about["ranks"], "process", "es")
    if about["replicas"] > 1:
        words += f", {about['replicas']} replicas"
    words += f", {_several(about['chunks'], 'microbatch', 'es')}"
    return Text(f"{words}\n{_state(run)}")


def _state(run: Run) -> str:
    if run.finished:
        return "finished"
    if not run.steps:
        return "has begun"
    silent = run.seconds_since_step or 0.0
    usual = 3 * (run.step_seconds(LAST) or 0.0)
    if silent > max(SILENT_S, usual):
        return f"no step for {_clock(silent)}: it evaluates, or has stopped"
    return "training"


def _progress(run: Run) -> RenderableType:
    if not run.steps:
        return Text()
    row, total = run.steps[-1], run.about["total_steps"]
    done = row["step"] + 1
    seconds = run.step_seconds(LAST)
    bar = Table.grid(padding=(0, 2))
    cells: list[RenderableType] = [Text(f"step {done:,}" + (f" of {total:,}" if total else ""))]
    if total:
        cells.append(ProgressBar(total=total, completed=min(done, total), width=WIDTH))
        if seconds and done < total:
            cells.append(Text(f"{_clock((total - done) * seconds)} left"))
    bar.add_row(*cells)
    pace = [f"{_seconds(seconds)} a step"] if seconds else []
    if rate := run.samples_per_second(LAST):
        pace.append(f"{rate:,.4g} {run.about['samples']}/s")
    sent = run.sent()[-1]
    pace.append(f"{_bytes(sent.wire_bytes)} sent")
    known = [row["loss"] for row in run.steps if row["loss"] is not None]
    loss = Text("loss " + (f"{known[-1]:.4f}" if known else "not finite") + "  ")
    loss.append(_spark(known), style="cyan")
    account = [Text(sentence) for sentence in run.account().summary()]
    return Group(bar, Text(", ".join(pace)), *account, loss)


def _spark(values: list[float]) -> str:
    """All values as a curve of characters."""
    if len(values) < 2:
        return ""
    size = math.ceil(len(values) / WIDTH)
    means = [sum(values[i : i + size]) / len(values[i : i + size])
             for i in range(0, len(values), size)]  # fmt: skip
    low, high = min(means), max(means)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(top * (v - low) / (high - low)) if high > low else 0]
                   for v in means)  # fmt: skip


def _ranks(run: Run, windows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("a step", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    shown = _shown(run)
    for part in shown:
        table.add_column(part, justify="right", no_wrap=True)
    for rank, times in enumerate(run.rank_times(windows)):
        total = sum(times.values())
        table.add_row(
            str(rank),
            _seconds(total),
            _bar(times, total),
            *(f"{100 * times[part] / total:.0f} %" if total else "" for part in shown),
        )
    return table


def _bar(times: dict[str, float], total: float) -> Text:
    bar = Text()
    begun = 0.0
    for part in PARTS:
        start, begun = begun, begun + times[part]
        length = round(WIDTH * begun / total) - round(WIDTH * start / total) if total else 0
        letter, colour = LOOKS[part]
        bar.append(letter * length, style=colour)
    return bar


def _shown(run: Run) -> list[str]:
    """Parts of a step that there can be."""
    return [part for part in PARTS if part != "exchange" or run.about["replicas"] > 1]


def _legend(run: Run) -> Text:
    text = Text("      ")
    for part in _shown(run):
        letter, colour = LOOKS[part]
        text.append(f"{letter} ", style=colour)
        text.append(f"{part}  ", style="bright_black")
    return text


def _links(run: Run, windows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    found = run.link_figures(windows)
    shown = ["relative_error", "cosine"]
    if any(figures["lag"] is not None for figures in found):
        shown.append("lag")
    # Names may be long, and are folded where a terminal is narrow; numbers are not.
    table.add_column("link", min_width=13, no_wrap=True)
    table.add_column("after", overflow="fold")
    table.add_column("method", min_width=8, overflow="fold")
    for name, width in (
        ("a step", 9),
        ("Mbit/s", 6),
        ("below bf16", 10),
        *((name.removeprefix("relative_"), 6) for name in shown),
    ):
        table.add_column(name, justify="right", min_width=width, no_wrap=True)
    slowest = max(sum(times.values()) for times in run.rank_times(windows))
    for i, figures in enumerate(found):
        link = run.about["links"][i]
        wire = figures["wire_bytes"] or 0.0
        table.add_row(
            run.link_name(i),
            link["after"],
            link["method"],
            _bytes(wire),
            f"{8e-6 * wire / slowest:.3g}" if slowest else "",
            below_bf16_text(figures["below_bf16"]),
            *(_number(figures[name]) for name in shown),
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _bytes(count: float) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _several(count: int, word: str, ending: str) -> str:
    return f"{count} {word}{'' if count == 1 else ending}"
