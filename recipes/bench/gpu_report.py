"""The results of `recipes.bench.gpu_check`: their file, and its tables.

    {"parts": {name: {"stamp": {...}, "state": "done", "why": "", "seconds": 8.1, "rows": [...]}}}

A part's state is ``running`` until it has ended: a file that says so was cut off.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from tabulate import tabulate

from recipes.bench.jobs import DONE, STOPPED

__all__ = ["RUNNING", "SKIPPED", "PartFile", "tables"]

Row: TypeAlias = Mapping[str, Any]

#: States that a job has not: under way, or of no use on this machine.
RUNNING, SKIPPED = "running", "skipped"
MISSING: Final = "–"
FACTS: Final = {
    "gpu": "GPU",
    "num_gpus": "GPUs",
    "compute_capability": "compute capability",
    "driver": "driver",
    "nccl": "NCCL",
    "torch": "torch",
    "cuda": "CUDA",
    "triton": "Triton",
    "python": "Python",
    "cores": "cores",
    "host_to_gpu_pinned_gb_s": "host to GPU, pinned, GB/s",
    "gpu_to_host_pinned_gb_s": "GPU to host, pinned, GB/s",
    "host_to_gpu_pageable_gb_s": "host to GPU, pageable, GB/s",
    "gpu_to_host_pageable_gb_s": "GPU to host, pageable, GB/s",
    "in_gpu_memory_gb_s": "in GPU memory, read and written, GB/s",
    "in_host_memory_gb_s": "in host memory, read and written, GB/s",
    "bf16_product_tflop_s": "bf16 product of two matrices, TFLOP/s",
}
NOTHING: Final = "No part has been run on a GPU yet."


class PartFile:
    """Parts and their rows in a JSON file, which is written with each of them.

    A new try takes the place of an earlier one with its first row, so that one that breaks off
    before loses nothing.

    Args:
        path: of the file, which may be there already.

    Raises:
        ValueError: the file is not one of these.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.parts: dict[str, dict[str, Any]] = {}
        self._under_way: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.parts = _parts_of(path)

    def is_done(self, name: str, code: str, *, dry: bool) -> bool:
        """Whether this code has been through a part, at these sizes."""
        part = self.parts.get(name)
        if part is None or part["state"] != DONE:
            return False
        return bool(part["stamp"]["code"] == code and part["stamp"]["dry_run"] == dry)

    def take(self, name: str, message: Mapping[str, Any]) -> None:
        """Writes what a part has said: its ``stamp``, or a row."""
        if "stamp" in message:
            self._under_way[name] = {**message, "state": RUNNING, "why": "", "seconds": None}
            self._under_way[name]["rows"] = []
            return
        part = self.parts[name] = self._under_way[name]
        part["rows"].append(dict(message))
        self._write()

    def end(self, name: str, state: str, why: str, seconds: float) -> tuple[str, str]:
        """Writes the end of a part.

        Args:
            name: of the part.
            state: of its job.
            why: it was not done.
            seconds: that it took.

        Returns:
            The part's own state, and why it is that.
        """
        part = self._under_way.pop(name, None)
        if part is None:  # it has not said where it runs
            return state, why
        reasons = [row["why_skipped"] for row in part["rows"] if "why_skipped" in row]
        if state == DONE and reasons:
            state, why = SKIPPED, reasons[0]
        part.update(state=state, why=why, seconds=round(seconds, 1))
        if part["rows"] or not self.parts.get(name, {}).get("rows"):
            self.parts[name] = part
            self._write()
        return state, why

    def interrupt(self) -> None:
        """Writes that what is under way was interrupted."""
        for name, part in list(self._under_way.items()):
            if part["rows"]:
                part.update(state=STOPPED, why="interrupted")
                self._write()
            del self._under_way[name]

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps({"parts": self.parts}, indent=1) + "\n")
        beside.replace(self._path)


