"""Losses with parameters of their own are trained, averaged and saved as beside a plain model."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from everyday import slow
from methods import same_bits
from models import CLASSES, mlp, rows
from torch import nn

import mpcomp

STEPS = 3


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, output, target):
        self.calls += 1
        return F.cross_entropy(output * self.t.exp(), target)

    def of_method(self, output, target, scale=1.0):
        return self(output, target) * scale


class Tasks(nn.Module):
    """Weights of two tasks by their uncertainty, of which one does not depend on the output."""

    def __init__(self):
        super().__init__()
        self.log_var = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, output, target):
        two = F.cross_entropy(output, target), output.square().mean()
        return sum(v.neg().exp() * x + v for x, v in zip(two, self.log_var, strict=True))


class Margin(nn.Module):
    """ArcFace: directions of classes, and a margin at the right one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, CLASSES))

    def forward(self, output, target):
        cosine = F.linear(F.normalize(output), F.normalize(self.weight))
        turned = cosine.clamp(-0.99, 0.99).acos() + 0.2 * F.one_hot(target, 7)
        return F.cross_entropy(4.0 * turned.cos(), target)


class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, output, target):
        apart = (output - self.centres[target]).square().sum(1).mean()
        return F.cross_entropy(output, target) + 0.1 * apart


class Adaptive(nn.Module):
    def __init__(self):
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(CLASSES, 9, [2, 5])

    def forward(self, output, target):
        return self.softmax(output, target).loss


class Head(nn.Module):
    """A projection that trains, and a frozen network that does not."""

    def __init__(self):
        super().__init__()
        self.project = nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.teacher = nn.Sequential(nn.Linear(CLASSES, 3), nn.Dropout(0.5)).eval()
        self.teacher.requires_grad_(False)

    def forward(self, output, target):
        near = (self.teacher(output) - 1).square().mean()
        return F.cross_entropy(self.project(output), target) + near


LOSSES = {each.__name__: each for each in (Temperature, Tasks, Margin, Centres, Adaptive, Head)}
WRAPPED = {
    "module": lambda loss: loss,
    "partial": lambda loss: functools.partial(loss.of_method, scale=2.0),
    "method": lambda loss: loss.of_method,
}


def made(name):
    torch.manual_seed(0)
    return mlp(), LOSSES[name]()


def optimizer_of(model, loss):
    return torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)


def trained(model, loss, step, steps=range(STEPS), count=8, optimizer=None):
    optimizer = optimizer or optimizer_of(model, loss)
    losses = []
    for i in steps:
        optimizer.zero_grad()
        losses.append(step(*rows(count, i)).item())
        optimizer.step()
    return losses


def plain(name, count=8, wrap=lambda loss: loss):
    model, loss = made(name)

    def step(x, y):
        value = wrap(loss)(model(x), y)
        value.backward()
        return value

    return trained(model, loss, step, count=count), model, loss


def values(loss):
    return {name: p.detach().clone() for name, p in loss.named_parameters()}


