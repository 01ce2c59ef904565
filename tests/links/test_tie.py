"""Tied weights: two copies that stay equal, by messages that are metered and may be compressed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from lms import VOCABULARY, gpt2, llama, num_tokens, parts_of, sum_tied, text, untied
from methods import round_trip, same_bits
from models import adamw, assert_same_state, links_state, sgd
from torch import nn

import mpcomp
from mpcomp import EF21, Quantize, TopK
from mpcomp.comm.channels import LocalChannel
from mpcomp.core.context import Step
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


def rows_of(gradient):
    """Rows that are not all zero: bool [VOCABULARY]."""
    return gradient.reshape(VOCABULARY, -1).ne(0).any(1)


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
    """Two messages a step, of all rows that are not zero; evaluation sends none."""
    model = gpt2()
    counts = [int(rows_of(own).sum()) for own in gradients_apart(model, text(4), [2, 2])]
    assert counts[0] < VOCABULARY / 2 and counts[1] == VOCABULARY
    pipe = mpcomp.pipeline(model, 2, split=3, ties="apart")
    for _ in range(3):
        pipe.forward_backward(text(4))
    pipe.evaluate([text(4)])
    for link, count in zip(pipe.ties[0].links, counts, strict=True):
        traffic = link.meter.train
        assert (traffic.messages, traffic.dense_bytes) == (3, 3 * DENSE_BYTES)
        assert count * 32 * 4 < traffic.wire_bytes / 3 < count * 32 * 4 + 50
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
    """Not of what they were made from: C(g_first) + C(g_last), in this order, C of rows alone."""
    model = gpt2()
    batch = text(4)
    own = gradients_apart(model, batch, [2, 2])
    pipe = mpcomp.pipeline(model, 2, split=2, tie_comp=method)
    pipe.forward_backward(batch)
    arrived = [torch.zeros(VOCABULARY, 32) for _ in own]
    for said, gradient in zip(arrived, own, strict=True):
        rows = rows_of(gradient)
        taken = gradient.reshape(VOCABULARY, 32)[rows].reshape(1, -1)
        said[rows] = round_trip(method, taken).reshape(-1, 32)
    expected = arrived[0] + arrived[1]
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
    residuals = sum(link.endpoint.state_dict()["sender.rows0"] for link in pipe.ties[0].links)
    assert residuals.abs().sum() > 0
    torch.testing.assert_close(arrived + residuals, gathered, rtol=1e-4, atol=1e-6)


def test_warm_up_and_uncompressed_steps_go_dense():
    pipe = pipe_of("topk:0.1", warmup_steps=1)
    links = pipe.ties[0].links

    def sent():
        before = [link.meter.train.wire_bytes for link in links]
        pipe.forward_backward(text(4))
        return [link.meter.train.wire_bytes - was for link, was in zip(links, before, strict=True)]

    first = rows_of(gradients_apart(gpt2(), text(4), [2, 2])[0]).sum() * 32 * 4

    def goes_dense():
        counts = sent()
        return first < counts[0] < first + 50 and DENSE_BYTES < counts[1] < DENSE_BYTES + 50

    assert goes_dense()
    assert all(count < 0.2 * DENSE_BYTES for count in sent())
    with pipe.uncompressed():
        assert goes_dense()
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


# -- rows of the batch's tokens -------------------------------------------------------------------

WORDS, WIDTH = 40, 8
TOKENS = {"few": (3, 7, 7, 39), "one": (5,) * 4, "all": tuple(range(WORDS))}


def chain(dtype=torch.float32):
    torch.manual_seed(1)
    embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.Tanh(), head).to(dtype)


def chain_pipe(tie_comp=None, dtype=torch.float32, weight=1.0, **kwargs):
    def loss_fn(out, target):
        return weight * F.cross_entropy(out.flatten(0, 1), target.flatten())

    return mpcomp.pipeline(
        chain(dtype), 2, split=2, ties="apart", tie_comp=tie_comp, loss_fn=loss_fn, **kwargs
    )


def batch_of(tokens, rows=4):
    """Rows of these tokens, in which all of them are in both microbatches."""
    x = torch.tensor(tokens).repeat(rows, 1)
    return x, (x + 1) % WORDS


def sent_by(pipe):
    """Bytes that both links have sent so far."""
    return [link.meter.train.wire_bytes for link in pipe.ties[0].links]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weight", [1.0, 0.0], ids=["", "zeros"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_without_compression_the_sum_is_bit_for_bit_that_of_the_gradients(tokens, weight, dtype):
    pipe = chain_pipe(None, dtype, weight)
    x, y = batch_of(TOKENS[tokens])
    plain = chain(dtype)
    plain[3].weight = nn.Parameter(plain[3].weight.detach().clone())
    for number in range(2):  # the second step's is added to the first one's
        pipe.forward_backward(x, y)
        held = None if number == 0 else plain[0].weight.grad
        plain.zero_grad()
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = F.cross_entropy(plain(part).flatten(0, 1), target.flatten())
            (weight * loss * 0.5).backward()
        total = plain[0].weight.grad + plain[3].weight.grad
        plain[0].weight.grad = total if held is None else held + total
        assert all(same_bits(copy.grad, plain[0].weight.grad) for copy in copies(pipe))
    rows = len(set(TOKENS[tokens])) if weight else 0
    values = 2 * rows * WIDTH * dtype.itemsize
    assert values < sent_by(pipe)[0] <= values + 2 * 48
    if weight:
        assert sent_by(pipe)[1] > 2 * WORDS * WIDTH * dtype.itemsize


ALL_METHODS = [
    "none",
    "bf16",
    "sign",
    "step:0.3",
    "topk:0.1+quant:8",
    "ef+quant:4:scale=128",
    "ef:decay=0.9+step:0.3",
    "ef:storage=8+sign",
    "conef:0.5:beta=0.5+topk:0.2",
    *METHODS,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie_comp", ALL_METHODS)
@pytest.mark.filterwarnings("ignore:.*would not shrink")
def test_copies_stay_equal_whatever_tokens_come(tie_comp, dtype, tmp_path):
    """Few, one, all, few again and one; and a run that was saved before goes on as it."""
    pipes = [chain_pipe(tie_comp, dtype) for _ in range(2)]
    optimizers = [torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9) for pipe in pipes]

    def step(i, tokens):
        pipes[i].forward_backward(*batch_of(TOKENS[tokens]))
        first, last = copies(pipes[i])
        assert same_bits(first.grad, last.grad) and first.grad.isfinite().all()
        optimizers[i].step()
        optimizers[i].zero_grad()
        assert same_bits(first, last)

    for tokens in ("few", "one", "all"):
        step(0, tokens)
    pipes[0].save(tmp_path, optimizer=optimizers[0])
    pipes[1].load(tmp_path, optimizer=optimizers[1])
    for tokens in ("few", "one"):
        for i in range(2):
            step(i, tokens)
    assert same_bits(copies(pipes[0])[0], copies(pipes[1])[0])
    assert_same_state(*map(links_state, pipes))
    assert sent_by(pipes[0]) == sent_by(pipes[1])


@pytest.mark.parametrize("tie_comp", ["ef+topk:0.1", "ef+quant:2", "ef:decay=0.5+topk:0.1"])
def test_the_error_of_a_row_waits_until_its_token_comes_again(tie_comp):
    pipe = chain_pipe(tie_comp)
    (first, last) = pipe.ties[0].links
    kept = []
    for tokens in ((1, 2, 3), (10, 11), (1, 2, 3)):
        pipe.forward_backward(*batch_of(tokens))
        kept.append(first.endpoint.state_dict()["sender.rows0"].reshape(WORDS, WIDTH).clone())
    seen = torch.zeros(WORDS, dtype=torch.bool)
    seen[[1, 2, 3]] = True
    assert kept[0][seen].any() and not kept[0][~seen].any()
    decay = 0.5 if "decay" in tie_comp else 1.0
    assert same_bits(kept[1][seen], decay * kept[0][seen])
    assert kept[1][[10, 11]].any() and not same_bits(kept[2][seen], decay * kept[1][seen])
    assert last.endpoint.state_dict()["sender.rows0"].any()


@pytest.mark.parametrize("tie_comp", ["ef21+topk:0.1", "efmixed+topk:0.1"])
def test_methods_that_need_all_rows_send_all(tie_comp):
    pipe = chain_pipe(tie_comp)
    pipe.forward_backward(*batch_of(TOKENS["few"]))
    before = sent_by(pipe)
    pipe.forward_backward(*batch_of(TOKENS["few"]))
    first, last = (now - was for now, was in zip(sent_by(pipe), before, strict=True))
    assert first == last


def test_vectors_and_equal_lengths_go_whole():
    """A vector has no rows; a transport whose ends must name one length gains nothing by them."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5))
    model[2].weight = model[0].weight
    pipe = mpcomp.pipeline(model, 2, split=2, ties="apart", loss_fn=F.cross_entropy)
    assert [link.num_rows for link in pipe.ties[0].links] == [None, None]
    pipe = chain_pipe()
    (tie,) = pipe.ties
    assert [link.num_rows for link in tie.links] == [WORDS, WORDS]
    channels = LocalChannel(torch.device("cpu")), LocalChannel(torch.device("cpu"))
    channels[0].equal_lengths = True
    tie.attach({0: pipe.stages[0]}, channels)
    assert [link.num_rows for link in tie.links] == [None, None]


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