def _parts_of(path: Path) -> dict[str, dict[str, Any]]:
    try:
        there = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error}): choose another file") from error
    parts = there.get("parts") if isinstance(there, dict) else None
    keys = {"stamp", "state", "why", "seconds", "rows"}
    if not isinstance(parts, dict) or any(keys - set(part) for part in parts.values()):
        raise ValueError(
            f"{path} has no parts of recipes.bench.gpu_check: choose another file for them"
        )
    return parts


def tables(parts: Mapping[str, Row], names: Sequence[str]) -> str:
    """The state of every part, then the rows of each.

    Args:
        parts: of the file.
        names: of all parts, in their order.
    """
    if not parts:
        return NOTHING
    shown = [_states(parts, names)]
    for name in names:
        rows = [row for row in parts.get(name, {}).get("rows", ()) if "why_skipped" not in row]
        if rows:
            shown.append(f"{name}\n{TABLES[name](rows)}")
    return "\n\n".join(shown)


def _states(parts: Mapping[str, Row], names: Sequence[str]) -> str:
    table = []
    for name in names:
        if name not in parts:
            table.append((name, "not run", *[MISSING] * 4, ""))
            continue
        part = parts[name]
        stamp = part["stamp"]
        gpu = "dry run, CPU" if stamp["dry_run"] else stamp["gpu"]
        where = (gpu, stamp["torch"], stamp["commit"] or stamp["code"])
        table.append(
            (name, part["state"], _number(part["seconds"], ".0f"), *where, _line(part["why"]))
        )
    headers = ("part", "state", "s", "GPU", "torch", "commit", "why")
    return tabulate(table, headers, disable_numparse=True)


def _line(text: str) -> str:
    """The first line, which says what went wrong."""
    return text.partition("\n")[0]


def _number(value: float | None, form: str, factor: float = 1) -> str:
    return MISSING if value is None else format(factor * value, form)


def _machine(rows: Sequence[Row]) -> str:
    facts = [(FACTS[name], _fact(value)) for row in rows for name, value in row.items()]
    return tabulate(facts, ("fact", "value"), disable_numparse=True)


def _fact(value: Any) -> str:
    if value is None:
        return MISSING
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _tests(rows: Sequence[Row]) -> str:
    counts = ("collected", "passed", "failed", "errors", "skipped")
    cells = [
        (row["command"], *(_number(row[name], "d") for name in counts), f"{row['seconds']:.0f}")
        for row in rows
    ]
    text = tabulate(cells, ("pytest", *counts, "s"), disable_numparse=True)
    lines = [line for row in rows for line in row["failures"]]
    if all(rows[-1][name] is None for name in counts):  # it was killed
        lines += rows[-1]["last_lines"]
    return "\n".join((text, "", *lines)) if lines else text


def _messages(rows: Sequence[Row]) -> str:
    headers = (
        *("method", "message", "operations", "kernels", "to the GPU", "from it", "on it"),
        *("MB copied", "synchronisations"),
    )
    table = [
        (
            row["method"],
            row["message"],
            *(
                " / ".join(_number(count(row[end]), form) for end in ("encode", "decode"))
                for count, form in _COUNTS
            ),
        )
        for row in rows
    ]
    text = tabulate(table, headers, disable_numparse=True)
    return f"{text}\n\nencode / decode, without the way of a message through a connection"


def _copies(kind: str) -> Callable[[Row], int | None]:
    def count(end: Row) -> int | None:
        copies = end["copies"]
        return None if copies is None else copies.get(kind, {"count": 0})["count"]

    return count


def _copied(end: Row) -> float | None:
    copies = end["copies"]
    return None if copies is None else sum(each["bytes"] for each in copies.values()) / 1e6


