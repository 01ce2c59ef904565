"""`mpcomp plan`: what a user types, and what comes out."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch

import stages
from mpcomp.command import main

#: What coding takes is asserted nowhere here.
pytestmark = pytest.mark.usefixtures("_no_walk_through_memory")

TINY = ["gpt2", "--config", "num_hidden_layers=4", "n_embd=32", "n_head=2", "vocab_size=64"]
SMALL = [*TINY, "--seq-len", "16", "--batch", "4", "--precision", "fp32"]


def run(*arguments: str) -> None:
    main(["plan", *arguments])


def test_a_table_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    run(*SMALL, "--stages", "4", "--mbps", "0.1", "--latency-ms", "5")
    out = capsys.readouterr().out
    assert "4 stages, 0.1 Mbit/s, 5 ms" in out
    assert "measured here" in out and "% above them" in out
    # At this rate nothing but bytes matters: the fewest of what keeps quality.
    assert "start with act_comp='auto:scratch', grad_comp='auto:scratch': " in out
    assert "ties='together', as by default" in out
    assert "split=[1,1,1,1]" in out
    assert "* auto:scratch" in out


@pytest.mark.parametrize(
    "option, method",
    [(["--ties", "apart"], "ef+quant:4:scale=128"), (["--tie-comp", "quant:8"], "quant:8")],
)
def test_a_weight_may_be_exchanged(
    option: list[str], method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*SMALL, "--stages", "4", "--mbps", "0.1", "--tflops", "1", *option)
    out = capsys.readouterr().out
    chosen = f"act_comp='auto:scratch', grad_comp='auto:scratch', tie_comp='{method}'"
    assert f"start with {chosen}" in out
    assert "ties='apart': two machines have copies" in out


def test_a_recommended_split_cuts_a_chain_with_a_tied_weight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed is what a pipeline takes: one stage more than machines."""
    (tmp_path / "tied_models.py").write_text(
        "import torch\n"
        "def make(rows):\n"
        "    embedding, head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64, bias=False)\n"
        "    head.weight = embedding.weight\n"
        "    blocks = [torch.nn.Linear(8, 8) for _ in range(5)]\n"
        "    model = torch.nn.Sequential(embedding, *blocks, torch.nn.LayerNorm(8), head)\n"
        "    return model, torch.zeros(rows, 3, dtype=torch.long)\n"
    )
    name = f"{tmp_path / 'tied_models.py'}:make"
    for given in ([], ["--split", "1,3,4"], ["--split", "5,2,1"]):
        options = ["--stages", "3", "--tflops", "1", "--task", "scratch", "--method", "bf16"]
        run(name, *options, *given, "--json")
        found = json.loads(capsys.readouterr().out)["recommended"]
        cut = stages.split(models_at(tmp_path), found["split"], together=True)
        together = given != ["--split", "5,2,1"]  # where the head is a stage of its own
        assert found["ties"] == ("together" if together else "apart")
        assert len(cut) == 3 + together
    with pytest.raises(SystemExit, match="--ties together, but no block is left"):
        run(name, "--stages", "3", "--split", "5,2,1", "--ties", "together")
    with pytest.raises(SystemExit, match="--ties together, but no weight of the first stage"):
        run("resnet18", "--stages", "2", "--batch", "2", "--ties", "together")


def models_at(folder: Path) -> torch.nn.Module:
    model, _ = runpy.run_path(str(folder / "tied_models.py"))["make"](1)
    assert isinstance(model, torch.nn.Module)
    return model


def test_figures_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    run(*SMALL, "--stages", "2", "--tflops", "0.001", "--method", "quant:4", "quant:8", "--json")
    found = json.loads(capsys.readouterr().out)
    pairs = [(step["act"], step["grad"]) for step in found["steps"]]
    assert pairs == [("none", "none"), ("bf16", "bf16"), ("quant:4", "quant:8")]
    assert "counted" in found["about"]
    assert set(found["timing"]) == {"slowdown", "spread", "busy"}
    assert found["steps"][2]["wire_bytes"] < 0.25 * found["steps"][0]["wire_bytes"]


def test_connections_have_windows_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for number in ("1", "4"):
        more = ["--batch", "256", "--tflops", "1", "--latency-ms", "50", "--connections", number]
        run(*SMALL, *more, "--stages", "2", "--method", "bf16", "--json")
        found.append(json.loads(capsys.readouterr().out))
    one, four = found
    assert "50 ms, 4 connections" in four["about"] and "connections" not in one["about"]
    assert one["recommended"]["connections"] == 4
    said = one["recommended"]["says"]
    assert any(each.startswith("with connections=4 it takes ") for each in said)
    assert four["recommended"]["connections"] is None  # as it is
    assert four["steps"][0]["step_s"] < one["steps"][0]["step_s"] - 0.15  # a round trip each way


