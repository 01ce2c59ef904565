"""Tied weights: two copies that stay equal, by messages that are metered and may be compressed."""

import copy

import pytest
import torch
from lms import VOCABULARY, gpt2, llama, num_tokens, parts_of, sum_tied, text, untied
from methods import round_trip, same_bits
from models import adamw, assert_same_state, links_state, sgd
from torch import nn

import mpcomp
from mpcomp import EF21, Quantize, TopK
from mpcomp.core.step import Step
from mpcomp.links.tied_weights import separate_gradients

DENSE_BYTES = VOCABULARY * 32 * 4


def pipe_of(tie_comp=None, **kwargs):
    return mpcomp.pipeline(gpt2(), 2, split=3, ties="apart", tie_comp=tie_comp, **kwargs)


def copies(pipe):
    """Both copies of the tied parameter."""
    (tie,) = pipe.ties
    named = dict(pipe.named_parameters())
    return [named[name] for _, name in tie.copies]


def gradients_apart(model, batch, sizes):
    """What both copies gather in one step: [1, elements] each."""
    plain = untied(model)
    total = num_tokens(batch["labels"])
    for part in parts_of(batch, sizes):
        share = num_tokens(part["labels"]) / total
        (plain(**part, use_cache=False).loss * share).backward()
    ends = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    return [end.grad.reshape(1, -1) for end in ends]


def test_it_is_found_and_named():
    pipe = pipe_of()
    (tie,) = pipe.ties
    assert tie.name == "transformer.wte.weight" and tie.stages == (0, 2)
    assert [name for _, name in tie.copies] == ["transformer.wte.weight", "lm_head.weight"]
    assert [link.name for link in tie.links] == [
        f"tied transformer.wte.weight, copy of stage {stage}" for stage in (0, 2)
    ]
    assert pipe.links[-2:] == list(tie.links)
    first, last = copies(pipe)
    assert first is not last and same_bits(first, last)
    assert not mpcomp.pipeline(llama(), 2, split=2).ties


def test_dense_messages_are_metered():
    """Two messages a step, of the parameter's bytes each; evaluation sends none."""
    pipe = pipe_of()
    for _ in range(3):
        pipe.forward_backward(text(4))
    pipe.evaluate([text(4)])
    for link in pipe.ties[0].links:
        traffic = link.meter.train
        assert (traffic.messages, traffic.dense_bytes) == (3, 3 * DENSE_BYTES)
        assert DENSE_BYTES * 3 < traffic.wire_bytes < DENSE_BYTES * 3 + 100
        assert link.meter.phases["eval"].messages == 0
    sent = sum(link.meter.train.wire_bytes for link in pipe.links)
    assert pipe.wire_bytes == sent
    rows = [row for row in pipe.report(show=False)["boundaries"] if "tie" in row["direction"]]
    assert [row["direction"] for row in rows] == ["tie_first", "tie_last"]
    assert all(row["after"] == "transformer.wte.weight" for row in rows)


METHODS = ["topk:0.1", "ef+topk:0.1", "ef21+topk:0.1", "quant:4", "randomk:0.2", "efmixed+topk:0.1"]


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("tie_comp", METHODS)
def test_copies_stay_equal_under_compression(tie_comp, optimizer):
    pipe = pipe_of(tie_comp)
    steps = optimizer(pipe)
    start = copies(pipe)[0].detach().clone()
    for step in range(5):
        pipe.forward_backward(text(4, step, side="right"))
        first, last = copies(pipe)
        assert same_bits(first.grad, last.grad)
        mpcomp.clip_grad_norm_(pipe, 0.5)
        steps.step()
        steps.zero_grad()
        assert same_bits(first, last)
    assert not torch.equal(first, start)
    for link in pipe.ties[0].links:
        if not tie_comp.startswith("ef21"):  # whose first message is dense
            assert link.meter.train.wire_bytes < 0.4 * link.meter.train.dense_bytes
    merged = pipe.merge()
    assert merged.lm_head.weight is merged.transformer.wte.weight is first


