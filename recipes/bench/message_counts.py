"""Counts of what a message asks of an accelerator, counted where there is none.

    python -m recipes.bench.message_counts --out docs/results/message_counts.jsonl
    python -m recipes.bench.message_counts --out docs/results/message_counts.jsonl --table

The first command adds rows of this commit to the file. The second prints a table, with the first
and the last commit of the file side by side.

Both ends of a cut are in this process and code one microbatch of a warm step, as stages do. A
message goes through the host's memory as gloo takes it (`recipes.bench.fake_accelerator`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from tabulate import tabulate
from torch import Tensor

from mpcomp.comm import gloo
from mpcomp.core.context import Step, TensorMeta
from mpcomp.links.boundary import ConnectedBoundary
from mpcomp.links.build import boundaries_of
from mpcomp.links.link import Link
from recipes.bench.evidence import commit_id
from recipes.bench.fake_accelerator import DEVICE, Counts, FakeAccelerator
from recipes.bench.gpu_messages import METHODS, SHAPE

__all__ = ["cross", "main", "rows_of", "table"]

#: Steps before the one that is looked at: methods learn in the first ones, and make buffers.
WARMUPS: Final = 2
#: A context of a name, within which something is counted.
Around = Callable[[str], AbstractContextManager[Any]]


def main(argv: Sequence[str] | None = None) -> None:
    """Counts and adds rows to a file; `--table` prints the file's table and counts nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bench.message_counts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("methods", nargs="*", default=METHODS, metavar="METHOD", help="(default: %(default)s)")
    add("--shape", type=int, nargs="+", default=SHAPE, help="of the tensor, in bf16")
    add("--out", type=Path, metavar="JSONL", required=True, help="rows")
    add("--table", action="store_true", help="print the table, count nothing")
    options = parser.parse_args(argv)
    if options.table:
        print(table([json.loads(line) for line in options.out.read_text().splitlines()]))
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.shape, generator=generator).bfloat16()
    origin = {"commit": commit_id(), "shape": list(options.shape)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file, FakeAccelerator() as accelerator:
        for method in options.methods:
            try:
                rows = [*rows_of(method, x.to(DEVICE), accelerator)]
            except ValueError as error:
                sys.exit(f"error: {error}")
            for row in rows:
                ends = {end: asdict(row[end]) for end in ("encode", "decode")}
                print(json.dumps({**origin, **row, **ends}), file=file, flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The counts of the first and the last commit side by side, with the commits below.

    Args:
        rows: of the file, in its order.
    """
    first, last = rows[0]["commit"], rows[-1]["commit"]
    found = {(row["commit"], row["method"], row["message"]): row for row in rows}
    cells: dict[tuple[str, ...], list[str]] = {}  # (method, its counts) -> messages
    for _, method, message in dict.fromkeys((None, *key[1:]) for key in found):
        sides = [found.get((commit, method, message)) for commit in (first, last)]
        counts = (_ends(side, count) for count in _COLUMNS.values() for side in sides)
        cells.setdefault((method, *counts), []).append(message)
    headers = [f"{name}, {when}" for name in _COLUMNS for when in ("before", "now")]
    text = tabulate(
        [(key[0], " and ".join(messages), *key[1:]) for key, messages in cells.items()],
        ("method", "message", *headers),
        disable_numparse=True,
    )
    shape = " × ".join(map(str, rows[-1]["shape"]))
    return (
        f"{text}\n\nencode / decode of {shape} in bf16\nbefore: commit {first}; now: commit {last}"
    )


def _ends(row: Mapping[str, Any] | None, count: Callable[[Mapping[str, int]], str]) -> str:
    return "–" if row is None else " / ".join(count(row[end]) for end in ("encode", "decode"))


_COLUMNS: Final[Mapping[str, Callable[[Mapping[str, int]], str]]] = {
    "launches": lambda end: str(end["launches"]),
    "copies": lambda end: str(end["up"] + end["down"]),
    "pageable": lambda end: str(end["pageable"]),
    "waits": lambda end: str(end["waits"]),
    "MB": lambda end: f"{(end['up_bytes'] + end['down_bytes']) / 1e6:.1f}",
}


def rows_of(method: str, x: Tensor, accelerator: FakeAccelerator) -> Iterator[dict[str, Any]]:
    """Counts of the second microbatch of a warm step, of an activation and of a gradient.

    Args:
        method: both ways.
        x: that crosses, on that accelerator.
        accelerator: which is asked.
    """
    (boundary,) = boundaries_of(method, method, ("cut",), seed=0, replica=0, warmup_steps=0)
    rows = len(x)
    ids = tuple(tuple((row,) for row in range(start, start + rows)) for start in (0, rows))
    with patch.object(gloo, "dist", _Loop()):
        cut = ConnectedBoundary(boundary, *(_channel(link, x.device) for link in boundary.links))
        for index in range(WARMUPS):
            step = Step(index=index, train=True, sample_ids=ids)
            for microbatch in (0, 1):
                cross(cut, x, step, microbatch)
            boundary.finish_step(finite=True)
        step = Step(index=WARMUPS, train=True, sample_ids=ids)
        cross(cut, x, step, 0)
        counted: dict[str, Counts] = {}

        @contextmanager
        def around(name: str) -> Iterator[None]:
            counted[name] = accelerator.counts = Counts()
            yield
            accelerator.counts = Counts()

        cross(cut, x, step, 1, around)
        boundary.finish_step(finite=True)
    for message in ("activation", "gradient"):
        ends = {end: counted[f"{end} {message}"] for end in ("encode", "decode")}
        yield {"method": method, "message": message, **ends}


def cross(
    cut: ConnectedBoundary,
    x: Tensor,
    step: Step,
    microbatch: int,
    around: Around = lambda _: nullcontext(),
) -> tuple[Tensor, Tensor]:
    """Takes an activation over a cut and a gradient back, each end in a context of its name."""
    meta = TensorMeta.of(x)
    for way in (cut.act, cut.grad):
        way.channel.release()
    with around("encode activation"):
        cut.act.send(x, meta, step, microbatch)
    with around("decode activation"):
        cut.act.post(meta, step, microbatch)
        y, _ = cut.act.receive(meta, step, microbatch)
    with around("encode gradient"):
        cut.grad.send(x, meta, step, microbatch)
    with around("decode gradient"):
        cut.grad.post(meta, step, microbatch)
        gradient = cut.grad.receive_any(meta, step, microbatch)
    assert gradient is not None
    return y, gradient


def _channel(link: Link, device: torch.device) -> gloo.GlooChannel:
    """Both ends of a channel of gloo, in this process."""
    waits = SimpleNamespace(leaving=lambda *_: nullcontext(), on=lambda *_: nullcontext())
    mesh: Any = SimpleNamespace(device=device, wait_s=60.0, waits=waits, where="")
    group: Any = {}
    return gloo.GlooChannel(group, 0, link.name, mesh, varies=link.varies)


class _Loop:
    """A stand-in for torch.distributed: it keeps what is sent, by tag, until it is received."""

    def isend(self, x: Tensor, *, dst: int, group: dict[int, Tensor], tag: int) -> _Work:
        assert x.device.type == "cpu", "gloo reads host memory"
        group[tag] = x
        return _Work(lambda: None)

    def irecv(self, room: Tensor, *, src: int, group: dict[int, Tensor], tag: int) -> _Work:
        def arrive() -> None:
            sent = group.pop(tag)
            room[: len(sent)] = sent

        return _Work(arrive)


class _Work(NamedTuple):
    """Work that is waited for."""

    done: Callable[[], None]

    def wait(self, timeout: timedelta) -> None:
        """Ends it."""
        self.done()


if __name__ == "__main__":
    main()
