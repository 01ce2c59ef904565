"""A trace of steps: what it says of one process and of two, and that it changes no number."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows
from ranks import preload

import mpcomp
from mpcomp.comm.clocks import offset_to_first
from mpcomp.core.trace import Trace

preload("test_trace")

CHUNKS, STEPS, TRACED = 3, 5, 2
COMPUTE = ("forward", "loss", "backward")


def train(path: Path | None, split: Any = MLP_SPLIT, **options: Any) -> dict[str, torch.Tensor]:
    """Weights and losses after some steps, of which some are traced."""
    torch.manual_seed(3)
    pipe = mpcomp.pipeline(
        mlp(),
        chunks=CHUNKS,
        split=split,
        act_comp="ef21+topk:0.2",
        grad_comp="ef+quant:4",
        loss_fn=F.cross_entropy,
        **options,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

    def steps() -> list[torch.Tensor]:
        losses = []
        for seed in range(STEPS):
            losses.append(pipe.forward_backward(*rows(7, seed)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    if path is None:
        losses = steps()
    else:
        with pipe.trace(path, steps=TRACED, skip=1):
            losses = steps()
    return {**pipe.merge().state_dict(), "losses": torch.stack(losses)}


def on_ranks(path: str, background: str) -> list[dict[str, torch.Tensor]]:
    os.environ["MPCOMP_BACKGROUND"] = background
    return [train(each, MLP_SPLIT[:1]) for each in (Path(path), None)]


def spans_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def check_nested(spans: list[dict[str, Any]]) -> None:
    """On a thread events follow each other or lie within each other; all of a rank in its steps."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        threads[span["pid"], span["tid"]].append(span)
    for on_thread in threads.values():
        for one, other in itertools.combinations(on_thread, 2):
            first, second = sorted((one, other), key=lambda span: (span["ts"], -span["dur"]))
            end, second_end = first["ts"] + first["dur"], second["ts"] + second["dur"]
            assert end <= second["ts"] + 1e-3 or second_end <= end + 1e-3, (first, second)
    steps = {(s["pid"], s["args"]["step"]): s for s in spans if s["args"]["kind"] == "step"}
    for span in spans:
        step = steps[span["pid"], span["args"]["step"]]
        assert step["ts"] <= span["ts"] + 1e-3
        assert span["ts"] + span["dur"] <= step["ts"] + step["dur"] + 1e-3


def check_messages(document: dict[str, Any], num_cuts: int) -> None:
    """Each message that was sent is received, once, and not before; each is coded at its ends."""
    at: dict[str, dict[Any, Any]] = defaultdict(dict)
    for event in document["traceEvents"]:
        kind = event.get("args", {}).get("kind")
        if kind in ("encode", "send", "receive", "decode"):
            args = event["args"]
            key = args["link"], args["step"], args["microbatch"]
            assert key not in at[kind]
            at[kind][key] = event
    assert at["send"].keys() == at["receive"].keys() == at["encode"].keys() == at["decode"].keys()
    assert len(at["send"]) == TRACED * CHUNKS * 2 * num_cuts
    slack_us = sum(document["otherData"]["clock_error_us"]) + 1e-3
    for key, sent in at["send"].items():
        received = at["receive"][key]
        assert sent["args"]["bytes"] > 0
        assert sent["ts"] <= received["ts"] + received["dur"] + slack_us
        assert at["encode"][key]["ts"] <= sent["ts"]
        decoded = at["decode"][key]  # in the background perhaps before a stage waits for it
        assert received["ts"] <= decoded["ts"] or decoded["args"]["beside"]
        assert sent["ts"] <= decoded["ts"] + slack_us
    arrows = [event for event in document["traceEvents"] if event["ph"] in "sf"]
    ends: dict[str, set[str]] = defaultdict(set)
    for arrow in arrows:
        ends[arrow["id"]].add(arrow["ph"])
    assert len(ends) == len(at["send"]) and all(both == {"s", "f"} for both in ends.values())


def check_passes(spans: list[dict[str, Any]], num_stages: int) -> None:
    """Every stage runs every microbatch forward and backward; the last one has the losses."""
    found = [s["args"] for s in spans if s["args"]["kind"] in COMPUTE]
    seen = {(a["kind"], a["step"], a["stage"], a["microbatch"]) for a in found}
    each = set(itertools.product(range(1, 1 + TRACED), range(num_stages), range(CHUNKS)))
    last = {(step, stage, mb) for step, stage, mb in each if stage == num_stages - 1}
    assert seen == {
        *(("forward", *one) for one in each),
        *(("backward", *one) for one in each),
        *(("loss", *one) for one in last),
    }
    assert len(found) == len(seen)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(value.equal(other[k]) for k, value in one.items())