@pytest.mark.parametrize("method", [TopK(0.1), Quantize(4)], ids=str)
def test_the_sum_is_of_what_the_messages_say(method):
    """Not of what they were made from: C(g_first) + C(g_last), in this order."""
    model = gpt2()
    batch = text(4)
    own = gradients_apart(model, batch, [2, 2])
    pipe = mpcomp.pipeline(model, 2, split=2, tie_comp=method)
    pipe.forward_backward(batch)
    arrived = [round_trip(method, gradient) for gradient in own]
    expected = (arrived[0] + arrived[1]).reshape(VOCABULARY, 32)
    assert not torch.equal(expected, (own[0] + own[1]).reshape(VOCABULARY, 32))
    assert all(same_bits(end.grad, expected) for end in copies(pipe))


def test_error_feedback_loses_no_mass():
    """All that arrived and what both ends still hold is all that was gathered."""
    model = gpt2()
    pipe = mpcomp.pipeline(model, 2, split=2, tie_comp="ef+topk:0.1")
    gathered = torch.zeros(1, VOCABULARY * 32)
    arrived = torch.zeros_like(gathered)
    for step in range(4):
        batch = text(4, step)
        gathered += sum(gradients_apart(model, batch, [2, 2]))  # weights do not change here
        pipe.forward_backward(batch)
        arrived += copies(pipe)[0].grad.reshape(1, -1)
        pipe.zero_grad()
    residuals = sum(link.state_dict()["sender.rows0"] for link in pipe.ties[0].links)
    assert residuals.abs().sum() > 0
    torch.testing.assert_close(arrived + residuals, gathered, rtol=1e-4, atol=1e-6)


def test_warm_up_and_uncompressed_steps_go_dense():
    pipe = pipe_of("topk:0.1", warmup_steps=1)
    links = pipe.ties[0].links

    def sent():
        before = [link.meter.train.wire_bytes for link in links]
        pipe.forward_backward(text(4))
        return [link.meter.train.wire_bytes - was for link, was in zip(links, before, strict=True)]

    assert all(count > DENSE_BYTES for count in sent())
    assert all(count < 0.2 * DENSE_BYTES for count in sent())
    with pipe.uncompressed():
        assert all(count > DENSE_BYTES for count in sent())
    with pipe.compressed(act=False):
        assert all(count < 0.2 * DENSE_BYTES for count in sent())