def assert_near(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_however_it_is_called(wrap):
    expected, _, of_plain = plain("Temperature", wrap=wrap)
    model, loss = made("Temperature")
    pipe = mpcomp.pipeline(model, 2, split=2, loss_fn=wrap(loss))
    assert trained(pipe, loss, pipe.forward_backward) == pytest.approx(expected, rel=1e-4)
    assert_near(values(loss), values(of_plain))


@pytest.mark.parametrize("name", LOSSES)
def test_one_process_trains_and_saves_as_the_plain_model(name, tmp_path):
    expected, of_model, of_plain = plain(name)
    model, loss = made(name)
    before = values(loss)
    pipe = mpcomp.pipeline(model, 2, split=2, loss_fn=loss)
    assert pipe.state_dict().keys() == of_model.state_dict().keys()
    optimizer = optimizer_of(pipe, loss)
    losses = trained(pipe, loss, pipe.forward_backward, range(2), optimizer=optimizer)
    pipe.save(tmp_path / "run", optimizer=optimizer)
    losses += trained(pipe, loss, pipe.forward_backward, [2], optimizer=optimizer)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_near(values(loss), values(of_plain))
    assert_near(dict(pipe.named_parameters()), dict(of_model.named_parameters()))
    assert any(not torch.equal(before[n], p) for n, p in loss.named_parameters())
    assert pipe.merge().state_dict().keys() == of_model.state_dict().keys()

    model, again = made(name)  # and goes on as if never stopped
    with torch.no_grad():
        for each in (*model.parameters(), *again.parameters()):
            each.zero_()
    pipe = mpcomp.pipeline(model, 2, split=2, loss_fn=again)
    optimizer = optimizer_of(pipe, again)
    pipe.load(tmp_path / "run", optimizer=optimizer)
    assert trained(pipe, again, pipe.forward_backward, [2], optimizer=optimizer) == losses[2:]
    assert all(map(same_bits, again.state_dict().values(), loss.state_dict().values()))


def test_norm_and_scaler_count_it():
    x, y = rows(8)
    model, loss = made("Temperature")
    value = loss(model(x), y)
    value.backward()
    both = [*model.parameters(), *loss.parameters()]
    expected = torch.nn.utils.clip_grad_norm_(both, 0.1)
    clipped = loss.t.grad.clone()

    model, loss = made("Temperature")
    pipe = mpcomp.pipeline(model, 2, split=2, loss_fn=loss)
    pipe.forward_backward(x, y)
    torch.testing.assert_close(mpcomp.clip_grad_norm_(pipe, 0.1), expected)
    torch.testing.assert_close(loss.t.grad, clipped)

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    pipe = mpcomp.pipeline(*made("Temperature")[:1], 2, split=2, loss_fn=loss, scaler=scaler)
    optimizer = optimizer_of(pipe, loss)
    loss.t.register_hook(lambda grad: grad * math.inf)
    optimizer.zero_grad()
    before = loss.t.item()
    pipe.forward_backward(x, y)
    scaler.step(optimizer)
    scaler.update()
    assert loss.t.item() == before and scaler.get_scale() == 4.0
    pipe.forward_backward(x, y)  # of the step before it is known now that it was skipped
    assert pipe.step_skipped


def test_the_mode_of_a_loss_is_the_users():
    model, loss = made("Head")
    pipe = mpcomp.pipeline(model, 2, split=2, loss_fn=loss)
    pipe.eval()
    assert loss.training
    pipe.train()
    assert not loss.teacher.training
    pipe.evaluate([rows(8)])
    assert loss.training and not loss.teacher.training


def test_buffers_without_parameters():
    """A memory of the loss is saved; constants of torch's losses and a frozen network are not."""

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(CLASSES))

        def forward(self, output, target):
            self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)
            return F.cross_entropy(output, target) + 0 * (output - self.mean).sum()

    loss = Remembers()
    pipe = mpcomp.pipeline(mlp(), 2, split=2, loss_fn=loss)
    pipe.forward_backward(*rows(8))
    state = pipe.with_loss.state_dict()
    assert same_bits(state["loss_fn.mean"], loss.mean) and loss.mean.abs().sum() > 0
    frozen = Head().requires_grad_(False)
    for loss in (nn.CrossEntropyLoss(weight=torch.ones(CLASSES)), frozen):
        pipe = mpcomp.pipeline(mlp(), 2, split=2, loss_fn=loss)
        pipe.forward_backward(*rows(8))
        assert not any(name.startswith("loss_fn") for name in pipe.with_loss.state_dict())


# -- refused --------------------------------------------------------------------------------------


def hidden(kind):
    t = nn.Parameter(torch.ones(3, 1))
    module = Temperature()
    return {
        "closure": lambda o, y: F.cross_entropy(o * t.mean(), y),
        "module in a closure": lambda o, y: module(o, y),
        "tensor": lambda o, y: F.cross_entropy(o + t.detach().requires_grad_().sum(), y),
        "list": lambda o, y, held=(t,): F.cross_entropy(o, y) + held[0].square().sum(),
        "object": type("Holds", (), {"__call__": lambda self, o, y: module(o, y)})(),
    }[kind]


@pytest.mark.parametrize("kind", ["closure", "module in a closure", "tensor", "list", "object"])
def test_a_parameter_that_a_function_uses_is_refused_in_the_first_step(kind):
    pipe = mpcomp.pipeline(mlp(), 2, split=2, loss_fn=hidden(kind))
    with pytest.raises(ValueError, match=r"shape \[.*\] that is no parameter of.*nn.Module"):
        pipe.forward_backward(*rows(8))
    assert pipe.num_steps == 0


def test_what_a_function_may_use():
    """The model's own parameters, and a network that it asks without gradients."""
    model, teacher = mlp(), Head()

    def loss(output, target):
        with torch.no_grad():
            aim = teacher(output, target)
        return F.cross_entropy(output, target) + aim + model.three.weight.square().sum()

    pipe = mpcomp.pipeline(model, 2, split=2, loss_fn=loss)
    assert pipe.forward_backward(*rows(8)).isfinite()


