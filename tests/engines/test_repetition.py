"""Recomputing changes no bit: forwards that read what they write, and forwards that draw."""

import copy
import itertools
import random
import warnings
from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from everyday import slow_after
from methods import same_bits
from models import plain_step
from ranks import preload
from torch import nn

import mpcomp
from mpcomp.core.microbatch import rows_of_chunks
from mpcomp.engines import repetition

preload("test_repetition")
WIDTH, CLASSES, STEPS = 6, 3, 3


class CodeBook(nn.Module):
    """Vector quantisation whose codes follow what is given to them, as in VQ-VAE."""

    def __init__(self, through_data):
        super().__init__()
        self.through_data = through_data
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(5, WIDTH))

    def forward(self, x):
        x = self.linear(x)
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        quantised = x + (self.codes[nearest] - x).detach() * x.abs()
        codes = self.codes.data if self.through_data else self.codes
        with torch.no_grad():
            codes.mul_(0.9).index_add_(0, nearest, x.detach(), alpha=0.1)
        return quantised


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x).mul(self.calls.clone()).tanh() * x


class Renormalising(nn.Module):
    """Divides by what it has just written, in a new tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        x = self.linear(x)
        self.scale = 0.5 * self.scale + 0.5 * x.detach().std(0, correction=0)
        return (x / self.scale).sigmoid() * x


class Attributes(nn.Module):
    """Remembers in attributes: a number, a tensor that is no buffer, a list, a dict, an array."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls, self.last = 0, None
        self.seen, self.newest = [], deque(maxlen=2)
        self.sums = {"x": 0.0}
        self.array = np.zeros(2)

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        self.newest.append(self.calls / 8)
        self.sums["x"] += len(x) / 16
        self.array[self.calls % 2] += 1
        factor = 1 + self.calls + len(self.seen) + self.sums["x"] + self.array[0] + sum(self.newest)
        before = 0 if self.last is None else self.last.mean()
        self.last = x.detach().clone()
        return (self.linear(x) * factor + before).tanh() * x


class Drawing(nn.Module):
    """Dropout by numbers from anywhere."""

    def __init__(self, draw):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.draw = draw
        self.generator = torch.Generator().manual_seed(1)
        self.random = random.Random(2)
        self.rng = np.random.default_rng(3)
        self.state = np.random.RandomState(4)

    def forward(self, x):
        mask = torch.as_tensor(self.draw(self, WIDTH), dtype=torch.float32)
        return self.linear(x * (mask > 0.4)).tanh() * (1 + mask)


def python_draws(_, n):
    return [random.random() for _ in range(n)]


def numpy_draws(_, n):
    return np.random.rand(n)  # noqa: NPY002


def torch_draws(_, n):
    return torch.rand(n)


def module_draws(module, n):
    return torch.rand(n, generator=module.generator)


def pythons_own(module, n):
    return [module.random.random() for _ in range(n)]


def numpys_own(module, n):
    return module.rng.random(n)


def numpys_old(module, n):
    return module.state.rand(n)


DRAWS = (
    python_draws, numpy_draws, torch_draws, module_draws, pythons_own, numpys_own, numpys_old
)  # fmt: skip


class Shared(nn.Module):
    """One buffer under two names, written under one and read under the other."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(1))
        self.inner = nn.Module()
        self.inner.register_buffer("count", self.count)

    def forward(self, x):
        self.count.add_(1)
        return (self.linear(x) * self.inner.count.clone()).tanh() * x


class Bounded(nn.Module):
    """An embedding whose rows are scaled down where they are looked up."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH, max_norm=0.7)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        ids = (x.detach().abs().sum(1) * 10).long() % 7
        return self.linear(x) * self.embedding(ids).exp()


class TwoNorms(nn.Module):
    """BatchNorm, and one without a factor for the past, whose mean depends on its count."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)
        self.two.eval()  # in training its statistics are not read

    def forward(self, x):
        return (self.one(x) + self.two(x)).tanh() * x


class OfImages(nn.Module):
    """InstanceNorm, with statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)

    def forward(self, x):
        return self.norm(x.unflatten(1, (2, 3))).flatten(1) * x


