"""Recipes over simulated links: refused where there are none, and shown where there are."""

import json
import re
from types import SimpleNamespace

import pytest
from endings import check_success, end_of

from recipes import cifar10, wikitext
from recipes.cifar10 import ImageTrainer, load_data
from recipes.image_config import ImageConfig
from recipes.run_folder import RunFolder
from recipes.summary import seconds_a_step, speeds

TINY = [
    *("--data", "digits", "--width", "4", "--epochs", "2", "--batch-size", "16", "--chunks", "2"),
    *("--train-limit", "40", "--test-limit", "20", "--precision", "fp32", "--device", "cpu"),
]


def recipe(*commands):
    """In each process: runs the recipe with each of the commands, one after another."""
    return [end_of(cifar10.main, command) for command in commands]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mbps", "0"], "mbps is 0.0; pass a number above 0"),
        (["--mbps", "-3"], "mbps is -3.0; pass a number above 0"),
        (["--mbps", "nan"], "mbps is nan; pass a number above 0"),
        (
            ["--mbps", "5"],
            "mbps is 5, and one process sends nothing over links; start one for each",
        ),
        (["--mbps", "5", "--replicas", "2"], "mbps is 5, replicas is 2; links are simulated betw"),
        (["--compare", "topk:0.1"], "--compare topk:0.1 compares a run with itself"),
        (["--compare", "tokp:0.1"], "tokp"),
    ],
)
def test_mistakes(tmp_path, options, said):
    with pytest.raises(SystemExit, match=re.escape(said)):
        cifar10.main([*TINY, *options, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_text_has_the_option_too(tmp_path):
    command = ["--model", "tiny", "--data", "python-docs", "--mbps", "0"]
    with pytest.raises(SystemExit, match=r"mbps is 0\.0; pass a number above 0"):
        wikitext.main([*command, "--out", str(tmp_path / "run")])


@pytest.mark.parametrize("spec", ["none", "bf16", "quant:8"])
def test_what_a_run_is_compared_to_differs_in_its_cuts_alone(spec):
    config = ImageConfig.for_data(data="digits", act=("topk:0.1",), grad=("topk:0.2",), mbps=5.0)
    other = config.compared_to(spec)
    assert (other.act, other.grad) == ((spec,), (spec,)) and other.mbps == 5.0
    back = {**other.to_json(), "act": config.act, "grad": config.grad}
    assert ImageConfig.from_json(back) == config


@pytest.mark.parametrize(
    ("ends", "updates", "seconds"),
    [
        ([9.0, 9.5, 10.0, 10.5], 1, 0.5),  # the first takes longer
        ([1.0, 1.5, 9.0, 9.5, 10.0], 1, 0.5),  # so does one with an evaluation
        ([1.0, 3.0], 4, 0.5),
    ],
)
def test_seconds_a_step(tmp_path, ends, updates, seconds):
    folder = RunFolder(tmp_path)
    folder.steps.write_text("".join(json.dumps({"time": end}) + "\n" for end in ends))
    assert seconds_a_step(folder, updates) == seconds


def test_one_step_says_no_speed(tmp_path):
    (tmp_path / "steps.jsonl").write_text('{"time": 1.0}\n')
    with pytest.raises(ValueError, match="has one step, which says no speed; train for more"):
        seconds_a_step(RunFolder(tmp_path), 1)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [([0.9, 0.3], "auto is 3.0 times faster"), ([0.2, 0.3], "auto is 1.5 times slower")],
)
def test_the_table_of_speeds(seconds, said):
    runs = {
        "bf16": SimpleNamespace(wire_bytes=8e6, steps=4, below_bf16=1.0, loss=0.5),
        "auto": SimpleNamespace(wire_bytes=1e6, steps=4, below_bf16=8.0, loss=0.75),
    }
    shown = speeds(runs, seconds, 5.0)
    assert shown.startswith("over simulated links of 5 Mbit/s each way")
    rows = [re.split(r"  +", line) for line in shown.splitlines() if line[:4] in runs]
    ratio = f"{seconds[0] / seconds[1]:.2f}"
    assert rows[0] == ["bf16", f"{seconds[0]:.3f}", "1.00", "2.000", "1.0", "0.500"]
    assert rows[1] == ["auto", f"{seconds[1]:.3f}", ratio, "0.250", "8.0", "0.750"]
    assert shown.endswith(f"{said} than bf16 here")


def test_what_codes_is_compiled_before_the_first_step(capsys):
    """Only where messages are coded."""
    for act, said in (("topk:0.1", False), ("none", False), ("auto:relu", True)):
        config = ImageConfig.for_data(data="digits", width=4, act=(act,), grad=("none",))
        ImageTrainer(config, load_data(config)).prepare()
        assert ("compiling what codes messages, once" in capsys.readouterr().out) == said


@pytest.mark.slow
def test_two_processes_over_a_simulated_link(ranks, tmp_path):
    """Compared with bf16 at the cuts, also where the run is resumed."""
    command = [*TINY, "--split", "2", "--act", "auto:relu", "--grad", "auto:relu"]
    command += ["--mbps", "5", "--compare", "bf16", "--out", str(tmp_path / "run")]
    resumed = ["--resume", str(tmp_path / "run")]
    ended = ranks(recipe, 2, [*command, "--stop-after", "1"], resumed)
    for ends in zip(*ended, strict=True):
        check_success(ends)
    shown = ended[0][1].out
    assert "links are simulated, 5 Mbit/s each way" in shown
    assert "would not shrink" not in ended[0][1].err
    assert "over simulated links of 5 Mbit/s each way" in shown
    rows = re.findall(r"^(bf16|auto:relu) +[\d.]+ +[\d.]+ +([\d.]+) +([\d.]+) ", shown, re.M)
    sent = {name: (float(mb), float(below)) for name, mb, below in rows[-2:]}
    assert sent["bf16"][1] == pytest.approx(1, abs=0.05)
    assert sent["auto:relu"][0] < sent["bf16"][0] / 3
    assert json.loads((tmp_path / "run" / "uncompressed" / "config.json").read_text())["mbps"] == 5
