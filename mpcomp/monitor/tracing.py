"""A trace of a few steps of all ranks, as a file that Perfetto and Chrome show.

    with pipe.trace("trace.json", steps=3):
        for x, y in loader:
            pipe.forward_backward(x, y)

Each rank is a process of the picture and each of its stages a thread, with one more for what the
rank does for all of them, and one for each link that is coded in the background. An arrow goes from
each message's departure to its arrival. Clocks are those of the first rank (`mpcomp.comm.clocks`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mpcomp.comm.mesh import Mesh
from mpcomp.core.trace import NO_STAGE, Span, Trace

__all__ = ["Tracing", "chrome_events"]

#: Spans in which a step is at work on its numbers; Perfetto gives each category a colour.
_COMPUTE = ("forward", "loss", "backward", "weights", "update")


class Tracing:
    """Takes down the training steps of a pipeline, and writes them once there are enough.

    Args:
        mesh: the ranks; all of them make one, with the same numbers of steps.
        devices: of this rank's stages.
        path: of the file, which the first rank writes.
        steps: number of steps to take down.
        skip: steps to let pass before, of this context.

    Raises:
        ValueError: no step to take down, or no folder for the file.
    """

    def __init__(
        self,
        mesh: Mesh,
        devices: Iterable[torch.device],
        path: Path,
        *,
        steps: int,
        skip: int,
    ) -> None:
        for name, value, least in (("steps", steps, 1), ("skip", skip, 0)):
            if value < least:
                raise ValueError(f"{name}={value}: pass at least {least}")
        if mesh.rank == 0 and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.absolute().parent}; make it first")
        self._mesh, self._path = mesh, path
        self._wanted, self._skip = steps, skip
        accelerators = [device for device in dict.fromkeys(devices) if device.type != "cpu"]

        def wait() -> None:
            for device in accelerators:
                torch.accelerator.synchronize(device)

        self._wait = wait if accelerators else None
        self._traces: list[Trace] = []
        self._written = False

    def begin_step(self, index: int) -> Trace | None:
        """The trace of the step that begins; None if it is none of those wanted."""
        if self._skip:
            self._skip -= 1
            return None
        if self._written:
            return None
        self._traces.append(Trace(index, self._wait))
        return self._traces[-1]

    def end_step(self) -> None:
        """Writes the file if that was the last step to be taken down; all ranks together."""
        if len(self._traces) == self._wanted:
            self._write()

    def discard_step(self, trace: Trace | None) -> None:
        """Forgets the step that failed."""
        if trace is not None and self._traces and self._traces[-1] is trace:
            self._traces.pop()

    def __enter__(self) -> Tracing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._traces:  # else another rank may be gone
            self._write()

    def _write(self) -> None:
        if self._written:
            return
        self._written = True
        offset = self._mesh.clock_offset()
        own = {
            "offset_ns": offset.ns,
            "error_ns": offset.error_ns,
            "spans": [
                span._replace(begin_ns=span.begin_ns + offset.ns, end_ns=span.end_ns + offset.ns)
                for trace in self._traces
                for span in trace.spans
            ],
            "waits": self._wait is not None,
        }
        ranks = self._mesh.all_gather_object(own, "spans of a trace")
        if self._mesh.rank == 0:
            document = _document(ranks, self._mesh.pp_size)
            self._path.write_text(json.dumps(document, separators=(",", ":")) + "\n")


def _document(ranks: Sequence[Mapping[str, Any]], pp_size: int) -> dict[str, Any]:
    """The file, in Chrome's format with an object at its head."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "writer": "mpcomp",
            "clock_error_us": [rank["error_ns"] / 1e3 for rank in ranks],
            "waits_for_accelerators": any(rank["waits"] for rank in ranks),
        },
        "traceEvents": chrome_events(
            [[Span(*span) for span in rank["spans"]] for rank in ranks], pp_size
        ),
    }


def chrome_events(ranks: Sequence[Sequence[Span]], pp_size: int) -> list[dict[str, Any]]:
    """Events of Chrome's trace format, microseconds since the first moment.

    Args:
        ranks: spans by rank, on one clock.
        pp_size: ranks of a replica, whose links have the same names as those of another.
    """
    start = min((span.begin_ns for spans in ranks for span in spans), default=0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        threads = {row: number for number, row in enumerate(sorted({*map(_row, spans)}))}
        events += _names(rank, threads)
        for span in spans:
            thread = threads[_row(span)]
            events.append(_complete(rank, thread, span, start))
            events += _arrow(rank, thread, span, start, rank // pp_size)
    return events


def _row(span: Span) -> tuple[int, str]:
    """The thread of a span: its stage, and the link that is coded beside it."""
    return span.stage, span.link if span.beside else ""


def _names(rank: int, threads: Mapping[tuple[int, str], int]) -> list[dict[str, Any]]:
    named = [("process_name", 0, f"rank {rank}")]
    for (stage, link), thread in threads.items():
        words = "step" if stage == NO_STAGE else f"stage {stage}"
        named.append(("thread_name", thread, f"{words}, {link}" if link else words))
    return [
        {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": {"name": words}}
        for name, thread, words in named
    ]


def _complete(rank: int, thread: int, span: Span, start: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": span.step}
    if span.stage != NO_STAGE:
        args |= {"stage": span.stage, "microbatch": span.microbatch}
    if span.link:
        args["link"] = span.link
    if span.num_bytes:
        args["bytes"] = span.num_bytes
    if span.beside:
        args["beside"] = True
    number = span.step if span.stage == NO_STAGE else span.microbatch
    return {
        "ph": "X",
        "name": f"{span.kind} {number}",
        "cat": "compute" if span.kind in _COMPUTE else span.kind,
        "pid": rank,
        "tid": thread,
        "ts": (span.begin_ns - start) / 1e3,
        "dur": (span.end_ns - span.begin_ns) / 1e3,
        "args": {"kind": span.kind, **args},
    }


def _arrow(rank: int, thread: int, span: Span, start: int, replica: int) -> list[dict[str, Any]]:
    """One end of the arrow of a message: from where it is sent, to where it has been received."""
    if span.kind not in ("send", "receive"):
        return []
    leaves = span.kind == "send"
    moment = (span.begin_ns if leaves else span.end_ns) - start
    return [
        {
            "ph": "s" if leaves else "f",
            **({} if leaves else {"bp": "e"}),
            "name": span.link,
            "cat": "message",
            "id": f"{replica}/{span.link}/{span.step}/{span.microbatch}",
            "pid": rank,
            "tid": thread,
            "ts": moment / 1e3,
        }
    ]
