"""Updates within a step: by which weights each gradient is made, and what they cannot go with."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from lms import language_model
from methods import same_bits
from models import CONV_SPLIT, MLP_SPLIT, convnet, images, mlp, resnet, rows, sgd
from torch import nn
from torch.func import functional_call

import mpcomp
from mpcomp.engines.updates import StashedWeights, Updates, in_flight_of, lag_of

UPDATES, OF_EACH, NUM_STAGES = 6, 2, 3
CHUNKS = UPDATES * OF_EACH


def piped(model: nn.Module, **options) -> mpcomp.Pipeline:
    chosen = {"split": MLP_SPLIT, "loss_fn": F.cross_entropy, "seed": 3, **options}
    return mpcomp.pipeline(model, CHUNKS, **chosen)


def updating(optimizer: torch.optim.Optimizer):
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def by_hand(model: nn.Sequential, x, y, lags) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss and weights after all updates, each by gradients at weights of ``lags`` before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    versions = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    losses = []
    for t, (xs, ys) in enumerate(zip(x.chunk(UPDATES), y.chunk(UPDATES), strict=True)):
        old = {
            name: versions[max(0, t - lags[name])][name].clone().requires_grad_()
            for name in versions[0]
        }
        for part, target in zip(xs.chunk(OF_EACH), ys.chunk(OF_EACH), strict=True):
            loss = F.cross_entropy(functional_call(model, old, part), target) * (1 / OF_EACH)
            loss.backward()
            losses.append(loss.detach() * (1 / UPDATES))
        for name, parameter in model.named_parameters():
            parameter.grad = old[name].grad
        optimizer.step()
        versions.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return sum(losses), versions[-1]


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_of_weights_that_lack_an_update_for_each_stage_that_follows(recompute):
    """And of nothing else: with exact links the weights are those of the rule, computed by hand."""
    torch.manual_seed(0)
    model = mlp()
    x, y = rows(3 * CHUNKS)
    lags = {"one": 2, "two": 1, "three": 0}
    of_name = {name: lags[name.split(".")[0]] for name, _ in model.named_parameters()}
    pipe = piped(model, recompute=recompute)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    loss = pipe.forward_backward(x, y, update=updating(optimizer), updates=UPDATES)
    found = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    model.load_state_dict(start)
    expected_loss, expected = by_hand(model, x, y, of_name)
    torch.testing.assert_close(loss, expected_loss)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    # Not those of the newest weights.
    model.load_state_dict(start)
    _, synchronous = by_hand(model, x, y, dict.fromkeys(of_name, 0))
    assert not torch.allclose(found["one.weight"], synchronous["one.weight"], rtol=1e-4)


def test_one_update_is_a_step():
    """Bit for bit, with compression and state in links."""
    options = {"act_comp": "ef21+topk:0.3", "grad_comp": "ef+topk:0.3"}
    ends = []
    for within in (True, False):
        torch.manual_seed(0)
        pipe = piped(mlp(), **options)
        optimizer = sgd(pipe)
        losses = []
        for step in range(3):
            x, y = rows(2 * CHUNKS, seed=step)
            if within:
                losses.append(pipe.forward_backward(x, y, update=updating(optimizer)))
            else:
                losses.append(pipe.forward_backward(x, y))
                updating(optimizer)()
        assert pipe.num_steps == 3
        ends.append((torch.stack(losses), dict(pipe.state_dict()), pipe.wire_bytes))
    (loss, weights, sent), (other_loss, others, other_sent) = ends
    assert same_bits(loss, other_loss) and sent == other_sent
    assert all(same_bits(weights[name], value) for name, value in others.items())


def test_an_update_weighs_the_terms_of_its_own_microbatches():
    """Tokens that do not count are left out of the mean of each, and of the mean over all."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
    pipe = mpcomp.pipeline(model, 4, split=2, loss_fn=F.cross_entropy)
    x, y = torch.randn(8, 4), torch.tensor([1, 2, 3, -100, -100, -100, 0, 4])
    gradients = []

    def update() -> None:
        gradients.append([p.grad.clone() for p in pipe.parameters()])
        pipe.zero_grad()

    loss = pipe.forward_backward(x, y, update=update, updates=2)
    torch.testing.assert_close(loss, F.cross_entropy(model(x), y))
    assert len(gradients) == 2
    for half, found in enumerate(gradients):
        rows_of = slice(4 * half, 4 * half + 4)
        expected = torch.autograd.grad(
            F.cross_entropy(model(x[rows_of]), y[rows_of]), list(pipe.parameters())
        )
        torch.testing.assert_close(found, list(expected))


def untied(family: str):
    return lambda: language_model(family, tie_word_embeddings=False)


def text(count: int):
    ids = torch.randint(3, 53, (count, 7), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}, None


@pytest.mark.parametrize(
    "make, split, batch",
    [
        pytest.param(convnet, CONV_SPLIT, images, id="convnet"),
        pytest.param(resnet, "paper", images, id="resnet"),
        pytest.param(untied("gpt2"), 3, text, id="gpt2"),
        pytest.param(untied("llama"), 3, text, id="llama"),
    ],
)
def test_copies_of_weights_stand_for_those_of_any_stage(make, split, batch):
    """Weights that change behind a forward do not change its backward: bit for bit as if never."""
    torch.manual_seed(0)
    model = make()
    count = 5
    loss_fn = F.cross_entropy if batch is images else None
    batch_of_call, target = batch(2 * count)
    gradients = []
    for changes in (False, True):
        pipe = mpcomp.pipeline(copy.deepcopy(model), count, split=split, loss_fn=loss_fn)
        lag = len(pipe.stages) - 1
        before = [p.detach().clone() for p in pipe.parameters()]
        found = []

        def update(pipe=pipe, found=found, changes=changes, before=before) -> None:
            found.append([p.grad.clone() for p in pipe.parameters()])
            pipe.zero_grad()
            for p in pipe.stages[0].parameters() if changes else ():
                p.data.mul_(0.5)

        pipe.forward_backward(batch_of_call, target, update=update, updates=count)
        gradients.append(found)
        assert changes != all(map(torch.equal, pipe.parameters(), before))
    same, changed = gradients
    for number in range(lag + 1):  # the first stage's weights are those of the start
        assert all(map(same_bits, same[number], changed[number]))
    assert not all(map(torch.equal, same[lag + 1], changed[lag + 1]))


