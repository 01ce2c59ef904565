"""The measurement of training over slow links: one short run of it, and mistakes."""

import json

import pytest
import torch
from torch import nn

from recipes.bench import slow_link
from recipes.bench.link_worker import REFERENCE, Output, descend


@pytest.mark.slow
def test_short_run(tmp_path, capsys):
    out = tmp_path / "figures" / "link.json"
    tiny = "--stages 2 --blocks 2 --width 16 --context 8 --vocab 20 --chunks 2 --microbatch 1"
    few = "--repeats 1 --warmups 1 --threads 1 --loopback"
    variants = [
        REFERENCE,
        "mpcomp none",
        "mpcomp topk:0.1+fp16",
        "mpcomp auto",
        "mpcomp auto:memory",
        "mpcomp none asynchronous",
    ]
    slow_link.main([*tiny.split(), *few.split(), "--variants", *variants, "--out", str(out)])
    result = json.loads(out.read_text())
    figures = {figure["variant"]: figure for figure in result["figures"]}
    assert list(figures) == variants and result["machine"]["mpcomp"]
    dense, none, topk, auto, memory, asynchronous = (figures[name] for name in variants)
    assert dense["metered_bytes"] == 2 * 2 * 8 * 16 * 4  # both ways, two microbatches, fp32
    assert dense["metered_bytes"] < none["metered_bytes"] < 1.1 * dense["metered_bytes"]
    assert asynchronous["metered_bytes"] == none["metered_bytes"]  # of a step, not of a call
    assert topk["metered_bytes"] < dense["metered_bytes"] / 4
    assert memory["metered_bytes"] < auto["metered_bytes"] < dense["metered_bytes"] / 2
    assert none["losses"] == pytest.approx(dense["losses"], abs=1e-5)
    assert len(result["compute"]["2"]) == 2 and result["links"]["kind"] == "loopback"
    changes = {row["variant"]: row["changes"] for row in result["changes"]}
    assert list(changes) == variants
    of_a_call = changes.pop("mpcomp none asynchronous")
    assert all(len(at_cuts) == 1 and 0 < at_cuts[0] < 0.1 for at_cuts in changes.values())
    assert of_a_call > changes["mpcomp none"]
    assert changes["mpcomp none"] == pytest.approx(changes[REFERENCE], rel=1e-3)
    said = capsys.readouterr().out
    assert "mpcomp topk:0.1+fp16" in said and "change from one step to the next" in said


def test_weights_move_by_a_part_of_their_norm():
    """Whatever the gradients' lengths are, and where one is 0 not at all."""
    module = nn.Linear(4, 3)
    before = [one.detach().clone() for one in module.parameters()]
    module.weight.grad = 1e6 * torch.randn(3, 4)
    module.bias.grad = torch.zeros(3)
    descend(module, 0.01)
    weight, bias = (
        one.detach() - old for one, old in zip(module.parameters(), before, strict=True)
    )
    expected = -0.01 * before[0].norm() * module.weight.grad / module.weight.grad.norm()
    torch.testing.assert_close(weight, expected, atol=1e-6, rtol=1e-3)
    assert not bias.any()


def test_changes_of_what_leaves_a_module():
    module = nn.Linear(4, 3, bias=False)
    output = Output(module)
    x = torch.randn(5, 4)
    module(x)
    assert output.change() is None
    with torch.no_grad():
        module.weight *= 1.1
    module(x)
    assert output.change() == pytest.approx(0.01, rel=1e-4)
    module(x)
    assert output.change() == 0


def test_bad_options():
    for options, message in {
        "--repeats 0": "repeats is 0; pass at least 1",
        "--warmups 0": "warmups is 0; pass at least 1",
        "--accelerator-ms -1": "accelerator_ms is -1.0; pass milliseconds, 0 or more",
        "--lr 0": "lr is 0.0; pass a number between 0 and 1",
        "--stages 4 --chunks 2": "chunks is 2; torch's 1F1B needs",
        "--stages 3": "3 stages cannot share 4 blocks",
        "--rates unlimited --plot x.png": "a plot needs a limited rate",
    }.items():
        with pytest.raises(SystemExit, match=message):
            slow_link.main(options.split())
    with pytest.raises(SystemExit, match="the variants lack 'torch fp32'"):
        slow_link.main(["--variants", "mpcomp none"])