@pytest.mark.parametrize("recompute", [False, True])
def test_one_process(tmp_path: Path, recompute: bool) -> None:
    path = tmp_path / "trace.json"
    traced = train(path, recompute=recompute)
    assert same(traced, train(None, recompute=recompute))
    spans = spans_of(path)
    check_nested(spans)
    check_messages(json.loads(path.read_text()), len(MLP_SPLIT))
    check_passes(spans, len(MLP_SPLIT) + 1)


@pytest.mark.parametrize("background", ["0", "1"])
def test_two_ranks(tmp_path: Path, ranks: Any, background: str) -> None:
    path = tmp_path / "trace.json"
    for traced, plain in ranks(on_ranks, 2, str(path), background):
        assert same(traced, plain)
    document = json.loads(path.read_text())
    spans = spans_of(path)
    assert {span["pid"] for span in spans} == {0, 1}
    named = {
        (event["pid"], event["args"]["name"])
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    beside = {
        (rank, f"stage {rank}, boundary 0 {way}") for rank in (0, 1) for way in ("act", "grad")
    }
    assert named == {
        *((rank, name) for rank in (0, 1) for name in ("step", f"stage {rank}")),
        *(beside if background == "1" else ()),
    }
    check_nested(spans)
    check_messages(document, 1)
    check_passes(spans, 2)
    # One machine has one clock: what the exchange of timestamps found is wrong by no more than it
    # says, or messages would arrive before they leave; and it is no guess of a whole step.
    step = min(span["dur"] for span in spans if span["args"]["kind"] == "step")
    assert 0 < document["otherData"]["clock_error_us"][1] < step


#: An hour.
LATE_NS = 3_600_000_000_000


def offset_of_a_late_clock() -> list[int]:
    """The offset that a rank finds whose clock is an hour ahead of the first one's."""
    right = time.perf_counter_ns
    if dist.get_rank():
        time.perf_counter_ns = lambda: right() + LATE_NS
    try:
        group = dist.new_group([0, 1], backend="gloo")
        return list(offset_to_first(group, 60.0, nullcontext))
    finally:
        time.perf_counter_ns = right


def test_a_clock_that_goes_otherwise_is_aligned(ranks: Any) -> None:
    first, (offset, error) = ranks(offset_of_a_late_clock, 2)
    assert first == [0, 0]
    assert abs(offset + LATE_NS) <= error


@pytest.mark.gpu
def test_an_accelerator_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    devices = ["cuda:0"] * (len(MLP_SPLIT) + 1)
    traced, plain = train(path, devices=devices), train(None, devices=devices)
    assert same(traced, plain)
    check_nested(spans_of(path))
    check_messages(json.loads(path.read_text()), len(MLP_SPLIT))
    check_passes(spans_of(path), len(MLP_SPLIT) + 1)
    assert json.loads(path.read_text())["otherData"]["waits_for_accelerators"]


def test_off_there_is_no_trace() -> None:
    """Nothing is noted where nobody looks, and none is made."""
    made: list[int] = []
    original = Trace.__init__

    def counted(self: Trace, *args: Any) -> None:
        made.append(1)
        original(self, *args)

    Trace.__init__ = counted  # type: ignore[method-assign]
    try:
        train(None)
    finally:
        Trace.__init__ = original  # type: ignore[method-assign]
    assert not made


def test_fewer_steps_than_wanted_are_written_at_the_end(tmp_path: Path) -> None:
    pipe = mpcomp.pipeline(mlp(), chunks=2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    with pipe.trace(tmp_path / "trace.json", steps=10):
        pipe.forward_backward(*rows(4, 0))
        assert not (tmp_path / "trace.json").exists()
    assert {span["args"]["step"] for span in spans_of(tmp_path / "trace.json")} == {0}


def test_a_step_that_fails_is_in_no_trace(tmp_path: Path) -> None:
    pipe = mpcomp.pipeline(mlp(), chunks=2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    x, y = rows(4, 0)
    with pipe.trace(tmp_path / "trace.json", steps=10):
        with pytest.raises(FloatingPointError):
            pipe.forward_backward(x * torch.inf, y)
        pipe.forward_backward(x, y)
    spans = spans_of(tmp_path / "trace.json")
    assert len([span for span in spans if span["args"]["kind"] == "step"]) == 1
    check_nested(spans)


def test_mistakes(tmp_path: Path) -> None:
    pipe = mpcomp.pipeline(mlp(), chunks=2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    with pytest.raises(ValueError, match="steps=0: pass at least 1"), pipe.trace("t", steps=0):
        pass
    with pytest.raises(ValueError, match="there is no folder"), pipe.trace(tmp_path / "a" / "t"):
        pass
    with (
        pipe.trace(tmp_path / "t"),
        pytest.raises(ValueError, match="within another"),
        pipe.trace(tmp_path / "u"),
    ):
        pass