@pytest.mark.parametrize("tie_comp", ["ef+topk:0.1", "ef21+topk:0.1"])
def test_a_skipped_step_leaves_its_state(tie_comp):
    """Under a loss scaler whose gradients overflow; the state is not that of an empty link."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    pipe = pipe_of(tie_comp, scaler=scaler)
    optimizer = adamw(pipe)

    def step(seed):
        pipe.forward_backward(text(4, seed))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step(0)
    before, weights = links_state(pipe), copy.deepcopy(pipe.state_dict())
    assert any(state for name, state in before.items() if "tie" in name)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 3e38})
    step(1)
    assert pipe.step_skipped and pipe.num_steps == 2
    assert_same_state(links_state(pipe), before)
    assert all(same_bits(value, weights[name]) for name, value in pipe.state_dict().items())
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    step(2)
    assert not pipe.step_skipped
    first, last = copies(pipe)
    assert same_bits(first, last)


def test_frozen_copies_exchange_nothing():
    model = gpt2()
    model.transformer.wte.weight.requires_grad_(False)
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, 2, split=2, ties="apart")
    pipe.forward_backward(text(4))
    assert not pipe.ties[0].trains
    assert all(link.meter.train.messages == 0 for link in pipe.ties[0].links)
    assert all(end.grad is None for end in copies(pipe))
    for ties in ("together", "apart"):  # nothing is shared out for autograd to miss: pipe(x) trains
        pipe = mpcomp.pipeline(copy.deepcopy(plain), 2, split=2, ties=ties)
        pipe(text(4)).sum().backward()
        assert pipe.state_dict().keys() == plain.state_dict().keys()


def test_an_error_gives_back_what_was_gathered_before():
    pipe = pipe_of()
    pipe.forward_backward(text(4))
    held = [end.grad.clone() for end in copies(pipe)]
    with pytest.raises(RuntimeError, match="stop"), separate_gradients(pipe.ties, Step(1, True)):
        assert all(end.grad is None for end in copies(pipe))
        copies(pipe)[0].grad = torch.ones(VOCABULARY, 32)
        raise RuntimeError("stop")
    assert all(same_bits(end.grad, was) for end, was in zip(copies(pipe), held, strict=True))


def test_an_error_in_a_later_tie_gives_it_back_too(monkeypatch):
    model = gpt2()
    h = model.transformer.h
    h[3].mlp.c_fc.weight = h[1].mlp.c_fc.weight
    pipe = mpcomp.pipeline(model, 2, split=[2, 2])
    pipe.forward_backward(text(4))
    tied = [pipe.stages[stage].get_parameter(n) for tie in pipe.ties for stage, n in tie.copies]
    held = [parameter.grad.clone() for parameter in tied]

    def fail(*args):
        raise RuntimeError("stop")

    monkeypatch.setattr(pipe.ties[1], "add_up", fail)
    with pytest.raises(RuntimeError, match="stop"):
        pipe.forward_backward(text(4, 1))
    assert all(same_bits(p.grad, was) for p, was in zip(tied, held, strict=True))
    assert pipe.num_steps == 1


def test_more_than_one_parameter():
    """Blocks that share weights over a cut: each pair is a tie of its own."""
    model = gpt2()
    h = model.transformer.h
    h[3].mlp.c_fc.weight = h[1].mlp.c_fc.weight
    plain = untied(model)
    twin = plain.transformer.h[3].mlp.c_fc
    twin.weight = nn.Parameter(twin.weight.detach().clone())
    pipe = mpcomp.pipeline(model, 2, split=[2, 2], tie_comp="none")
    assert [tie.name for tie in pipe.ties] == [
        "transformer.wte.weight",
        "transformer.h.1.mlp.c_fc.weight",
    ]
    optimizers = adamw(pipe), adamw(plain)
    for step in range(2):
        batch = text(4, step)
        pipe.forward_backward(batch)
        total = num_tokens(batch["labels"])
        for part in parts_of(batch, [2, 2]):
            share = num_tokens(part["labels"]) / total
            (plain(**part, use_cache=False).loss * share).backward()
        sum_tied(plain)
        of_blocks = [plain.transformer.h[i].mlp.c_fc.weight for i in (1, 3)]
        both = of_blocks[0].grad + of_blocks[1].grad
        of_blocks[0].grad, of_blocks[1].grad = both, both.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    theirs = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        assert same_bits(parameter, theirs[name]), name
    merged = pipe.merge()
    assert merged.transformer.h[3].mlp.c_fc.weight is merged.transformer.h[1].mlp.c_fc.weight
    for name, parameter in merged.named_parameters(remove_duplicate=False):
        assert same_bits(parameter, theirs[name]), name  # the rest of the copied block too


def test_three_stages_cannot_share_one():
    model = gpt2()
    h = model.transformer.h
    h[3].ln_1.weight = h[2].ln_1.weight = h[1].ln_1.weight
    with pytest.raises(ValueError, match=r"ln_1.weight are one parameter in 3 stages; two can"):
        mpcomp.pipeline(model, 2, split=4)


@pytest.mark.parametrize(
    "make, tie_comp, message",
    [
        (llama, "topk:0.1", "tie_comp=topk:0.1: no two stages share a parameter here"),
        (gpt2, "aqsgd+quant:4", "belongs to no sample; use ef"),
        (gpt2, "same", "it reuses the activation's selection"),
        (gpt2, "topp:0.1", "unknown method 'topp'"),
    ],
    ids=["no tie", "aqsgd", "same", "unknown"],
)
def test_bad_methods(make, tie_comp, message):
    with pytest.raises(ValueError, match=message):
        mpcomp.pipeline(make(), 2, split=2, tie_comp=tie_comp)


def test_method_objects():
    pipe = pipe_of(EF21(TopK(0.2)))
    assert {link.method for link in pipe.ties[0].links} == {EF21(TopK(0.2))}
    with pytest.raises(TypeError, match="tie_comp"):
        pipe_of(3)