MEMBERS = {
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "parametrized": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "code book": lambda: CodeBook(False),
    "code book, .data": lambda: CodeBook(True),
    "counting": Counting,
    "renormalising": Renormalising,
    "attributes": Attributes,
    "shared": Shared,
    "max_norm": Bounded,
    "batch norms": TwoNorms,
    "instance norm": OfImages,
    **{draw.__name__: (lambda draw=draw: Drawing(draw)) for draw in DRAWS},
}


def model_of(name):
    """Two blocks of a kind, with others around: in one stage, or in one each."""
    seed_all()
    return nn.Sequential(
        nn.Linear(4, WIDTH), MEMBERS[name](), nn.Tanh(),
        nn.Linear(WIDTH, WIDTH), MEMBERS[name](), nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


def seed_all():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


def generators():
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.arange(8) % CLASSES


#: What each kind of generator says of itself.
STATES = {
    torch.Generator: torch.Generator.get_state,
    random.Random: random.Random.getstate,
    np.random.Generator: lambda rng: rng.bit_generator.state,
    np.random.RandomState: np.random.RandomState.get_state,
}


def held(pipe):
    """All that modules of the pipeline hold: tensors, attributes, states of generators."""
    found = {}
    for stage in pipe.stages:
        for name, module in stage.named_modules(remove_duplicate=False):
            if not isinstance(module, Attributes | Drawing | nn.Linear):
                continue
            for key, value in vars(module).items():
                if key not in vars(nn.Module()) and not callable(value):
                    state = STATES.get(type(value), copy.copy)(value)
                    found[f"{name}.{key}"] = copy.deepcopy(state)
        for name, tensor in itertools.chain(stage.named_parameters(), stage.named_buffers()):
            found[name] = tensor.detach().clone()
    return found


def same(a, b):
    if isinstance(a, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def trained(name, recompute, chunks, split=2, **options):
    """Losses, gradients, and all that modules and the process hold, after a few steps."""
    pipe = mpcomp.pipeline(
        model_of(name), chunks, split=split, loss_fn=F.cross_entropy, recompute=recompute, **options
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    seed_all()
    losses, grads = [], []
    for step in range(STEPS):
        losses.append(pipe.forward_backward(*data(step)))
        grads.append({key: p.grad.clone() for key, p in pipe.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, held(pipe), generators()


@pytest.mark.each_once
@pytest.mark.parametrize("chunks, split", [(1, 2), (4, 2), (3, [1, 1, 2, 1, 1]), (2, [5, 1])])
@pytest.mark.parametrize("name", MEMBERS)
def test_recomputing_changes_no_bit(name, chunks, split):
    kept = trained(name, False, chunks, split)
    again = trained(name, True, chunks, split)
    assert all(map(same, kept, again))


# From the generators of the process the stages draw in turn, the plain model in another order.
@pytest.mark.parametrize("name", sorted(MEMBERS.keys() - {"python_draws", "numpy_draws"}))
def test_recomputing_is_the_plain_model(name):
    sizes = rows_of_chunks(8, 3)
    plain, where = model_of(name), [3, 3]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    seed_all()
    expected, grads = [], []
    for step in range(STEPS):
        x, y = data(step)
        expected.append(plain_step(plain, x, y, sizes, where=where, step=step))
        grads.append({key: p.grad.clone() for key, p in plain.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    losses, ours, state, _ = trained(name, True, 3, where)
    assert same(losses, expected) and same(ours, grads)
    for key, buffer in plain.named_buffers():
        assert same(state[key], buffer), key


@pytest.mark.parametrize("name", MEMBERS)
def test_backward_by_the_caller_in_evaluation(name):
    """Dropout may be on there, and then no seed of the step is in force."""

    def gradients(recompute):
        pipe = mpcomp.pipeline(model_of(name), 4, split=2, recompute=recompute).eval()
        seed_all()
        for step in range(2):
            x, y = data(step)
            F.cross_entropy(pipe(x), y).backward()
        return {key: p.grad for key, p in pipe.named_parameters()}, held(pipe), generators()

    assert all(map(same, gradients(False), gradients(True)))


# -- several ranks --------------------------------------------------------------------------------

SCHEDULES = {None: 2, "GPipe": 2, "Interleaved1F1B": 4, "LoopedBFS": 4}


def in_ranks(cases):
    return [
        trained(
            name, recompute, 4, 2 if stages == 2 else [2, 1, 2, 1], schedule=schedule, timeout=60.0
        )
        for name, schedule, stages in cases
        for recompute in (False, True)
    ]


@pytest.mark.parametrize("first", slow_after(1, range(2)))
def test_two_ranks_in_any_schedule(ranks, first):
    """Each member in one schedule; and the same as one process, but for draws of the process."""
    schedules = itertools.cycle(SCHEDULES.items())
    cases = [(name, *next(schedules)) for name in [*MEMBERS][first::2]]
    results = ranks(in_ranks, 2, cases)
    for of_rank in results:
        for i, (name, schedule, _) in enumerate(cases):
            kept, again = of_rank[2 * i : 2 * i + 2]
            assert kept[1][0] and all(map(same, kept, again)), (name, schedule)


# -- what is kept for it --------------------------------------------------------------------------


class Tables(nn.Module):
    """Writes to a large buffer, and reads another; both together are most of the stage."""

    def __init__(self, first=0):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("read", torch.ones(1 << 15))
        self.register_buffer("written", torch.ones(1 << 15))
        self.first, self.calls = first, 0

    def forward(self, x):
        x = self.linear(x) * self.read[0] * self.written[1].clone()
        if self.calls >= self.first:
            self.written.mul_(1.5)
        self.calls += 1
        return x.tanh() * x


class Noted(repetition.Repetitions):
    """Tells what it keeps, after each forward."""

    kept: list

    def _noting(self, tensors):
        noting = super()._noting(tensors)

        @contextmanager
        def noted():
            with noting:
                yield
            self.kept.append({held.key for held in tensors if held.copy is not None})

        return noted()


def test_only_what_forwards_write_is_copied_for_each_microbatch(monkeypatch):
    monkeypatch.setattr(Noted, "kept", [], raising=False)
    monkeypatch.setattr("mpcomp.engines.stage_runner.Repetitions", Noted)
    monkeypatch.setitem(MEMBERS, "tables", Tables)
    trained("tables", True, 4)
    assert len(Noted.kept) == 2 * 4 * STEPS
    assert all(kept == {"written"} for kept in Noted.kept)


def test_a_large_buffer_that_is_written_later_is_said():
    """Its old values are gone in that microbatch, and are there in all later ones."""
    model = nn.Sequential(nn.Linear(4, WIDTH), Tables(first=5), nn.Linear(WIDTH, CLASSES))
    pipe = mpcomp.pipeline(model, 4, split=2, loss_fn=F.cross_entropy, recompute=True)
    pipe.forward_backward(*data(0))
    with pytest.warns(UserWarning, match=r"a forward wrote to 1\.written, as none before it did"):
        pipe.forward_backward(*data(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.zero_grad()
        plain = copy.deepcopy(pipe.merge())
        loss = pipe.forward_backward(*data(2))
        assert same(loss, plain_step(plain, *data(2), [2] * 4))
    for key, parameter in plain.named_parameters():
        assert same(dict(pipe.named_parameters())[key].grad, parameter.grad)


def test_repetitions_go_without_a_trace_of_an_error():
    """Autograd ends a repetition early; a forward may, too."""
    model = nn.Sequential(nn.Linear(4, WIDTH), Attributes(), Counting(), nn.Linear(WIDTH, CLASSES))
    pipe = mpcomp.pipeline(model, 2, split=2, loss_fn=F.cross_entropy, recompute=True)
    x, y = data(0)
    loss = F.cross_entropy(pipe(x), y)
    fails = model[1].linear.register_forward_hook(lambda *_: 1 / 0)
    before = held(pipe)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    fails.remove()
    assert same(held(pipe), before)
    loss = F.cross_entropy(pipe(x), y)
    loss.backward()
    assert model[1].calls == 4 and int(model[2].calls) == 4