def test_replicas_have_a_table_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["none", "powersgd:2"]
    run(*SMALL, "--stages", "2", "--replicas", "16", "--tflops", "1", "--dp-comp", *methods)
    out = capsys.readouterr().out
    assert "16 replicas" in out and "between replicas" in out
    assert [name in out for name in methods] == [True, True]


def test_links_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--stages",
        "4",
        "--tflops",
        "1",
        "--mbps",
        "10",
        "1",
        "10",
        "--latency-ms",
        "0",
        "50",
        "0",
    ]
    run(*SMALL, *options)
    assert "10, 1, 10 Mbit/s, 0, 50, 0 ms" in capsys.readouterr().out


def test_images_and_the_cut_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    run("resnet18", "--stages", "4", "--split", "paper", "--batch", "2", "--tflops", "1")
    out = capsys.readouterr().out
    assert "points of accuracy" in out and "split=[5,2,2,5]" in out


def test_a_function_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.py"
    path.write_text(
        "import torch\n"
        "def make(rows):\n"
        "    layers = [torch.nn.Linear(8, 8) for _ in range(4)]\n"
        "    return torch.nn.Sequential(*layers), torch.randn(rows, 8)\n"
        "def other(rows):\n"
        "    return None\n"
    )
    run(f"{path}:make", "--stages", "2", "--batch", "4", "--task", "images")
    assert "points of accuracy" in capsys.readouterr().out
    assert sys.modules["models"] is models, "the file took the place of a module of its name"
    for name, message in ((f"{path}:absent", "no function absent"), (f"{path}:other", "NoneType")):
        with pytest.raises(SystemExit, match=message):
            run(name, "--stages", "2")
    with pytest.raises(SystemExit, match="there is no file"):
        run(f"{tmp_path}/absent.py:make", "--stages", "2")


def test_many_stages_and_replicas_of_a_model_that_fits_nowhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    large = ["--config", "num_hidden_layers=64", "hidden_size=8192", "intermediate_size=28672"]
    run(
        *("llama", *large, "--stages", "64", "--replicas", "8", "--seq-len", "8", "--chunks", "2"),
        *("--tflops", "100", "--method", "bf16", "--dp-comp", "none"),
    )
    assert "64 stages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gtp2", "--stages", "2"], "no model 'gtp2'"),
        ([*SMALL], "pass --stages, or --measure"),
        ([*SMALL, "--stages", "1"], "pass 2 or more"),
        ([*SMALL, "--stages", "5"], "more stages"),
        ([*SMALL, "--stages", "3", "--mbps", "1", "2", "3"], "3 values for 2 links"),
        ([*SMALL, "--stages", "2", "--mbps", "0"], "rates are"),
        ([*SMALL, "--stages", "2", "--connections", "0"], "connections=0"),
        ([*SMALL, "--stages", "2", "--mbps", "nan"], "rates are"),
        ([*SMALL, "--stages", "2", "--latency-ms", "-1"], "latencies are"),
        ([*SMALL, "--stages", "2", "--chunks", "5"], "--chunks 5 of --batch 4"),
        ([*SMALL, "--stages", "2", "--batch", "0"], "--batch 0"),
        ([*SMALL, "--stages", "2", "--tflops", "0"], "flops_per_s"),
        ([*SMALL, "--stages", "2", "--method", "topq:1"], "topq"),
        ([*SMALL, "--stages", "2", "--method", "a", "b", "c"], "pass two at most"),
        ([*SMALL, "--stages", "2", "--split", "2,x"], "block counts"),
        ([*SMALL, "--stages", "2", "--split", "1,1"], "add up to 2"),
        ([*SMALL, "--stages", "2", "--seq-len", "4096"], "1024 positions"),
        (["gpt2", "--config", "layers=2", "--stages", "2"], "no such entry"),
        (["gpt2", "--config", "layers", "--stages", "2"], "NAME=VALUE"),
        (["resnet18", "--config", "a=1", "--stages", "2"], "has none"),
        ([*SMALL, "--measure", "--stages", "2"], "finds stages"),
        (["absent.module:make", "--stages", "2"], "absent"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as error:
        run(*arguments)
    assert str(error.value).startswith("error: ")
    assert message in str(error.value) and "\n" not in str(error.value)


def plan_by_measuring() -> list[str]:
    import contextlib
    import io

    from mpcomp.plan import coding

    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(coding, "_CACHE_BYTES", 1 << 20)  # as `_no_walk_through_memory`, in a rank
        run(*SMALL, "--measure", "--method", "quant:4")
    return out.getvalue().splitlines()


def test_a_running_group_is_measured(ranks: Callable[..., list[object]]) -> None:
    first, second = ranks(plan_by_measuring, 2)
    assert isinstance(first, list) and "2 stages" in first[0] and "Mbit/s" in first[0]
    assert second == []
