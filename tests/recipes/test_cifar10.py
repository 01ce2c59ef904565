"""The main recipe on few digits: what it leaves, and that a resumed run is the same run."""

import json

import pytest
from everyday import slow_after
from safetensors.torch import load_file

from recipes import cifar10
from recipes.cifar10 import run

TINY = [
    *("--data", "digits", "--width", "4", "--epochs", "2", "--batch-size", "16", "--chunks", "2"),
    *("--train-limit", "40", "--test-limit", "20", "--precision", "fp32", "--device", "cpu"),
]


def error_of(*options: object) -> str:
    """The one line that the recipe ends with."""
    with pytest.raises(SystemExit) as caught:
        cifar10.main([str(option) for option in options])
    assert isinstance(caught.value.code, str)
    assert caught.value.code.startswith("error: ") and "\n" not in caught.value.code
    return caught.value.code


def rows_without_time(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row["seconds"]
    return rows


@pytest.mark.slow
def test_compare_leaves_the_run_folder(tmp_path, capsys):
    cifar10.main([*TINY, "--compare", "--out", str(tmp_path / "run")])
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert {
        *("accuracy_compressed", "accuracy_uncompressed", "best_accuracy_compressed"),
        *("best_accuracy_uncompressed", "wire_bytes", "dense_bytes", "wire_ratio", "epochs"),
        *("seconds", "seed", "act", "grad"),
    } <= set(summary)
    assert 0.1 < summary["wire_ratio"] < 0.25  # compressed indeed
    assert summary["uncompressed_run"]["wire_ratio"] == pytest.approx(1.0, abs=0.01)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "config.json").read_text())["act"] == ["topk:0.1"]
    assert [row["epoch"] for row in rows_without_time(folder / "metrics.jsonl")] == [1, 2]
    assert (folder / "uncompressed" / "summary.json").exists()
    printed = capsys.readouterr().out
    assert "uncompressed" in printed and "accuracy on %" in printed


@pytest.mark.parametrize(
    "methods",
    slow_after(
        1,
        [
            ["--act", "ef21+topk:0.1", "--grad", "ef+randomk:0.2", "--clip", "1.0"],
            ["--act", "aqsgd:key=augmented+topk:0.1", "--aug-seeds", "2", "--recompute"],
            ["--precision", "fp16", "--no-drop-last", "--warmup-steps", "1"],
            ["--model", "vgg16", "--width", "2", "--act", "ef21+topk:0.1"],
        ],
    ),
    ids=["feedback", "aqsgd", "fp16", "vgg"],
)
def test_resumed_run_is_the_uninterrupted_run(tmp_path, methods):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    cifar10.main([*TINY, *methods, "--out", str(whole)])
    cifar10.main([*TINY, *methods, "--out", str(parts), "--stop-after", "1"])
    assert not (parts / "summary.json").exists()
    cifar10.main(["--resume", str(parts)])
    assert rows_without_time(whole / "metrics.jsonl") == rows_without_time(parts / "metrics.jsonl")
    name = "checkpoint/weights.safetensors"
    expected, resumed = load_file(whole / name), load_file(parts / name)
    assert expected.keys() == resumed.keys()
    assert all(expected[key].equal(resumed[key]) for key in expected)


def test_own_compressor_for_each_boundary(tiny):
    summary = run(tiny(epochs=1, act=("topk:0.1", "quant:4", "none")), progress=False)
    assert summary.act == "topk:0.1 quant:4 none"
    assert 0 < summary.wire_ratio < 1


def test_evaluation_may_be_rarer_but_never_skips_the_last_epoch(tiny):
    history = run(tiny(epochs=3, eval_every=2), progress=False).history
    assert [row["accuracy_compressed"] is not None for row in history] == [False, True, True]


def test_global_generator_is_left_alone(tiny, global_rng_untouched):
    with global_rng_untouched():
        run(tiny(epochs=1), progress=False)


def test_mistakes_end_with_one_line_and_leave_nothing(tmp_path):
    out = tmp_path / "run"
    assert "topk" in error_of(*TINY, "--act", "topc:0.1", "--out", out)
    assert "chunks is 17" in error_of(*TINY, "--chunks", 17, "--out", out)
    assert "pass paper, a number of stages" in error_of(*TINY, "--split", "2,,2", "--out", out)
    assert "layer9" in error_of(*TINY, "--split", "layer9", "--out", out)
    assert "no folder ./nowhere" in error_of("--data", "./nowhere", "--out", out)
    assert "smaller --batch-size" in error_of(*TINY, "--batch-size", 64, "--out", out)
    last = ["--no-drop-last", "--batch-size", "39"]  # 40 images: the last batch has one
    assert "drop it with --drop-last" in error_of(*TINY, *last, "--out", out)
    same = ["--act", "none", "--grad", "same", "--compare"]
    assert "same" in error_of(*TINY, *same, "--out", out).lower()
    assert "with itself" in error_of(
        *TINY, "--act", "none", "--grad", "none", "--compare", "--out", out
    )
    assert not out.exists()


def test_resume_keeps_its_configuration(tmp_path):
    assert "is no run folder" in error_of("--resume", tmp_path)
    assert "drop --lr, --seed" in error_of("--resume", tmp_path, "--seed", 1, "--lr", 3)


def test_tensorboard_has_each_step(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard comes with mpcomp[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cifar10.main([*TINY, "--epochs", "1", "--tensorboard", "--out", str(tmp_path / "run")])
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    sent = [event.value for event in read.Scalars("bytes")]
    assert len(sent) > 1 and sum(sent) == summary["wire_bytes"]


def test_second_run_in_a_folder_is_refused(tmp_path):
    cifar10.main([*TINY, "--epochs", "1", "--out", str(tmp_path)])
    assert "holds a run already" in error_of(*TINY, "--out", tmp_path)


def test_wide_networks_of_any_size(tmp_path, capsys):
    model = ["--model", "wide_resnet", "--width", "4", "--depth", "10", "--widen", "2"]
    cifar10.main([*TINY, *model, "--epochs", "1", "--out", str(tmp_path / "run")])
    assert "3 stages" in capsys.readouterr().out
    weights = load_file(tmp_path / "run" / "checkpoint" / "weights.safetensors")
    assert weights["layer3.0.conv2.weight"].shape == (32, 32, 3, 3)
    assert "depth is 12; pass 6 n + 4" in error_of(*TINY, *model[:4], "--depth", "12")


def test_vgg_is_cut_after_its_pools(tmp_path, capsys):
    """Digits are smaller than its pools were made for."""
    model = ["--model", "vgg16", "--width", "2", "--epochs", "1"]
    cifar10.main([*TINY, *model, "--out", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert "4 stages" in printed
    assert [f"block{i}.pool" in printed for i in (1, 2, 3, 4, 5)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    weights = load_file(tmp_path / "run" / "checkpoint" / "weights.safetensors")
    assert weights["block5.conv3.weight"].shape == (16, 16, 3, 3)
    assert weights["classifier.linear3.weight"].shape == (10, 128)
    split = ["--split", "block1,block4.conv2,classifier.relu1", "--act", "quant:8"]
    cifar10.main([*TINY, *model, *split, "--out", str(tmp_path / "other")])
    assert "classifier.relu1" in capsys.readouterr().out
