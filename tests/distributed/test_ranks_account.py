"""The account of a step on several ranks: what it says is what was handed to the transport."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from lm_runs import lm_run, make_lm, text
from ranks import preload
from runs import Run, data_of, make

from mpcomp.comm.all_gather import TAG

preload("test_ranks_account")
pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

STEPS = 3


@contextmanager
def counted():
    """Bytes that this rank hands to `isend` in agreements, in a list of one number."""
    sent, before = [0], dist.isend

    def isend(tensor, *args, tag=0, **kwargs):
        sent[0] += tensor.nbytes * (tag == TAG)
        return before(tensor, *args, tag=tag, **kwargs)

    dist.isend = isend
    try:
        yield sent
    finally:
        dist.isend = before


CASES = {
    "two stages": Run(stages=2, pipeline={"checks": "none"}),
    "compressed": Run(stages=2, act="topk:0.2", grad="quant:4", pipeline={"checks": "none"}),
    "replicas by DDP": Run(stages=1, pipeline={"split": 1, "replicas": 2, "checks": "none"}),
    "replicas compressed": Run(
        stages=1, pipeline={"split": 1, "replicas": 2, "dp_comp": "ef+topk:0.1", "checks": "none"}
    ),
    "replicas now and then": Run(
        stages=1, pipeline={"split": 1, "replicas": 2, "dp_comp": "diloco:2", "checks": "none"}
    ),
    "replicas that share": Run(
        stages=1, pipeline={"split": 1, "replicas": 2, "shard": True, "checks": "none"}
    ),
}


def account_of(case):
    """The report's account of a step, the bytes of all links, of agreements, and parameters."""
    run = CASES[case]
    pipe, _ = make(run, alone=False)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
    if pipe.exchange is not None:
        pipe.follow(optimizer)
    with counted() as sent:
        for step in range(STEPS):
            x, y, _ = data_of(run, step)
            pipe.forward_backward(x, y)
            optimizer.step()
            optimizer.zero_grad()
    numel = sum(p.numel() for p in pipe.parameters())
    exchange = None if pipe.exchange is None else pipe.exchange.report()["wire_bytes"]
    return pipe.report(show=False), pipe.wire_bytes, sent[0], numel, exchange


def all_accounts():
    return {case: account_of(case) for case in CASES}


def test_all_of_a_step_is_what_was_sent(ranks):
    found = ranks(all_accounts, 2)
    for case in CASES:
        report, links, *_ = found[0][case]
        assert report["step"] == found[1][case][0]["step"], case
        parts = report["step"]["parts"]
        agreed = sum(rank[case][2] for rank in found)
        assert parts["cuts"]["wire_bytes"] * STEPS == pytest.approx(links), case
        assert parts["ties"]["wire_bytes"] == 0
        extra = agreed - parts["agreements"]["wire_bytes"] * STEPS
        if "replicas" in case:  # whose exchange agrees on more, and counts it nowhere
            assert extra >= 0, case
        else:
            assert extra == 0, case
        numel, exchanges = found[0][case][3], [rank[case][4] for rank in found]
        between = parts["replicas"]
        if case == "replicas by DDP":
            assert between["wire_bytes"] == 2 * 4 * numel and between["below_bf16"] == 0.5
        elif case == "replicas that share":  # gradients, and parameters
            assert between["wire_bytes"] > sum(exchanges) / STEPS
        elif "replicas" in case:
            assert between["wire_bytes"] == pytest.approx(sum(exchanges) / STEPS)
        else:
            assert between["wire_bytes"] == 0
        assert report["wire_bytes"] == pytest.approx(STEPS * report["step"]["wire_bytes"])


def tied(alone=False):
    """The account of a tied model's step, by the method for its ties."""
    found = {}
    for name, methods in {
        "plain": {"act": "topk:0.1", "grad": "topk:0.1"},
        "auto": {"act": "auto", "grad": "auto"},
        "said": {"act": "auto", "grad": "auto", "pipeline": {"tie_comp": "none"}},
    }.items():
        pipe = make_lm(lm_run("gpt2", 2, **methods), alone=alone, ties="apart")
        pipe.forward_backward(*text(8, 0))
        report = pipe.report(show=False)
        found[name] = report["step"], [b["method"] for b in report["boundaries"][-2:]]
    return found


@pytest.mark.slow
def test_a_tie_that_is_larger_than_its_cuts_is_said_so(ranks):
    pytest.importorskip("transformers")
    first, second = ranks(tied, 2)
    assert first == second
    here = tied(alone=True)
    for name, (step, methods) in first.items():
        for part in ("cuts", "ties"):
            assert step["parts"][part] == here[name][0]["parts"][part], name
        assert methods == here[name][1]
    plain, auto, said = (first[name] for name in ("plain", "auto", "said"))
    assert plain[0]["largest"] == said[0]["largest"] == "ties"
    assert "tie_comp=" in plain[0]["says"][1]
    assert plain[1] == said[1] == ["none"] * 2
    assert auto[1] == ["ef+quant:4:scale=128"] * 2
    assert auto[0]["parts"]["ties"]["wire_bytes"] < said[0]["parts"]["ties"]["wire_bytes"] / 4
