"""Replicas of a pipeline that share parameters: the numbers of those that do not, and its state."""

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from everyday import slow
from lm_runs import calm, text
from methods import same_bits
from models import adamw, images, rows
from runs import SINGLE, deep, deep_convnet

import mpcomp
from mpcomp import ReplicaNetwork

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

NETWORK = ReplicaNetwork(smallest=16)
#: Those that do not split backward.
SCHEDULES = (None, "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"


def pipe_of(schedule=None, ties=None, **kwargs):
    """Of a chain of layers, or with ``ties`` of a language model whose head is its embedding."""
    torch.manual_seed(0)
    stages = 2 if schedule in SINGLE else 4
    split = [str(8 * (i + 1) // stages - 1) for i in range(stages - 1)]
    options = {"split": split, "schedule": schedule, "replicas": 2, "timeout": 60.0}
    options |= {"loss_fn": F.cross_entropy, "network": NETWORK}
    if ties is not None:
        options |= {"split": stages, "loss_fn": None, "ties": ties}
    if "dp_comp" not in kwargs and "shard" not in kwargs:
        del options["network"]
    return mpcomp.pipeline(calm() if ties else deep(), 4, **{**options, **kwargs})


def optimizer_of(model, ties):
    if ties is None:
        return adamw(model)
    # The bias of a key has no gradient but rounding, which a smaller eps would scale up.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def batch_of(pipe, count, seed):
    return text(count, seed) if pipe.cut_stages[0].is_causal_lm else rows(count, seed)


def share_of(pipe, step):
    """This replica's half of a batch."""
    x, y = batch_of(pipe, 16, step)
    own = slice(8 * pipe.replica, 8 * pipe.replica + 8)
    if isinstance(x, dict):
        return {name: values[own] for name, values in x.items()}, y[own]
    return x[own], y[own]


def train(pipe, optimizer, steps, first=0, max_norm=0.5):
    """Losses and norms of steps."""
    said = []
    for step in range(first, first + steps):
        loss = pipe.forward_backward(*(share_of(pipe, step) if pipe.has_data else ()))
        norm = mpcomp.clip_grad_norm_(pipe, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        said.append(torch.stack([loss.float(), norm.float()]))
    return torch.stack(said)


def weights_of(pipe):
    return {name: x.clone() for name, x in pipe.merge().state_dict().items()}


def evaluated(pipe):
    return pipe.evaluate([batch_of(pipe, 8, 99)] if pipe.has_data else None)


def assert_near(a, b, bound=2e-6):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=bound)


def as_if_whole(schedule, ties, options):
    seen = []
    for kwargs in ({}, {"shard": True}):
        pipe = pipe_of(schedule, ties, act_comp="topk:0.5", **options, **kwargs)
        said = train(pipe, optimizer_of(pipe, ties), 2)
        judged = evaluated(pipe)
        said = torch.cat([said, train(pipe, optimizer_of(pipe, ties), 1, first=2)])
        seen.append((said, judged, weights_of(pipe)))
    (losses, judged, weights), (own, own_judged, own_weights) = seen
    torch.testing.assert_close(own, losses, rtol=0, atol=2e-6)
    assert own_judged == pytest.approx(judged, abs=2e-6)
    # Means of two replicas are the same; the norm is added up from pieces.
    assert_near(own_weights, weights)


@pytest.mark.parametrize(
    "schedule, ties, options",
    [
        (None, None, {}),
        (None, "together", {}),
        (None, None, {"data": "first"}),
        slow(None, "together", {"data": "first", "recompute": True}),
        *(slow(schedule, None, {}) for schedule in SCHEDULES[1:]),
    ],
)
def test_sharded_replicas_train_as_whole_ones(ranks, schedule, ties, options):
    ranks(as_if_whole, 4, schedule, ties, options)


def channels_last():
    seen = []
    for kwargs in ({}, {"shard": True, "param_comp": "none"}):
        torch.manual_seed(0)
        model = deep_convnet().to(memory_format=torch.channels_last)
        options = {"split": ["3"], "replicas": 2, "timeout": 60.0, "loss_fn": F.cross_entropy}
        pipe = mpcomp.pipeline(model, 2, act_comp="topk:0.5", **options, **kwargs)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
        for step in range(3):
            x, y = images(8, step)
            x = x.to(memory_format=torch.channels_last)
            own = slice(4 * pipe.replica, 4 * pipe.replica + 4)
            loss = pipe.forward_backward(x[own], y[own])
            optimizer.step()
            optimizer.zero_grad()
        seen.append((loss, weights_of(pipe)))
    torch.testing.assert_close(seen[1][0], seen[0][0], rtol=1e-4, atol=1e-5)
    assert_near(seen[1][1], seen[0][1], bound=1e-4)


@pytest.mark.slow
def test_weights_in_channels_last_memory(ranks):
    ranks(channels_last, 4)


def as_plain():
    """Two replicas, each with half of a batch, and the plain model with all of it."""
    pipe = pipe_of(ties="together", shard=True)
    torch.manual_seed(0)
    model = calm()
    optimizer, plain = optimizer_of(pipe, "together"), optimizer_of(model, "together")
    for step in range(3):
        x, y = text(16, step)
        loss = model(**x, labels=y).loss
        loss.backward()
        torch.testing.assert_close(
            pipe.forward_backward(*share_of(pipe, step)), loss.detach(), rtol=0, atol=2e-6
        )
        if pipe.mesh.place == 0:
            grads = dict(pipe.named_parameters())
            whole = grads[EMBEDDING].grad.full_tensor()
            torch.testing.assert_close(whole, model.get_parameter(EMBEDDING).grad)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    whole = pipe.merge()
    assert whole.get_parameter(HEAD) is whole.get_parameter(EMBEDDING)
    batch, _ = text(3, 9, "")
    with torch.no_grad():
        logits, expected = (each.eval()(**batch).logits for each in (whole, model))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
    told, expected = (each.generate(**batch, max_new_tokens=4) for each in (pipe, whole))
    assert same_bits(told, expected)


def test_a_tied_weight_trains_as_in_the_plain_model(ranks):
    ranks(as_plain, 4)


def pieces(ties):
    pipe = pipe_of(ties=ties, shard=True)
    whole = {name: p.shape for name, p in (calm() if ties else deep()).named_parameters()}
    held = {name: p.to_local().numel() for name, p in pipe.named_parameters()}
    assert held.keys() <= whole.keys()  # a tied weight once
    assert all(0 < held[name] < whole[name].numel() for name in held if whole[name][0] > 1)
    optimizer = optimizer_of(pipe, ties)
    train(pipe, optimizer, 1)
    for p in pipe.parameters():
        assert optimizer.state[p]["exp_avg"].to_local().numel() == p.to_local().numel()
    assert len(optimizer.state) == len(held)
    del whole
    gc.collect()
    wholes = [x for x in gc.get_objects() if type(x) is torch.nn.Parameter and not x.is_meta]
    assert wholes and not any(x.untyped_storage().size() for x in wholes)


@pytest.mark.parametrize("ties", [None, "together"])
def test_a_rank_holds_a_piece_of_parameters_and_of_the_optimizer(ranks, ties):
    ranks(pieces, 4, ties)


def frozen():
    pipe = pipe_of(ties="together", shard=True)
    weight = dict(pipe.named_parameters()).get(EMBEDDING)
    optimizer = optimizer_of(pipe, "together")
    train(pipe, optimizer, 1)
    before = weights_of(pipe)
    if weight is not None:
        weight.requires_grad_(False)
    train(pipe, optimizer, 1, first=1)
    assert weight is None or weight.grad is None
    after = weights_of(pipe)
    assert same_bits(after[HEAD], before[HEAD]) and same_bits(after[EMBEDDING], before[EMBEDDING])
    assert not same_bits(after["transformer.ln_f.weight"], before["transformer.ln_f.weight"])


def test_a_tied_weight_is_frozen_for_both_uses(ranks):
    ranks(frozen, 4)


def compressed(ties):
    comp = {"dp_comp": "conef+topk:0.1", "param_comp": "quant:8:scale=16"}
    pipe = pipe_of(ties=ties, shard=True, **comp)
    losses = train(pipe, optimizer_of(pipe, ties), 4)
    exact = evaluated(pipe)
    with pipe.uncompressed():
        whole = evaluated(pipe)
    report = pipe.report(show=False)["replicas"]
    exchange = pipe.exchange
    own = exchange.gathered.wire_bytes
    return losses, exact, whole, weights_of(pipe), report, len(exchange.history), own


@pytest.mark.parametrize("ties", [None, "together"])
def test_compressed_gradients_and_parameters(ranks, ties):
    found = ranks(compressed, 4, ties)
    _, exact, whole, weights, report, steps, _ = found[0]
    for other in found[1:]:
        assert same_bits(other[0], found[0][0])
        assert all(same_bits(other[3][name], weights[name]) for name in weights)
    assert steps == 4
    assert report["ratio"] < 0.5 and report["memory_bytes"] > 0
    gathered = report["parameters"]
    assert gathered["wire_bytes"] == sum(rank[-1] for rank in found)
    assert 0 < gathered["wire_bytes"] < 0.5 * gathered["dense_bytes"]
    assert exact != whole and exact == pytest.approx(whole, abs=0.05)


CASES = ({"dp_comp": "conef+topk:0.1"}, {"dp_comp": "ef+quant:4"}, {"dp_comp": "ef21+topk:0.1"})


def goes_on(root, ties):
    for number, kwargs in enumerate(CASES[: 1 if ties else None]):
        folder = Path(root) / f"{number}"
        straight = pipe_of(ties=ties, shard=True, **kwargs)
        optimizer = optimizer_of(straight, ties)
        train(straight, optimizer, 2)
        straight.save(folder, optimizer=optimizer)
        expected = train(straight, optimizer, 2, first=2)

        resumed = pipe_of(ties=ties, shard=True, **kwargs)
        other = optimizer_of(resumed, ties)
        train(resumed, other, 1)  # which must leave nothing
        resumed.load(folder, optimizer=other)
        assert same_bits(train(resumed, other, 2, first=2), expected), kwargs
        a, b = weights_of(resumed), weights_of(straight)
        assert all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("ties", [None, "together"])
def test_going_on_is_as_if_never_stopped(ranks, tmp_path, ties):
    ranks(goes_on, 4, str(tmp_path), ties)


def one_after_the_other(root):
    """As a recipe that compares runs does: the first one's groups are gone."""
    said = []
    for number in range(3):
        pipe = pipe_of(shard=True)
        optimizer = adamw(pipe)
        said.append(train(pipe, optimizer, 2))
        pipe.save(Path(root) / f"{number}", optimizer=optimizer)
        del pipe, optimizer
        gc.collect()
    assert same_bits(said[1], said[0]) and same_bits(said[2], said[0])


@pytest.mark.slow
def test_several_pipelines_in_one_process(ranks, tmp_path):
    ranks(one_after_the_other, 4, str(tmp_path))


def changes_sides(root, ties):
    """A checkpoint has whole tensors, so that other kinds of replicas go on from it."""
    ends = []
    for first, second in ((True, False), (False, True), (False, False)):
        folder = Path(root) / f"{first}{second}"
        pipe = pipe_of(ties=ties, shard=first)
        optimizer = optimizer_of(pipe, ties)
        train(pipe, optimizer, 2)
        pipe.save(folder, optimizer=optimizer)
        pipe = pipe_of(ties=ties, shard=second)
        optimizer = optimizer_of(pipe, ties)
        pipe.load(folder, optimizer=optimizer)
        train(pipe, optimizer, 1, first=2)
        ends.append(weights_of(pipe))
    assert_near(ends[0], ends[2])
    assert_near(ends[1], ends[2])


@pytest.mark.parametrize("ties", [None, "together"])
def test_a_checkpoint_loads_sharded_and_whole(ranks, tmp_path, ties):
    ranks(changes_sides, 4, str(tmp_path), ties)


def added_up(ties):
    ends = []
    for accumulate in (False, True):
        pipe = pipe_of(ties=ties, shard=True)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        if accumulate:
            with pipe.no_sync():
                pipe.forward_backward(*share_of(pipe, 0))
            pipe.forward_backward(*share_of(pipe, 1))
            optimizer.step()
        else:
            for step in (0, 1):  # gradients of the first are kept, and the second added
                pipe.forward_backward(*share_of(pipe, step))
            optimizer.step()
        ends.append(weights_of(pipe))
    assert_near(*ends)


@pytest.mark.slow
@pytest.mark.parametrize("ties", [None, "together"])
def test_accumulation(ranks, ties):
    ranks(added_up, 4, ties)


def diverges():
    pipe = pipe_of(shard=True, dp_comp="conef+topk:0.1")
    optimizer = adamw(pipe)
    train(pipe, optimizer, 2)
    state = pipe.exchange.state_dict()["tensors"]
    before = {name: x.clone() for name, x in state.items()}
    x, y = share_of(pipe, 2)
    if pipe.replica == 1:
        x = x * float("nan")
    with pytest.raises(FloatingPointError):
        pipe.forward_backward(x, y)
    optimizer.zero_grad()
    after = pipe.exchange.state_dict()["tensors"]
    assert all(same_bits(after[name], before[name]) for name in before)
    assert train(pipe, optimizer, 1, first=3).isfinite().all()


def test_a_step_that_is_not_finite_leaves_no_trace(ranks):
    ranks(diverges, 4)


def refused():
    said = []
    for kwargs in (
        {"shard": True, "schedule": "ZBVZeroBubble"},
        {"shard": True, "schedule": "InterleavedZeroBubble"},
        {"shard": True, "dp_comp": "powersgd:2"},
        {"shard": True, "network": ReplicaNetwork(per_machine=2)},
        {"shard": True, "ties": "apart"},
        {"param_comp": "quant:8"},
    ):
        with pytest.raises(ValueError) as caught:
            pipe_of(**kwargs)
        said.append(str(caught.value))
    with pytest.raises(TypeError, match="without a memory"):
        pipe_of(shard=True, param_comp="ef+topk:0.1")
    return said


def test_refused_on_all_ranks(ranks):
    found = ranks(refused, 4)
    assert all(said == found[0] for said in found)
    for said, words in zip(
        found[0],
        (
            "'ZBVZeroBubble', which splits",
            "splits backward",
            "LowRank",
            "one owner",
            "leave ties='apart' out",
            "shard=True",
        ),
        strict=True,
    ):
        assert words in said


def test_sharding_wants_replicas():
    with pytest.raises(ValueError, match="replicas=2"):
        mpcomp.pipeline(deep(), 4, split=2, shard=True)
