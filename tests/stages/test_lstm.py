"""LSTM language models: sizes, where they are cut, and law 1 in a pipeline."""

import copy

import pytest
import torch
from methods import same_bits
from models import adamw, assert_same_training
from torch import nn

import mpcomp
from mpcomp import CausalLMLoss
from mpcomp.core.randomness import stage_randomness
from stages import blocks, lstm_lm, merge, split, ties
from stages.lstm import LSTMLM

VOCABULARY = 11
SIZES = {(4, 1): [4], (4, 4): [1, 1, 1, 1], (7, 2): [4, 3]}


def tiny(**chosen):
    torch.manual_seed(0)
    return lstm_lm(VOCABULARY, **{"hidden": 6, "dropout": 0.3, **chosen})


def tokens(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, 5), generator=generator)


def plain_step(model, ids, sizes, *, where, step):
    """Law 1's right-hand side; dropout is drawn per stage and microbatch."""
    loss_fn, total = CausalLMLoss(), None
    for i, part in enumerate(ids.split(sizes)):
        x = part
        for j, stage in enumerate(split(model, where)):
            with stage_randomness(torch.device("cpu"), 3, step, j, i):
                x = stage(x)
        loss = loss_fn(x, part) * (len(part) / len(ids))
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


# -- the model ------------------------------------------------------------------------------------


def test_sizes_of_the_papers():
    with torch.device("meta"):
        large = lstm_lm(10_000)
        tied = lstm_lm(10_000, tie=True)
    size = sum(p.numel() for p in large.parameters())
    assert size == 66_034_000 and round(4 * size / 2**20) == 252  # MB, says GraVAC
    assert size - sum(p.numel() for p in tied.parameters()) == 10_000 * 1500


def test_blocks_and_the_paper_cut():
    model = tiny(num_layers=3)
    assert [one.name for one in blocks(model)] == [
        "embedding",
        "layer1",
        "layer2",
        "layer3",
        "head",
    ]
    assert [one.block_names for one in split(model, "paper")] == [
        *(("embedding", "layer1"), ("layer2",), ("layer3",), ("head",)),
    ]
    value = tokens(4)
    shapes = []
    for stage in split(model, 5):
        value = stage(value)
        shapes.append(tuple(value.shape))
        assert value.is_contiguous() and not value._is_view()
    assert shapes == [(4, 5, 6)] * 4 + [(4, 5, VOCABULARY)]


def test_it_is_the_lstm_of_torch():
    """In evaluation: embedding, a stack of nn.LSTM from zero state, head."""
    model = tiny(num_layers=2).eval()
    stacked = nn.LSTM(6, 6, num_layers=2, batch_first=True)
    for i, layer in enumerate((model.layer1, model.layer2)):
        for name, parameter in layer.lstm.named_parameters():
            getattr(stacked, name.replace("l0", f"l{i}")).data.copy_(parameter)
    ids = tokens(3)
    with torch.no_grad():
        expected = model.head(stacked(model.embedding.embedding(ids))[0])
        assert torch.equal(model(ids), expected)


def test_rows_and_blocks_of_text_know_nothing_of_each_other():
    model = tiny().eval()
    ids = tokens(4)
    with torch.no_grad():
        logits = model(ids)
        assert torch.equal(model(ids), logits)  # no state is carried on
        torch.testing.assert_close(model(ids[2:]), logits[2:])
        cut = model(torch.cat([ids[:, :3], (ids[:, 3:] + 1) % VOCABULARY], dim=1))
    torch.testing.assert_close(cut[:, :3], logits[:, :3])  # causal
    assert not torch.equal(cut[:, 3:], logits[:, 3:])


def test_dropout_is_on_what_goes_from_layer_to_layer():
    model = tiny(dropout=0.5)
    outputs = []
    for stage in split(model, "paper")[:-1]:
        outputs.append(stage(outputs[-1] if outputs else tokens(40)))
        assert 0.4 < (outputs[-1] == 0).double().mean() < 0.6
    assert not any(one.lstm.dropout for one in (model.layer1, model.layer2))


def test_seed_decides_the_weights():
    made = [torch.cat([p.flatten() for p in tiny().parameters()]) for _ in range(2)]
    assert torch.equal(*made)
    torch.manual_seed(1)
    other = lstm_lm(VOCABULARY, hidden=6)
    assert not torch.equal(made[0], torch.cat([p.flatten() for p in other.parameters()]))
    assert isinstance(other, LSTMLM)


@pytest.mark.parametrize("name", ["vocab_size", "hidden", "num_layers"])
def test_sizes_below_one(name):
    with pytest.raises(ValueError, match=f"{name} is 0; pass 1 or more"):
        lstm_lm(**{"vocab_size": 5, name: 0})


