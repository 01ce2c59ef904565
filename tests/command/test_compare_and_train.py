"""`mpcomp compare` and `mpcomp train`: what a user types, and what comes out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mpcomp.command import main

ROOT = Path(__file__).parents[2]
MAKE = """
import torch
import torch.nn.functional as F
from torch import nn
import mpcomp

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    pipe = mpcomp.pipeline(model, 2, split=2, loss_fn=F.cross_entropy)
    return pipe, [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]

def nothing():
    return None
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(MAKE)
    return str(path)


def test_compare_gives_figures(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "compare",
            f"{script}:make",
            "--method",
            "quant:4",
            "quant:8",
            "--seconds",
            "1e3",
            "--json",
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert [trial["pair"] for trial in found["trials"]] == [
        ["none", "none"],
        ["bf16", "bf16"],
        ["quant:4", "quant:8"],
    ]
    assert found["batches"] == 3 and found["trials"][2]["below_bf16"] > 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nothing"], "gave a NoneType: expected .pipeline, data."),
        (["make", "--mbps", "0"], "expected a rate above 0"),
        (["make", "--method", "a", "b", "c"], "pass two at most"),
        (["none"], "has no function none"),
    ],
)
def test_mistakes_end_with_a_line(script: str, arguments: list[str], message: str) -> None:
    function, *options = arguments
    with pytest.raises(SystemExit, match=message):
        main(["compare", f"{script}:{function}", *options])


def test_train_runs_a_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["mpcomp"])
    with pytest.raises(SystemExit) as end:
        main(["train", "cifar10", "--help"])
    assert end.value.code == 0
    assert "ResNet or VGG" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no recipe 'cifar'; did you mean 'cifar10'"):
        main(["train", "cifar"])
