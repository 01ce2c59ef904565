"""The measurement of training over slow links: one short run of it, and mistakes."""

import json

import pytest
import torch
from torch import nn

from mpcomp.plan.network import PACKET_SHARE
from recipes.bench import slow_link
from recipes.bench.link_bound import MESSAGE_HEADER_BYTES
from recipes.bench.link_report import summarise
from recipes.bench.link_worker import (
    CHOSEN,
    IN_BACKGROUND,
    REFERENCE,
    UNCODED,
    WHEN_CODED,
    Output,
    descend,
)


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


@pytest.mark.slow
def test_what_the_word_sends_is_said_and_chosen_before_the_clock(tmp_path):
    """Loopback carries more than two cores code, so the word sends what bf16 sends."""
    out = tmp_path / "link.json"
    tiny = "--stages 2 --blocks 2 --width 16 --context 8 --vocab 20 --chunks 2 --microbatch 1"
    few = "--repeats 2 --warmups 1 --threads 1 --loopback --rates unlimited"
    variants = [REFERENCE, "mpcomp bf16", CHOSEN]
    slow_link.main([*tiny.split(), *few.split(), "--variants", *variants, "--out", str(out)])
    result = json.loads(out.read_text())
    figures = {figure["variant"]: figure for figure in result["figures"]}
    sent = [step["sends"] for step in result["steps"] if step["variant"] == CHOSEN]
    assert sent == [[["bf16", "bf16"]]] * 2
    assert figures[CHOSEN]["metered_bytes"] == figures["mpcomp bf16"]["metered_bytes"]


@pytest.mark.slow
def test_short_run_of_a_tied_model(tmp_path, capsys):
    """Both uses on the first host, and exchanged: each row of mpcomp's has its prediction."""
    out = tmp_path / "link.json"
    tiny = "--stages 2 --blocks 2 --width 16 --context 8 --vocab 20 --chunks 2 --microbatch 1"
    few = "--repeats 1 --warmups 1 --threads 1 --loopback --tied"
    variants = [REFERENCE, "mpcomp none", "mpcomp none apart", "mpcomp auto", "mpcomp auto apart"]
    slow_link.main([*tiny.split(), *few.split(), "--variants", *variants, "--out", str(out)])
    result = json.loads(out.read_text())
    steps = {step["variant"]: step for step in result["steps"]}
    placed = [steps[name]["ties"] for name in variants]
    assert placed == ["apart", "together", "apart", "together", "apart"]
    message, weight = 8 * 16 * 4, 20 * 16 * 4
    dense, none, apart, auto, auto_apart = (steps[name] for name in variants)
    assert dense["tie_bytes"] == [weight, weight] and not any(none["tie_bytes"] + auto["tie_bytes"])
    assert dense["metered_bytes"] == 2 * 2 * message + 2 * weight
    assert 2 * 4 * message < none["metered_bytes"] < 1.1 * 2 * 4 * message  # two cuts
    assert all(weight / 2 < sent < 1.1 * weight for sent in apart["tie_bytes"])
    assert apart["metered_bytes"] < 1.1 * dense["metered_bytes"]
    assert all(0 < sent < weight / 3 for sent in auto_apart["tie_bytes"])
    assert none["loss"] == pytest.approx(dense["loss"], abs=1e-5)
    assert len(result["compute"]["2"]) == 3  # the head alone
    assert list(result["tie_coding"]["2"]) == ["mpcomp none apart", "mpcomp auto apart"]
    predicted = [figure.get("predicted_s") for figure in result["figures"]]
    assert predicted[0] is None and all(seconds > 0 for seconds in predicted[1:])
    assert "predictions: " in capsys.readouterr().out


@pytest.mark.slow
def test_uncoded_messages_are_as_long_as_those_that_they_stand_for(tmp_path):
    out = tmp_path / "link.json"
    tiny = "--stages 2 --blocks 2 --width 64 --context 64 --vocab 20 --chunks 2 --microbatch 2"
    few = "--repeats 2 --warmups 1 --threads 1 --loopback --accelerator-ms 1"
    variants = [REFERENCE, *WHEN_CODED]
    slow_link.main([*tiny.split(), *few.split(), "--variants", *variants, "--out", str(out)])
    result = json.loads(out.read_text())
    figures = {figure["variant"]: figure for figure in result["figures"]}
    dense, in_turn, beside, uncoded = (figures[name] for name in variants)
    assert in_turn["metered_bytes"] == beside["metered_bytes"] < dense["metered_bytes"] / 2
    assert in_turn["losses"] == beside["losses"] != uncoded["losses"]
    assert uncoded["metered_bytes"] == pytest.approx(beside["metered_bytes"], rel=0.05)
    assert not any(result["coding"]["2"][UNCODED]) and all(result["coding"]["2"][IN_BACKGROUND])