# -- in a pipeline --------------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("count, chunks", SIZES)
@pytest.mark.parametrize("where", ["paper", 2, 4])
def test_compression_off_is_the_plain_model(where, count, chunks, recompute, global_rng_untouched):
    model = tiny()
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(
        model, chunks, split=where, loss_fn=CausalLMLoss(), recompute=recompute, seed=3
    )
    optimizers = adamw(pipe), adamw(plain)
    for step in range(3):
        ids = tokens(count, step)
        with global_rng_untouched():
            loss = pipe.forward_backward({"input_ids": ids, "labels": ids})
        sizes = SIZES[count, chunks]
        assert same_bits(loss, plain_step(plain, ids, sizes, where=where, step=step))
        for optimizer in optimizers:
            optimizer.step()
        assert_same_training(pipe, plain)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert not pipe.ties


def test_without_dropout_it_is_the_uncut_model():
    model = tiny(dropout=0.0)
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, 2, split="paper", loss_fn=CausalLMLoss())
    ids = tokens(6)
    loss = pipe.forward_backward(ids, ids)  # tensors do as well as a mapping
    assert same_bits(loss, plain_step(plain, ids, [3, 3], where=1, step=0))
    assert_same_training(pipe, plain)
    with torch.no_grad():
        pipe.eval(), plain.eval()
        expected = torch.cat([plain(part) for part in ids.split(3)])
        assert torch.equal(pipe(ids), expected)


@pytest.mark.parametrize("parted", [False, True])
def test_both_uses_of_a_tied_weight_give_the_sum_of_their_gradients(parted):
    model = tiny(tie=True, dropout=0.0)
    plain = copy.deepcopy(model)
    assert plain.head.weight is plain.embedding.embedding.weight
    cut = split(model, "paper")
    assert ties(cut) == [((0, "embedding.embedding.weight"), (2, "head.weight"))]
    assert merge(cut) is model and model.head.weight is model.embedding.embedding.weight
    way = {"split": "paper"} if parted else {"split": 2, "ties": "together"}
    pipe = mpcomp.pipeline(model, 1, loss_fn=CausalLMLoss(), **way)
    assert len(pipe.stages) == len(cut) == 3
    optimizers = adamw(pipe), adamw(plain)
    for step in range(3):
        ids = tokens(4, step)
        loss = pipe.forward_backward(ids, ids)
        assert same_bits(loss, plain_step(plain, ids, [4], where=1, step=step))
        held = {name: p.grad for name, p in pipe.named_parameters()}
        assert same_bits(held["embedding.embedding.weight"], plain.head.weight.grad)
        assert ("head.weight" in held) == parted
        if parted:
            assert same_bits(held["head.weight"], plain.head.weight.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ours = pipe.state_dict()
        assert same_bits(ours["head.weight"], ours["embedding.embedding.weight"])
        assert same_bits(ours["head.weight"], plain.head.weight)
    assert pipe.merge().head.weight is pipe.merge().embedding.embedding.weight


def test_tied_in_one_stage_is_no_tie():
    assert not ties(split(tiny(tie=True), 1))


def test_it_learns_through_compressed_cuts():
    """Counting modulo 11, which is learnt by heart."""
    model = tiny(hidden=24, dropout=0.0)
    pipe = mpcomp.pipeline(
        model,
        2,
        split="paper",
        act_comp="quant:4",
        grad_comp="ef+quant:4",
        loss_fn=CausalLMLoss(),
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.02)
    ids = (torch.arange(VOCABULARY)[:, None] + torch.arange(6)) % VOCABULARY
    losses = []
    for _ in range(60):
        losses.append(float(pipe.forward_backward(ids, ids)))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > 2.0 and losses[-1] < 0.1, losses[-1]
    assert pipe.wire_bytes < 0.25 * pipe.dense_bytes  # compressed indeed


def trained(alone, tie):
    """Two steps, with clipping: losses, and the whole model's weights."""
    engine = {"engine": "local"} if alone else {}
    pipe = mpcomp.pipeline(
        tiny(tie=tie),
        2,
        split=2,
        act_comp="ef21+quant:4",
        grad_comp="ef+topk:0.3",
        tie_comp="quant:8" if tie else None,
        loss_fn=CausalLMLoss(),
        **engine,
    )
    optimizer = adamw(pipe)
    losses = []
    for step in range(2):
        ids = tokens(5, step)
        losses.append(float(pipe.forward_backward({"input_ids": ids, "labels": ids})))
        mpcomp.clip_grad_norm_(pipe, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    model = pipe.merge()
    assert (model.head.weight is model.embedding.embedding.weight) == tie
    return losses, {name: value.tolist() for name, value in model.state_dict().items()}


def both(alone=False):
    """With weights apart and tied."""
    return [trained(alone, tie) for tie in (False, True)]


def test_two_processes_train_the_model_of_one(ranks):
    """Law 8, bit for bit; each gets the whole model in the end."""
    first, second = ranks(both, 2)
    assert first == second == both(alone=True)