_COUNTS: Final[tuple[tuple[Callable[[Row], float | None], str], ...]] = (
    (lambda end: end["operations"], "d"),
    (lambda end: end["kernels"], "d"),
    (_copies("HtoD"), "d"),
    (_copies("DtoH"), "d"),
    (_copies("DtoD"), "d"),
    (_copied, ".1f"),
    (lambda end: None if end["syncs"] is None else sum(end["syncs"].values()), "d"),
)


def _kernels(rows: Sequence[Row]) -> str:
    headers = ("kernel", "calls", "other bits", "GB/s", "torch's operations, GB/s")
    table = [
        (
            row["kernel"],
            row["calls"],
            row["differing"],
            _number(row["gb_s"], ".0f"),
            _number(row["torch_gb_s"], ".0f"),
        )
        for row in rows
    ]
    text = tabulate(table, headers, disable_numparse=True)
    below = (
        "other bits: calls whose result is not the CPU's; lanes stand beside the host, not torch"
    )
    return f"{text}\n\n{below}"


def _lanes(rows: Sequence[Row]) -> str:
    headers = ("method", "kind", "on", "bytes", "encode, GB/s", "decode, GB/s", "numbers")
    table = [
        (
            row["method"],
            row["kind"],
            row["coded_on"],
            _number(row["num_bytes"], ",d"),
            _number(row["encode_gb_s"], ".2f"),
            _number(row["decode_gb_s"], ".2f"),
            "right" if row["same"] else "WRONG",
        )
        for row in rows
    ]
    text = tabulate(table, headers, disable_numparse=True)
    return f"{text}\n\nGB/s of whole numbers, two bytes each"


def _coding(rows: Sequence[Row]) -> str:
    names = ("encode_act_s", "decode_act_s", "encode_grad_s", "decode_grad_s")
    headers = ("ms a microbatch", "threads", *(name[:-2].replace("_", " ") for name in names))
    table = [
        (row["row"], row["threads"], *(f"{1e3 * row[name]:.1f}" for name in names)) for row in rows
    ]
    return tabulate(table, headers, disable_numparse=True)


def _pipeline(rows: Sequence[Row]) -> str:
    headers = (
        *("method", "coded", "Mbit/s", "outcome", "threads", "s a step", "in one process"),
        *("GPU idle, %", "MB a step", "losses"),
    )
    table = [
        (
            row["method"],
            # Rows of older code have neither: it coded in turn, over links as they are.
            "in the background" if row.get("background") else "in turn",
            _number(row.get("mbps"), "g"),
            _line(row["outcome"]),
            row["threads"],
            _number(row["step_s"], ".3f"),
            _number(row["one_process_step_s"], ".3f"),
            _number(row["gpu_idle"], ".0f", 100),
            _number(row["wire_bytes"], ".1f", 1e-6),
            _losses(row),
        )
        for row in rows
    ]
    text = tabulate(table, headers, disable_numparse=True)
    return f"{text}\n\nlosses: two processes on one GPU against the same steps in one process"


def _losses(row: Row) -> str:
    if row["largest_difference"] is None:
        return MISSING
    return "equal" if row["losses_equal"] else f"up to {row['largest_difference']:.1e} apart"


def _races(rows: Sequence[Row]) -> str:
    table = [(row["check"], row["methods"], _line(row["outcome"])) for row in rows]
    return tabulate(table, ("check", "methods", "outcome"), disable_numparse=True)


def _nccl(rows: Sequence[Row]) -> str:
    headers = ("case", "messages", "ranks on", "outcome")
    table = [
        (row["case"], row["messages"], ", ".join(row["devices"]), _line(row["outcome"]))
        for row in rows
    ]
    return tabulate(table, headers, disable_numparse=True)


TABLES: Final[Mapping[str, Callable[[Sequence[Row]], str]]] = {
    "machine": _machine,
    "tests": _tests,
    "messages": _messages,
    "kernels": _kernels,
    "lanes": _lanes,
    "coding": _coding,
    "pipeline": _pipeline,
    "races": _races,
    "nccl": _nccl,
}
