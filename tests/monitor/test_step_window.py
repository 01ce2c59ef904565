"""A window of steps: one gathering, of which `RunLog` and `log_to` both write."""

import json
import time

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows
from ranks import preload

import mpcomp

preload("test_step_window")


def pipeline(**choices):
    torch.manual_seed(0)
    return mpcomp.pipeline(
        mlp(), 2, split=MLP_SPLIT[:1], act_comp="topk:0.2", grad_comp="quant:4",
        loss_fn=F.cross_entropy, **choices,
    )  # fmt: skip


def figures(num_steps=3):
    """Figures of some steps that came after another, and the report's of all."""
    pipe = pipeline()
    pipe.forward_backward(*rows(6))
    window, before = pipe.step_window(), pipe.sent
    for seed in range(num_steps):
        pipe.forward_backward(*rows(6, seed))
    found = window.gathered(num_steps)
    traffic = [each.to_state() for each in found.links]
    return traffic, found.ranks, list(pipe.sent - before), pipe.report(show=False)


def check(traffic, ranks, sent, report, num_steps=3):
    assert [sum(each[name] for each in traffic) for name in
            ("wire_bytes", "dense_bytes", "num_elements")] == sent  # fmt: skip
    for each, entry in zip(traffic, report["boundaries"], strict=True):
        assert each["messages"] == 2 * num_steps and entry["train"]["messages"] > each["messages"]
        assert each["energies"][0] > 0
    for parts in ranks:
        whole = parts["seconds"]
        assert 0 < parts["compute"] < whole and 0 < parts["coding"] < whole


def test_one_process():
    found = figures()
    check(*found)
    assert len(found[1]) == 1


def test_ends_of_a_link_on_two_ranks_are_one_link(ranks):
    first, second = ranks(figures, 2)
    check(*first)
    alone = figures()
    for there, here in zip(first[0], alone[0], strict=True):
        assert there["wire_bytes"] == here["wire_bytes"]
        assert there["energies"] == pytest.approx(here["energies"])
    assert len(first[1]) == 2 and first[1] == second[1]  # all know all


def test_an_evaluation_is_part_of_no_step():
    pipe = pipeline()
    window = pipe.step_window()
    pipe.forward_backward(*rows(6))
    pipe.evaluate([rows(6)], lambda output, target: time.sleep(0.3) or torch.zeros(()))
    assert window.gathered(1).ranks[0]["seconds"] < 0.3


def test_both_logs_say_the_same(tmp_path):
    pipe, seen = pipeline(), []
    log = mpcomp.RunLog(pipe, tmp_path)
    pipe.log_to(lambda said, step: seen.append(said))
    log.step(pipe.forward_backward(*rows(6)))
    log.close()
    (line,) = (tmp_path / "steps.jsonl").read_text().splitlines()
    links = json.loads(line)["figures"]["links"]
    for i, name in enumerate(("cut 0 act", "cut 0 grad")):
        assert links["wire_bytes"][i] == seen[0][f"{name}/bytes"]
        assert links["relative_error"][i] == pytest.approx(
            seen[0][f"{name}/relative error"], abs=1e-6
        )
        assert links["cosine"][i] == pytest.approx(seen[0][f"{name}/cosine"], abs=1e-6)