def test_weights_that_are_not_trained_and_buffers_are_not_copied():
    stage = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    stage[0].requires_grad_(False)
    stashed = StashedWeights(stage, Updates(lambda: None, 2, 1), lag=1, kept=1)
    old = stashed.stage_for(0)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(1)
    stashed.updated()
    x = torch.randn(8, 3)
    out = old(x)
    out.sum().backward()
    assert stage[0].weight.grad is None and stage[1].bias.grad is not None
    assert stage[1].num_batches_tracked == 1
    expected = F.batch_norm(stage[0](x), None, None, torch.ones(3), torch.zeros(3), training=True)
    torch.testing.assert_close(out, expected)


def test_a_whole_model_can_stand_for_its_stages():
    """Each parameter with the lag of the stage that it would be in."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    lags = {name: lag_of(int(name[0]), 3) for name, _ in model.named_parameters()}
    stashed = StashedWeights(model, Updates(lambda: None, 5, 1), lags, kept=2)
    x = torch.randn(5, 3)
    outputs, versions = [], []
    for number in range(5):
        versions.append(copy.deepcopy(model))
        outputs.append(stashed.stage_for(number)(x))
        outputs[-1].sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
        stashed.updated()
    for number, output in enumerate(outputs):
        expected = x
        for stage in range(3):
            expected = versions[max(0, number - lag_of(stage, 3))][stage](expected)
        torch.testing.assert_close(output, expected)
    assert not torch.allclose(outputs[-1], versions[-1](x))


def test_weights_older_than_a_stage_keeps_are_an_error():
    stashed = StashedWeights(nn.Linear(2, 2), Updates(lambda: None, 3, 1), lag=2, kept=1)
    for _ in range(2):
        stashed.updated()
    with pytest.raises(IndexError):
        stashed.stage_for(1)


def test_as_many_microbatches_are_under_way_as_the_lag_allows():
    updates = Updates(lambda: None, 8, 2)
    assert [lag_of(stage, 4) for stage in range(4)] == [3, 2, 1, 0]
    assert in_flight_of(updates.microbatches, 4) == 7
    assert [updates.number_of(i) for i in (0, 1, 2, 15)] == [0, 0, 1, 7]
    assert [updates.follows(i) for i in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    "options, updates, message",
    [
        ({}, 5, "pass a divisor of chunks"),
        ({}, 0, "pass a divisor of chunks"),
        ({"scaler": torch.amp.GradScaler("cpu")}, 2, "loss scaler"),
    ],
)
def test_updates_that_cannot_be_made(options, updates, message):
    pipe = piped(mlp(), **options)
    with pytest.raises(ValueError, match=message):
        pipe.forward_backward(*rows(CHUNKS), update=lambda: None, updates=updates)


def test_updates_without_update():
    with pytest.raises(ValueError, match="pass the function"):
        piped(mlp()).forward_backward(*rows(CHUNKS), updates=2)


def test_tied_weights_are_refused():
    model = nn.Sequential(nn.Embedding(7, 4), nn.ReLU(), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    pipe = mpcomp.pipeline(model, 2, split=["0", "1"], loss_fn=F.cross_entropy)
    ids, y = torch.randint(7, (4,)), torch.randint(7, (4,))
    with pytest.raises(ValueError, match="untie or freeze"):
        pipe.forward_backward(ids, y, update=lambda: None, updates=2)


class Recurrent(nn.Module):
    """An LSTM's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


def test_recurrent_layers_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), Recurrent())
    pipe = mpcomp.pipeline(model, 2, split=2, loss_fn=F.mse_loss)
    x = torch.randn(4, 3, 4)
    with pytest.raises(ValueError, match="is an LSTM"):
        pipe.forward_backward(x, x, update=lambda: None, updates=2)


def test_the_norm_over_all_stages_is_refused_in_an_update():
    pipe = piped(mlp())

    def update() -> None:
        mpcomp.clip_grad_norm_(pipe, 1.0)

    with pytest.raises(ValueError, match="clip each stage by its own norm"):
        pipe.forward_backward(*rows(CHUNKS), update=update, updates=2)
    assert not pipe.updating
    mpcomp.clip_grad_norm_(pipe, 1.0)


def test_a_trace_shows_updates(tmp_path):
    pipe = piped(mlp())
    with pipe.trace(tmp_path / "trace.json", steps=1):
        pipe.forward_backward(*rows(CHUNKS), update=pipe.zero_grad, updates=UPDATES)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    updates = [event for event in events if event.get("args", {}).get("kind") == "update"]
    assert len(updates) == UPDATES and {event["cat"] for event in updates} == {"compute"}


def test_an_update_that_fails_leaves_the_stages_as_they_are():
    """The next step computes with the weights there are."""
    pipe = piped(mlp())

    def update() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        pipe.forward_backward(*rows(CHUNKS), update=update, updates=2)
    pipe.zero_grad()
    x, y = rows(2 * CHUNKS, seed=1)
    torch.testing.assert_close(pipe.forward_backward(x, y), F.cross_entropy(pipe.merge()(x), y))