#: Of the first blocks, of the last ones, and of the head: seconds forward and back.
COMPUTE = [(1.0, 2.0), (0.5, 1.25), (0.25, 0.75)]
CODING = (0.01, 0.02, 0.03, 0.04)
SIZE = 4e6


@pytest.mark.parametrize("ties", [None, "together", "apart"])
@pytest.mark.parametrize("sent", [(0.0, 0.0), (SIZE, SIZE), (1e3, SIZE), (SIZE, 1e3)])
@pytest.mark.parametrize("latency_ms", [0.0, 50.0])
def test_a_step_of_one_microbatch_is_predicted_as_it_adds_up(ties, sent, latency_ms):
    """One thing after the other; at the end a tie's gradients, both ways at once."""
    if ties != "apart":
        sent = (0.0, 0.0)
    num_cuts = 2 if ties == "together" else 1
    steps = [
        {
            "num_stages": 2,
            "rate_mbps": 8.0,
            "variant": name,
            "seconds": 1.0,
            "loss": 1.0,
            "metered_bytes": 2 * num_cuts * 1e6 + sum(sent),
            "interfaces": [],
            **({} if ties is None else {"ties": ties, "tie_bytes": list(sent)}),
        }
        for name in (REFERENCE, "mpcomp none")
    ]
    names = ("forward_s", "backward_s", "mean_forward_s", "mean_backward_s")
    compute = [dict(zip(names, times * 2, strict=True)) for times in COMPUTE]
    if ties is None:
        compute = compute[:2]
    _, figure = summarise(
        steps,
        {"2": compute},
        {"2": {"mpcomp none": CODING}},
        chunks=1,
        num_cores=2,
        latency_ms=latency_ms,
        steps_before=1,
        tie_coding={"2": {"mpcomp none": (0.1, 0.2, 0.3, 0.4)}},
    )

    def on_link(num_bytes):
        return num_bytes / PACKET_SHARE * 8e-6 / 8.0 + latency_ms / 1e3

    # Of one message a way the sender meters the fidelity, which takes a decoding.
    coding = sum(CODING) + CODING[1] + CODING[3]
    expected = sum(map(sum, COMPUTE[: len(compute)])) + 2 * latency_ms / 1e3
    expected += num_cuts * (coding + 2 * on_link(1e6 + MESSAGE_HEADER_BYTES))
    if ties == "apart":  # the last host is done while its gradient is on its way
        early = on_link(1e6 + MESSAGE_HEADER_BYTES) + CODING[3] + COMPUTE[0][1]
        from_last = max(0.3 - early + on_link(sent[1]), 0.1) + 0.4
        expected += max(0.1 + on_link(sent[0]) + 0.2, from_last)
    assert figure["predicted_s"] == pytest.approx(expected)
    assert (figure["bound_s"] is None) == (ties is not None)


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


def test_rates_that_were_measured_apart_are_one_measurement():
    parts = [
        slow_link.Measured(
            [{"rate_mbps": rate}], [{"forward_s": s, "mean_forward_s": 2 * s}], coding, {}
        )
        for rate, s, coding in ((10.0, 3.0, {"a": [1.0, 4.0]}), (30.0, 1.0, {"a": [2.0, 8.0]}))
    ]
    assert slow_link.merged(parts) == slow_link.Measured(
        [{"rate_mbps": 10.0}, {"rate_mbps": 30.0}],
        [{"forward_s": 1.0, "mean_forward_s": 4.0}],
        {"a": [1.5, 6.0]},
        {},
    )


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
    with pytest.raises(SystemExit, match=f"the variants lack '{IN_BACKGROUND}'"):
        slow_link.main(["--variants", REFERENCE, UNCODED])
