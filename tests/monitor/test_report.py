"""report(): figures per boundary and direction, as a dict that JSON can hold and as a table."""

import json

import pytest
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows

import mpcomp
from mpcomp.core.wire import HEADER_BYTES


@pytest.fixture
def pipe():
    return mpcomp.pipeline(
        mlp(), 2, split=MLP_SPLIT, act_comp="topk:0.2", grad_comp=[None, "quant:4"],
        loss_fn=F.cross_entropy,
    )  # fmt: skip


def test_figures_are_those_of_the_messages(pipe):
    x, y = rows(6)
    for _ in range(3):
        pipe.forward_backward(x, y)
    pipe.evaluate([(x, y)])
    report = pipe.report(show=False)
    entries = report["boundaries"]
    assert [(e["boundary"], e["after"], e["direction"], e["method"]) for e in entries] == [
        (0, "tanh", "act", "topk:0.2"),
        (0, "tanh", "grad", "none"),
        (1, "relu", "act", "topk:0.2"),
        (1, "relu", "grad", "quant:4"),
    ]
    assert report["steps"] == 3
    assert report["wire_bytes"] == sum(e["train"]["wire_bytes"] for e in entries)
    assert report["dense_bytes"] == 3 * 6 * 2 * (19 + 17) * 4
    assert report["wire_ratio"] == report["wire_bytes"] / report["dense_bytes"] < 1
    assert report["num_elements"] == report["dense_bytes"] / 4
    assert report["below_bf16"] == pytest.approx(0.5 / report["wire_ratio"])
    dense = entries[1]["train"]
    assert dense["messages"] == 6 and dense["wire_bytes"] == 3 * 6 * 19 * 4 + 6 * HEADER_BYTES
    assert dense["relative_error"] == 0 and dense["cosine"] == 1
    assert dense["below_bf16"] == pytest.approx(0.5, rel=0.1)  # fp32, and a header
    selected = entries[0]["train"]
    assert selected["ratio"] < 0.6 and 0.1 < selected["relative_error"] < 1
    # A selection is orthogonal to what it leaves: cos² = 1 − error².
    assert selected["cosine"] ** 2 == pytest.approx(1 - selected["relative_error"] ** 2, rel=1e-3)
    assert entries[0]["eval"]["messages"] == 2 and entries[1]["eval"]["messages"] == 0
    assert all(e["train"]["nonfinite"] == 0 and e["train"]["seconds"] >= 0 for e in entries)


def test_the_report_is_plain_data_and_prints(pipe, capsys):
    pipe.report()
    assert "training sent" not in capsys.readouterr().out  # nothing yet, and no division by zero
    pipe.forward_backward(*rows(6))
    report = pipe.report()
    table = capsys.readouterr().out
    assert json.loads(json.dumps(report)).keys() == report.keys()
    for word in ("topk:0.2", "quant:4", "activation ->", "gradient <-", "tanh", "below bf16"):
        assert word in table
    assert f"training sent {report['wire_bytes'] / 1e6:.2f} MB in 1 steps" in table
    assert f"{report['below_bf16']:.1f} times below bf16" in table
    pipe.report(show=False)
    assert not capsys.readouterr().out


def test_links_that_adapt_have_a_table_of_their_own(capsys):
    pipe = mpcomp.pipeline(
        mlp(), 2, split=MLP_SPLIT, act_comp="adaptive:cf=2-8:budget=0.4:window=2+topk:0.1",
        grad_comp="topk:0.5", loss_fn=F.cross_entropy,
    )  # fmt: skip
    for step in range(3):
        pipe.forward_backward(*rows(6, step))
    chosen = [b["adaptive"] for b in pipe.report()["boundaries"] if b["adaptive"]]
    assert len(chosen) == 2
    lines = capsys.readouterr().out.split("factor now")[1].splitlines()[2:4]
    for line, one in zip(lines, chosen, strict=True):
        gain = dict(one["gains"])[one["cf"]]
        assert line.split()[-3:] == [f"{one['cf']:.4g}", f"{gain:.4f}", str(one["changes"])]


def test_evaluation_with_compression_off_is_counted_apart(pipe, capsys):
    batch = rows(6)
    pipe.evaluate([batch])
    with pipe.uncompressed():
        pipe.evaluate([batch])
    entry = pipe.report()["boundaries"][0]
    assert entry["eval"]["ratio"] < 0.6 and entry["eval_off"]["ratio"] > 1
    assert entry["eval"]["messages"] == entry["eval_off"]["messages"] == 2
    assert "eval, off" in capsys.readouterr().out


def test_one_process_says_on_which_links_it_would_pay(capsys):
    """No link is slow there; with a machine for each stage some would be."""
    pipe = mpcomp.pipeline(
        mlp(), 2, split=MLP_SPLIT, act_comp="topk:0.05", grad_comp="topk:0.05",
        loss_fn=F.cross_entropy,
    )  # fmt: skip
    x, y = rows(4000)
    for _ in range(3):
        pipe.forward_backward(x, y)
    payoff = pipe.report()["payoff"]
    assert payoff["in_one_process"] and payoff["bandwidth_mbps"] is None
    step, machines = payoff["says"]
    assert step in (out := capsys.readouterr().out) and machines in out
    assert "with each stage on a machine like this one" in machines
    assert payoff["break_even_mbps"] > 0 and "on links below" in machines
    assert 0 < payoff["busy_s"] < payoff["step_s"] > payoff["coding_s"] > 0
    assert payoff["wire_bytes"] < payoff["dense_bytes"] == 4000 * 19 * 4