class Both(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.t = model, nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.cross_entropy(output * self.t, target)


def test_what_cannot_be_in_the_last_stage_is_refused():
    model = mlp()
    with pytest.raises(ValueError, match=r"of its own \(t\) and the model's \(model.one.weight\)"):
        mpcomp.pipeline(model, 2, split=2, loss_fn=Both(model))
    model = mlp()
    model.loss_fn = nn.Identity()
    with pytest.raises(ValueError, match="a 'loss_fn' of its own"):
        mpcomp.pipeline(model, 2, split=2, loss_fn=Temperature())


@pytest.mark.parametrize("of", ["an encoder", "a loss that was not given", "an older model"])
def test_a_foreign_parameter_in_the_optimizer_is_named_at_save_and_load(of, tmp_path):
    pipe = mpcomp.pipeline(mlp(), 2, split=2, loss_fn=F.cross_entropy)
    modules = {"an encoder": nn.Linear(2, 3), "a loss that was not given": Temperature()}
    other = modules.get(of, mlp())
    optimizer = optimizer_of(pipe, other)
    shape = list(next(other.parameters()).shape)
    pipe.save(tmp_path / "run", optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))
    for call in (pipe.save, pipe.load):
        with pytest.raises(ValueError, match="not the pipeline's") as error:
            call(tmp_path / "run", optimizer=optimizer)
        assert f"parameter 6: shape {shape}" in str(error.value)
        assert "loss_fn=loss" in str(error.value)


# -- ranks ----------------------------------------------------------------------------------------


def train_on_ranks(names, split, folder, **options):
    outcomes = []
    for name in names:
        model, loss = made(name)
        pipe = mpcomp.pipeline(model, 2, split=split, loss_fn=loss, **options)
        optimizer = optimizer_of(pipe, loss)

        def step(x, y, pipe=pipe):
            half = len(x) // pipe.num_replicas
            mine = slice(pipe.replica * half, (pipe.replica + 1) * half)
            value = pipe.forward_backward(x[mine], y[mine])
            mpcomp.clip_grad_norm_(pipe, 10.0)
            return value

        losses = trained(pipe, loss, step, range(2), optimizer=optimizer)
        pipe.save(f"{folder}/{name}", optimizer=optimizer)
        losses += trained(pipe, loss, step, [2], optimizer=optimizer)
        end = {} if next(loss.parameters()).is_meta else values(loss)
        pipe.load(f"{folder}/{name}", optimizer=optimizer)
        again = trained(pipe, loss, step, [2], optimizer=optimizer)
        if end:
            assert all(same_bits(end[n], v) for n, v in values(loss).items())
        assert again == losses[2:]
        outcomes.append((losses, end))
    return outcomes


def halves(one, other):
    """Two ways, each with every other loss; and, slow, with those that the other way has."""
    names = list(LOSSES)
    return [
        (one, names[::2]),
        (other, names[1::2]),
        slow(one, names[1::2]),
        slow(other, names[::2]),
    ]


@pytest.mark.parametrize(
    "schedule, names",
    [
        *halves(None, "ZBVZeroBubble"),
        *(slow(schedule, list(LOSSES)) for schedule in ("GPipe", "InterleavedZeroBubble")),
    ],
)
def test_two_ranks_are_one_process(schedule, names, ranks, tmp_path):
    blocks = ("one", "two", "relu") if schedule and "Zero" in schedule else 2
    run = functools.partial(train_on_ranks, schedule=schedule)
    found = ranks(run, 2, names, blocks, str(tmp_path / "ranks"))
    alone = train_on_ranks(names, blocks, str(tmp_path / "alone"), engine="local")
    for name, first, last, (losses, end) in zip(names, *found, alone, strict=True):
        assert first[0] == last[0] == losses, name
        held = [of for of in (first[1], last[1]) if of]
        assert len(held) == 1, "the rank of the last stage has it"
        assert all(same_bits(held[0][n], v) for n, v in end.items()), name


@pytest.mark.parametrize("dp_comp, names", halves(None, "topk:1"))
def test_replicas_stay_alike_and_have_the_plain_models(dp_comp, names, ranks, tmp_path):
    run = functools.partial(train_on_ranks, replicas=2, dp_comp=dp_comp)
    found = ranks(run, 2, names, 1, str(tmp_path))
    for name, first, second in zip(names, *found, strict=True):
        expected, _, of_plain = plain(name)
        assert first[0] == second[0] == pytest.approx(expected, rel=1e-4), name
        assert all(same_bits(v, second[1][n]) for n, v in first[1].items()), name
        assert_near(first[1], values(of_plain))
