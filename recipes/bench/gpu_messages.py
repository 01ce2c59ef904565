"""The part of `recipes.bench.gpu_check` about messages: kernels, copies and waits of each method.

    python -m recipes.bench.gpu_check --parts messages

Both ends of a cut are in this process and code one microbatch of a warm step, as stages do. The way
of a message through a connection is not counted.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from mpcomp.core.context import Step, TensorMeta
from mpcomp.links.boundary import Boundary
from mpcomp.links.build import boundaries_of
from recipes.bench.gpu_parts import device_of
from recipes.bench.jobs import Reporter
from recipes.bench.profiled import profiled
from stages.clock import now

__all__ = ["counts_within", "messages", "traced"]

Event: TypeAlias = Mapping[str, Any]
#: A context of a name, within which something is counted.
Around: TypeAlias = Callable[[str], AbstractContextManager[Any]]

METHODS: Final = ("none", "bf16", "quant:4", "topk:0.1", "auto", "auto:scratch", "auto:memory")
SHAPE: Final = (8, 1024, 1024)
DRY_SHAPE: Final = (2, 16, 32)
#: Steps before the one that is looked at: methods learn in the first ones, and make buffers.
WARMUPS: Final = 2
#: Calls of the CUDA runtime in which the processor waits for the GPU.
WAITS: Final = frozenset(
    ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
)


def messages(reporter: Reporter, dry: bool) -> None:
    """Reports what coding a message of each method asks of the GPU, encode and decode apart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(DRY_SHAPE if dry else SHAPE, generator=generator).to(
        device_of(dry), torch.bfloat16
    )
    for method in METHODS:
        if reporter.left_s <= 0:
            return
        for row in _rows_of(method, x):
            reporter.say(row)


def _rows_of(method: str, x: Tensor) -> Iterator[dict[str, Any]]:
    """Counts of the second microbatch of a warm step."""
    (boundary,) = boundaries_of(method, method, ("cut",), seed=0, replica=0, warmup_steps=0)
    rows = len(x)
    ids = tuple(tuple((row,) for row in range(start, start + rows)) for start in (0, rows))
    for index in range(WARMUPS):
        step = Step(index=index, train=True, sample_ids=ids)
        for microbatch in (0, 1):
            _cross(boundary, x, step, microbatch)
        boundary.finish_step(finite=True)
    step = Step(index=WARMUPS, train=True, sample_ids=ids)
    _cross(boundary, x, step, 0)
    counted = (_kernels if x.is_cuda else _operations)(
        lambda around: _cross(boundary, x, step, 1, around)
    )
    boundary.finish_step(finite=True)
    for message in ("activation", "gradient"):
        ends = {end: counted[f"{end} {message}"] for end in ("encode", "decode")}
        yield {"method": method, "message": message, "shape": list(x.shape), **ends}


def _cross(
    boundary: Boundary,
    x: Tensor,
    step: Step,
    microbatch: int,
    around: Around = lambda _: nullcontext(),
) -> None:
    """Takes an activation over a cut and a gradient back, each end in a context of its name."""
    meta = TensorMeta.of(x)
    with around("encode activation"):
        message = boundary.act.encode(x, step, microbatch)
    with around("decode activation"):
        boundary.act.decode(message, meta, step, microbatch, x.device)
    with around("encode gradient"):
        message = boundary.grad.encode(x, step, microbatch)
    with around("decode gradient"):
        boundary.grad.decode(message, meta, step, microbatch, x.device)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the operations of torch."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def _operations(work: Callable[[Around], None]) -> dict[str, dict[str, Any]]:
    """Counts of each named context within the work, on a CPU."""
    counted = {}

    @contextmanager
    def around(name: str) -> Iterator[None]:
        with _Operations() as operations:  # type: ignore[no-untyped-call]
            yield
        unknown = dict.fromkeys(("kernels", "copies", "syncs"))
        counted[name] = {"operations": operations.count, **unknown}

    work(around)
    return counted


def _kernels(work: Callable[[Around], None]) -> dict[str, dict[str, Any]]:
    """Counts of each named context within the work, on a GPU."""
    names: list[str] = []

    def around(name: str) -> record_function:
        names.append(name)
        return record_function(name)

    events = traced(lambda: work(around))
    return {name: counts_within(events, name) for name in names}


def traced(work: Callable[[], Any]) -> list[Event]:
    """The events of the work, as torch's profiler writes them, a GPU's own too."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    def finished() -> None:
        work()
        now()  # behind all that the GPU was given

    found = profiled(finished, activities)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_bytes())["traceEvents"]
    return events


def counts_within(events: Sequence[Event], name: str) -> dict[str, Any]:
    """Kernels, copies and waits that were asked for within a span of a trace.

    Args:
        events: of the trace.
        name: of the span, which is there once.
    """
    (span,) = (
        event for event in events if event.get("cat") == "user_annotation" and event["name"] == name
    )
    end = span["ts"] + span["dur"]
    calls = [
        event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and span["ts"] <= event["ts"] <= end
    ]
    numbers = {call["args"]["correlation"] for call in calls if "correlation" in call["args"]}
    done = [event for event in events if event.get("args", {}).get("correlation") in numbers]
    copies: dict[str, dict[str, int]] = {}
    for event in done:
        if event["cat"] == "gpu_memcpy":  # as in "Memcpy HtoD (Pageable -> Device)"
            kind = copies.setdefault(event["name"].split()[1], {"count": 0, "bytes": 0})
            kind["count"] += 1
            kind["bytes"] += event["args"].get("bytes", 0)
    return {
        "operations": None,
        "kernels": sum(event["cat"] == "kernel" for event in done),
        "copies": copies,
        "syncs": dict(Counter(call["name"] for call in calls if call["name"] in WAITS)),
    }
