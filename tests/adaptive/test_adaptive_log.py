"""The run folder's log of ratios: only new steps, in place of those of a run that was resumed."""

from collections import deque

import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows

import mpcomp
from mpcomp import Adaptive, TopK
from recipes.adaptive_log import AdaptiveLog, plot_ratios
from recipes.replica_log import NewSteps, append_steps, read_steps


def test_steps_are_written_once_and_drawn(tmp_path):
    torch.manual_seed(0)
    method = Adaptive(TopK(0.1), cf=(2, 20), eps=0.5, window=2, bandwidth_mbps=1.0)
    options = {"split": MLP_SPLIT, "loss_fn": F.cross_entropy, "engine": "local"}
    pipe = mpcomp.pipeline(mlp(), 2, act_comp=method, grad_comp=[None, method], **options)
    log, path = AdaptiveLog(pipe), tmp_path / "adaptive.jsonl"
    assert log.active and log.new_steps() == []
    for step in range(4):
        pipe.forward_backward(*rows(8, step))
        if step % 2:
            append_steps(path, log.new_steps())
    assert [entry["step"] for entry in read_steps(path)] == [0, 1, 2, 3]
    assert read_steps(path) == pipe.adaptive_history
    assert list(read_steps(path)[0]["links"]) == ["0.act", "1.act", "1.grad"]
    plot_ratios(read_steps(path), tmp_path / "adaptive.png")
    assert (tmp_path / "adaptive.png").read_bytes().startswith(b"\x89PNG")
    assert not AdaptiveLog(mpcomp.pipeline(mlp(), 2, **options)).active


def test_a_log_has_all_steps_of_a_history_that_forgets():
    history: deque[dict[str, int]] = deque(maxlen=3)
    log = NewSteps(history)
    taken = []
    for step in range(20):
        history.append({"step": step})
        log.note_step()
        if step % 7 == 6:
            taken.append(log.new_steps())
    taken.append(log.new_steps())
    assert [len(steps) for steps in taken] == [7, 7, 6] and log.new_steps() == []
    assert [entry["step"] for steps in taken for entry in steps] == list(range(20))
