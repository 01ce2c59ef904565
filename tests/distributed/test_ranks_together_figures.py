"""Figures of a pipeline whose first rank has the last stage as well: report, trial, trace, memory.

What ranks find is checked in them where only they can; the first failed assert ends the test.
"""

import itertools
import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import preload

import mpcomp
from mpcomp.view.report import _timeline

preload("test_ranks_together_figures")

CHUNKS, ROWS, TOKENS, WIDTH, WORDS = 4, 8, 5, 16, 32
BYTES_OF_CUT = CHUNKS * (ROWS // CHUNKS) * TOKENS * WIDTH * 4


def tied() -> torch.nn.Sequential:
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = embedding.weight
    blocks = [torch.nn.Linear(WIDTH, WIDTH) for _ in "abc"]
    return torch.nn.Sequential(embedding, *blocks, torch.nn.LayerNorm(WIDTH), head)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(WORDS, (2, ROWS, TOKENS), generator=generator) for _ in range(3)]
    return [(x, y) for x, y in drawn]


def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def pipe_of(num_ranks: int) -> mpcomp.Pipeline:
    split = [2, 4] if num_ranks == 2 else [1, 2, 3]
    warnings.filterwarnings("ignore", message=".*would not shrink")
    return mpcomp.pipeline(
        tied(), CHUNKS, split=split, act_comp="bf16", grad_comp="ef+topk:0.5", loss_fn=loss
    )


def figures(path: str, num_ranks: int) -> dict[str, object]:
    """What a run of some steps says of itself."""
    pipe = pipe_of(num_ranks)
    assert len(pipe.boundaries) == num_ranks and not pipe.ties
    with pipe.trace(path, steps=2, skip=1):
        for x, y in batches():
            pipe.forward_backward(x, y)
    report = pipe.report(show=False)
    found = pipe.compare(
        ["quant:4"], data=batches(), batches=2, mbps=10.0, latency_ms=5.0, show=False
    )
    steps = {trial.pair: trial.step_s for trial in found.trials}
    return {
        "payoff": report["payoff"],
        "steps": [steps["none", "none"], steps["bf16", "bf16"], steps["quant:4", "quant:4"]],
        "bytes": [trial.wire_bytes for trial in found.trials],
        "state": pipe.state_bytes(batches()[0][0]),
    }


def check_figures(found: dict[str, object], num_cuts: int) -> None:
    payoff = found["payoff"]
    assert 0 < payoff["busy_s"] <= payoff["step_s"]
    assert payoff["dense_bytes"] == BYTES_OF_CUT
    for step_s in found["steps"]:  # beside all else a way round and back, and two agreements
        assert step_s > 2 * 0.005 * (num_cuts + 1)
    dense, *others = found["bytes"]
    assert 2 * num_cuts * BYTES_OF_CUT < dense < 1.5 * 2 * num_cuts * BYTES_OF_CUT
    assert all(own < dense for own in others)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_ranks_with_a_ring_say(tmp_path: Path, ranks, num_ranks):
    path = tmp_path / "trace.json"
    outcomes = ranks(figures, num_ranks, str(path), num_ranks)
    state = 0
    for found in outcomes:
        check_figures(found, num_ranks)
        payoff = found["payoff"]
        assert payoff["bandwidth_mbps"] > 0 < payoff["bf16_step_s"]
        assert not payoff["in_one_process"]
        assert payoff["says"] == outcomes[0]["payoff"]["says"]
        state += found["state"]["total"]
    # Residuals of gradients at their senders: a row each of every cut.
    assert state == num_ranks * BYTES_OF_CUT
    check_trace(json.loads(path.read_text()), num_ranks)


def check_trace(trace: dict[str, object], num_ranks: int) -> None:
    """Each stage has a lane; the first rank has two; every message has both of its ends."""
    drawn = _timeline(trace, num_ranks)
    assert drawn is not None
    lanes = {(rank, stage) for rank, stage, *_ in drawn["spans"] if stage is not None}
    assert lanes == {*((rank, rank) for rank in range(num_ranks)), (0, num_ranks)}
    sent, got = (
        sorted((link, i) for _, _, kind, i, *_, link, _ in drawn["spans"] if kind == wanted)
        for wanted in ("send", "receive")
    )
    assert sent == got and len(sent) == 2 * num_ranks * CHUNKS
    compute = ("forward", "loss", "backward")
    own = [s for s in drawn["spans"] if s[0] == 0 and s[2] in compute]
    for one, other in itertools.pairwise(sorted(own, key=lambda span: span[4])):
        assert one[5] <= other[4] + 1e-6 or one[2] == "forward"  # of which the loss is a part
    losses = [span for span in own if span[1] == num_ranks and span[2] == "backward"]
    assert [span[3] for span in losses] == list(range(CHUNKS))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_one_process_says_of_as_many_machines(tmp_path: Path, num_ranks):
    path = tmp_path / "trace.json"
    found = figures(str(path), num_ranks)
    check_figures(found, num_ranks)
    assert found["payoff"]["in_one_process"]
    # Of the sender's residual; the receiver keeps nothing.
    assert found["state"]["total"] == num_ranks * BYTES_OF_CUT
    drawn = _timeline(json.loads(path.read_text()), 1)
    assert drawn is not None
    assert {span[1] for span in drawn["spans"] if span[1] is not None} == {*range(num_ranks + 1)}
