"""The text recipe in several processes: the run of one process, told once, with one end for all."""

import pytest
import torch
from endings import End, check_error, check_success, end_of, history, weights
from safetensors.torch import load_file

from recipes import wikitext

TINY = [
    *("--model", "tiny", "--vocab-size", "270", "--seq-len", "16", "--batch-size", "4"),
    *("--chunks", "2", "--epochs", "2", "--eval-limit", "5", "--precision", "fp32"),
    *("--device", "cpu", "--split", "2"),
]


def text_recipe(*commands: list[str]) -> list[End]:
    """In each process: runs the recipe with each of the commands, one after another."""
    return [end_of(wikitext.main, command) for command in commands]


def test_two_processes_train_the_run_of_one(ranks, tmp_path, sentences):
    """Also where it is stopped and resumed; replicas share the blocks."""
    methods = ["--act", "aqsgd+quant:4", "--grad", "ef+topk:0.2", "--tie", "ef+topk:0.1"]
    command = [*TINY, "--data", sentences(30), *methods, "--accumulate", "2"]
    parts, alone = tmp_path / "parts", tmp_path / "alone"
    *ended, mistaken = zip(
        *ranks(
            text_recipe,
            2,
            [*command, "--out", str(parts), "--stop-after", "1"],
            ["--resume", str(parts)],
            [*command, "--model", "./nobody", "--out", str(tmp_path / "none")],
        ),
        strict=True,
    )
    for ends in ended:
        check_success(ends)
    assert "2 stages on 2 processes" in ended[0][0].out and "a process" in ended[0][0].out
    assert "perplexity on" in ended[1][0].out and "tied gradient" in ended[1][0].out
    check_error(mistaken, "there is no folder ./nobody")
    assert not (tmp_path / "none").exists()

    wikitext.main([*command, "--out", str(alone)])
    assert history(alone) == history(parts)
    ours, theirs = weights(alone), weights(parts)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    saved = [load_file(one / "model" / "model.safetensors") for one in (alone, parts)]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


@pytest.mark.slow
def test_two_processes_train_the_lstm_of_one(ranks, tmp_path, sentences):
    """Dropout and cuts as in one process; the model is saved whole."""
    model = ["--model", "lstm", "--hidden", "24", "--act", "topk:0.3", "--grad", "ef+quant:4"]
    command = [*TINY, "--data", sentences(30), *model, "--epochs", "1"]
    both, alone = tmp_path / "both", tmp_path / "alone"
    ends = ranks(text_recipe, 2, [*command, "--out", str(both)])
    check_success([end for (end,) in ends])
    wikitext.main([*command, "--out", str(alone)])
    assert history(alone) == history(both)
    ours, theirs = weights(alone), weights(both)
    saved = load_file(both / "model" / "model.safetensors")
    assert ours.keys() == theirs.keys() == saved.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(torch.equal(ours[name], saved[name]) for name in ours)


@pytest.mark.slow
def test_replicas_share_the_blocks(ranks, tmp_path, sentences):
    out = tmp_path / "run"
    command = [*TINY, "--data", sentences(30), "--replicas", "2", "--accumulate", "2"]
    command += ["--batch-size", "8", "--act", "aqsgd+quant:4", "--epochs", "1", "--out", str(out)]
    check_success([ends[0] for ends in ranks(text_recipe, 4, command)])
    assert (out / "model" / "model.safetensors").exists()
