"""Each command for programs: one JSON object with the keys of the page, and the status."""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

from mpcomp.command import main, methods
from mpcomp.command.output import print_json
from recipes.ranks import Stopped, joined

pytestmark = pytest.mark.usefixtures("_no_walk_through_memory")

PAGE = (ROOT / "docs" / "guide" / "command_line.md").read_text()
OWN = """
import torch
import torch.nn.functional as F
from torch import nn
import mpcomp

def model():
    print("words of the user's own")
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))

def make():
    pipe = mpcomp.pipeline(model(), 2, split=2, loss_fn=F.cross_entropy)
    return pipe, [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(2)]

def plan(rows):
    return model(), torch.randn(rows, 6)
"""


def keys_of(command: str) -> set[str]:
    """The keys that the page gives an object of this command."""
    table = PAGE.partition("| keys of its object |")[2]
    row = re.findall(rf"^\| `mpcomp {command}` \| (.*) \|$", table, re.MULTILINE)[0]
    keys = set(re.findall(r"`(\w+)`", row))
    if row.startswith("the keys of a run"):
        keys |= keys_of_a_run()
    return keys


def keys_of_a_run() -> set[str]:
    (words,) = re.findall(r"^\| a run \| (.*) \|$", PAGE, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", words))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """The object on standard output, where nothing else is, and standard error."""
    capsys.readouterr()
    main([*arguments])
    out, err = capsys.readouterr()

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    found = json.loads(out, parse_constant=refused)
    assert type(found) is dict
    return found, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run."""
    out = tmp_path_factory.mktemp("runs") / "mine"
    options = "--data digits --train-limit 32 --test-limit 16 --batch-size 16 --epochs 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["mpcomp"])
        with (out.parent / "said.json").open("w") as file:
            patch.setattr(sys, "stdout", file)
            main(["train", "--json", "cifar10", *options.split(), "--out", str(out)])
    return out


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_train(folder: Path) -> None:
    found = json.loads((folder.parent / "said.json").read_text())
    assert found.keys() == keys_of("train")
    assert found["finished"] and found["steps"] == 2 and found["metric"] == "accuracy"
    assert found["summary"] == json.loads((folder / "summary.json").read_text())
    assert found["metric_on"] == found["summary"]["accuracy_compressed"]


def test_report_and_top(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = str(folder / "page.html")
    found, err = said(capsys, "report", str(folder), str(folder), "--html", page, "--json")
    assert found.keys() == keys_of("report") and found["page"] == page
    assert all(run.keys() == keys_of_a_run() for run in found["runs"]) and len(found["runs"]) == 2
    assert "below bf16" in err and page in err  # the table
    now, err = said(capsys, "top", str(folder), "--json")
    assert now.keys() == keys_of("top") and "step 2 of 2" in err
    assert now["seconds_since_step"] >= 0 and now["wire_bytes"] == found["runs"][0]["wire_bytes"]
    assert len(now["links"]) == len(now["link_names"]) > 0


def test_what_a_users_function_prints_is_no_part_of_it(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--method", "quant:4", "--seconds", "1e3", "--json"]
    found, err = said(capsys, "compare", f"{own}:make", *given)
    assert found.keys() == keys_of("compare") and "words of the user's own" in err
    given = ["--stages", "2", "--mbps", "inf", "--tflops", "1", "--method", "quant:4", "--json"]
    found, err = said(capsys, "plan", f"{own}:plan", *given)
    assert found.keys() == keys_of("plan") and "words of the user's own" in err


def test_methods_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--shape", "4,16", "--repeats", "1", "--only", "quant:4"]
    found, _ = said(capsys, "methods", *small, "--json")
    assert found.keys() == keys_of("methods")
    found, err = said(capsys, "doctor", "--json")
    assert found.keys() == keys_of("doctor") and found["problems"] == [] == found["links"]
    assert found["ranks"][0]["versions"]["mpcomp"] in err and "no problem found" in err


def test_doctor_at_a_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = f"127.0.0.1:{server.getsockname()[1]}"
        found, _ = said(capsys, "doctor", "--connect", at, "--json")
    assert found.keys() == keys_of("doctor --connect")
    assert found["endpoint"] == at and found["mpcomp"] is None and found["seconds"] > 0

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free behind this

    def come() -> None:
        for _ in range(1000):
            try:
                socket.create_connection(("127.0.0.1", port), 10).close()
                return
            except ConnectionRefusedError:
                threading.Event().wait(0.02)

    caller = threading.Thread(target=come)
    caller.start()
    found, _ = said(capsys, "doctor", "--listen", str(port), "--json")
    caller.join()
    assert found.keys() == keys_of("doctor --listen")
    assert found == {"port": port, "from": "127.0.0.1"}


def test_numbers_that_are_not_finite_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(json=True, out=sys.stdout)
    print_json(options, {"a": [math.nan, (1.5, -math.inf)], "b": {"c": math.inf}, "d": True})
    assert capsys.readouterr().out.split() == json.dumps(
        {"a": [None, [1.5, None]], "b": {"c": None}, "d": True}, indent=1
    ).split()  # fmt: skip


# -- how a command ends ---------------------------------------------------------------------------


def end_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    out, err = capsys.readouterr()
    assert out == ""
    # The interpreter prints what is no number, and ends with 1.
    return (end.value.code, err) if type(end.value.code) is int else (1, f"{end.value.code}\n")


MISTAKES = {
    "report": ["nowhere"],
    "top": ["nowhere"],
    "methods": ["--only", "whisper"],
    "compare": ["nowhere.py:make"],
    "plan": ["gpt2", "--stages", "1"],
    "doctor": ["--timeout", "0"],
    "train": ["whisper"],
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_a_line_and_1(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = end_of(capsys, command, "--json", *MISTAKES[command])
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["whisper"], *([name, "--whisper"] for name in MISTAKES)]
)
def test_a_line_that_cannot_be_read_is_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = end_of(capsys, *arguments)
    assert code == 2 and err.startswith("usage: mpcomp")


def test_a_problem_is_1_and_in_the_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--json"])
    assert end.value.code == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "eth77" in problem


def test_an_interruption_is_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(methods, "_figures", interrupted)
    code, err = end_of(capsys, "methods", "--json")
    assert code == 130 and err.endswith("interrupted\n")


def test_a_run_that_was_stopped_is_143(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, joined():
        raise Stopped(signal.SIGTERM, 1, 3)
    assert end.value.code == 143 and "go on with --resume" in capsys.readouterr().out


def test_the_page_names_each_status_that_is_used() -> None:
    (table,) = re.findall(r"^\| status \| means \|\n(.*?)^$", PAGE, re.MULTILINE | re.DOTALL)
    assert [int(n) for n in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == [0, 1, 2, 130, 143]


def test_json_without_a_folder_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = end_of(capsys, "train", "--json", "cifar10", "--data", "digits")
    assert code == 1 and "pass the recipe --out FOLDER" in err
