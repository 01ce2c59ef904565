"""Plans: what crosses each cut is known without running the model, and without touching it."""

import copy
import random

import numpy as np
import pytest
import torch
from methods import same_bits
from models import (
    CLASSES,
    CONV_SPLIT,
    MLP_SPLIT,
    RESNET_SPLIT,
    convnet,
    images,
    mlp,
    resnet,
    rows,
)
from torch import fx, nn

import mpcomp
from mpcomp import TensorMeta
from mpcomp.checkpoint.weights import to_meta
from mpcomp.core.microbatch import rows_of_chunks, scatter
from mpcomp.engines import shape_inference
from mpcomp.engines.shape_inference import Planner
from mpcomp.engines.stage_runner import Autocast
from mpcomp.links.link import Link
from stages import split

CPU = torch.device("cpu")


class Masked(nn.Module):
    """A first stage of two arguments, and an attention-like third axis."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.one = nn.Sequential(nn.Linear(12, 10), nn.ReLU())
        self.rest = nn.Linear(10, CLASSES)

    def forward(self, ids, mask):
        return self.rest(self.one(self.embed(ids) * mask.unsqueeze(-1)).sum(dim=1))


def by_name(count):
    return {"ids": torch.randint(20, (count, 7)), "mask": torch.rand(count, 7)}


def by_place(count):
    return tuple(by_name(count).values())


def last_channels(count):
    return images(count)[0].contiguous(memory_format=torch.channels_last)


class Turned(nn.Module):
    """Axes in another order, as ConvNeXt has them round its normalisation."""

    def __init__(self, *axes):
        super().__init__()
        self.axes = axes
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x * self.scale).permute(self.axes)


def turning():
    turns = [Turned(0, 2, 3, 1), Turned(0, 3, 1, 2)]
    return nn.Sequential(*turns, nn.Flatten(), nn.Linear(3 * 64, CLASSES))


CASES = {
    "mlp": (mlp, MLP_SPLIT, lambda n: rows(n)[0]),
    "convnet": (convnet, CONV_SPLIT, lambda n: images(n)[0]),
    "resnet": (resnet, RESNET_SPLIT, lambda n: images(n, side=16)[0]),
    "convnet, channels last": (convnet, CONV_SPLIT, last_channels),
    "resnet, channels last": (resnet, RESNET_SPLIT, last_channels),
    "tuple": (Masked, ("embed", "one"), by_place),
    "mapping": (Masked, ("embed", "one"), by_name),
    "turning": (turning, [1, 1, 2], lambda n: images(n)[0]),
}


def plan(model, where, x, train=True):
    """A plan for a batch in one piece."""
    planner = Planner(split(model, where), CPU)
    model.train(train)
    return planner.plan(x, Autocast.of_caller(CPU))


@pytest.fixture
def crossed(monkeypatch):
    """What links are really given, by (microbatch, boundary)."""
    seen = {}
    encode = Link.encode

    def noting(self, x, step, microbatch, *args):
        if self.direction == "act":
            seen[microbatch, self.boundary] = TensorMeta.of(x)
        return encode(self, x, step, microbatch, *args)

    monkeypatch.setattr(Link, "encode", noting)
    return seen


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_plan_says_what_crosses(name, dtype, train, crossed):
    """Shape, dtype and memory order, for microbatches of different sizes (10 rows in 4)."""
    make, where, batch = CASES[name]
    model = make()
    if "channels last" in name:
        model = model.to(memory_format=torch.channels_last)
    planner = Planner(split(copy.deepcopy(model).train(train), where), CPU)
    pipe = mpcomp.pipeline(model, 4, split=where).train(train)
    x = batch(10)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        pipe(x)
        plans = [
            planner.plan(part, Autocast.of_caller(CPU))
            for part in scatter(x, rows_of_chunks(10, 4))
        ]
    assert {
        (i, j): meta for i, metas in enumerate(plans) for j, meta in enumerate(metas)
    } == crossed
    assert {meta.shape[0] for meta in crossed.values()} == {2, 3}
    assert any(meta.channels_last for meta in crossed.values()) == (
        "channels last" in name or name == "turning"
    )
    if dtype is not None:
        assert (dtype in {meta.dtype for meta in crossed.values()}) == (name != "turning")


@pytest.mark.parametrize("own", [0, 1, 2])
@pytest.mark.parametrize("make, where", [(mlp, MLP_SPLIT), (convnet, CONV_SPLIT)])
def test_stages_of_other_ranks_are_on_meta(make, where, own):
    """All ranks make the same plan, each with other stages."""
    x = rows(4)[0] if make is mlp else images(4)[0]
    expected = plan(make(), where, x)
    cut = split(make(), where)
    for i, stage in enumerate(cut):
        if i != own:
            to_meta(stage)
    assert Planner(cut, CPU).plan(x, Autocast.of_caller(CPU)) == expected


def test_a_plan_of_a_model_that_is_all_on_meta():
    with torch.device("meta"):
        model = resnet()
    x = images(4)[0]
    assert plan(model, RESNET_SPLIT, x) == plan(resnet(), RESNET_SPLIT, x)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("make, where", [(convnet, CONV_SPLIT), (resnet, RESNET_SPLIT)])
def test_nothing_notices_a_plan(make, where, train, global_rng_untouched):
    """Neither weights, nor BatchNorm's statistics, nor dropout's generator, nor the batch."""
    model = make().train(train)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    x = images(6)[0]
    kept = x.clone()
    with global_rng_untouched():
        plan(model, where, x, train)
    after = model.state_dict(keep_vars=True)
    assert {name: id(tensor) for name, tensor in after.items()} == objects
    assert all(same_bits(after[name], before[name]) for name in before)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(module.training == train for module in model.modules())
    assert same_bits(x, kept) and not x.requires_grad
    model(x)  # with tensors of its own


class Caching(nn.Module):
    """Makes its table when first called, as rotary embeddings do; has a plain tensor besides."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(13, 13)
        self.shift = torch.randn(13)
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(13.0)
        return self.linear(x) + self.table * self.shift


def test_what_forward_keeps_on_a_module_is_not_the_plans():
    model = nn.Sequential(Caching(), *mlp())
    x = rows(4)[0]
    expected = copy.deepcopy(model)(x)
    assert plan(model, [1, 5], x) == [TensorMeta((4, 13))]
    assert model[0].table is None
    assert same_bits(model(x), expected)


def test_what_forward_counts_and_draws_is_put_back():
    """A plan is no forward: one process makes none."""

    class Noting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(13, 13)
            self.sizes, self.array, self.rng = [], np.zeros(1), np.random.default_rng(0)
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, x):
            self.sizes.append(len(x))
            self.array += 1
            drawn = random.random() + np.random.rand() + self.rng.random()  # noqa: NPY002
            return self.linear(x) + drawn + torch.rand(1, generator=self.generator)

    def state(noting):
        states = noting.rng.bit_generator.state, noting.generator.get_state().tolist()
        return [*noting.sizes, *noting.array], random.getstate(), np.random.rand(), states  # noqa: NPY002

    model = nn.Sequential(Noting(), *mlp())
    found = []
    for planned in (False, True):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        if planned:
            plan(model, [1, 5], rows(4)[0])
        found.append(state(model[0]))
    assert found[0] == found[1]


def test_weights_tied_within_a_stage():
    model = nn.Sequential(nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 13), nn.Linear(13, 5))
    model[2].weight = model[0].weight
    assert plan(model, [3, 1], rows(4)[0]) == [TensorMeta((4, 13))]


def test_values_of_plain_python_count():
    """What is no tensor in a batch is passed on, and belongs to the plan."""

    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(13, 13)

        def forward(self, x, times):
            return self.linear(x).repeat(1, times)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Repeated()
            self.last = nn.LazyLinear(5)

        def forward(self, x, times):
            return self.last(self.first(x, times))

    model = Whole()
    x = rows(4)[0]
    model(x, 2)
    planner = Planner(split(model, ["first"]), CPU)
    autocast = Autocast.of_caller(CPU)
    for times in (2, 3):
        metas = planner.plan({"x": x, "times": times}, autocast)
        assert metas == [TensorMeta((4, 13 * times))]


# -- one plan serves every batch of the same shapes -----------------------------------------------


class Counted(nn.Module):
    def __init__(self, calls):
        super().__init__()
        self.linear = nn.Linear(13, 13)
        self.note = calls.append  # a list of the module's own would be put back

    def forward(self, x):
        self.note(x.shape)
        return self.linear(x)


def test_a_plan_is_made_once_for_each_kind_of_batch():
    calls = []
    cut = split(nn.Sequential(Counted(calls), *mlp()), [1, 5])
    planner = Planner(cut, CPU)
    off = Autocast.of_caller(CPU)

    def runs(x, autocast=off):
        calls.clear()
        metas = planner.plan(x, autocast)
        assert metas[0].shape == x.shape
        return len(calls)

    assert [runs(rows(4)[0]), runs(rows(4, seed=1)[0])] == [1, 0]
    assert [runs(rows(3)[0]), runs(rows(3)[0]), runs(rows(4)[0])] == [1, 0, 0]
    assert runs(rows(4)[0].t().contiguous().t()) == 1  # another memory order
    with torch.autocast("cpu", dtype=torch.bfloat16):
        on = Autocast.of_caller(CPU)
    assert [runs(rows(4)[0], on), runs(rows(4)[0], on), runs(rows(4)[0])] == [1, 0, 0]
    for stage in cut:
        stage.eval()
    assert [runs(rows(4)[0]), runs(rows(4)[0])] == [1, 0]


# -- models that have no plan ---------------------------------------------------------------------


class Does(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(13, 13)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x.max().item(),
        lambda x: x[x[:, 0] > 0],
        lambda x: torch.from_numpy(x.detach().numpy()),
    ],
    ids=["branch", "item", "rows", "numpy"],
)
def test_a_forward_that_depends_on_values_is_named(function):
    model = nn.Sequential(Does(function), *mlp())
    message = r"stage 0 \(0\) cannot be run without data.*depends on the values.*which it must not"
    with pytest.raises(RuntimeError, match=message):
        plan(model, [1, 5], rows(4)[0])
    assert all(type(p) is nn.Parameter for p in model.parameters())
    torch.randn(1)  # no mode is left behind
    assert type(torch.ones(1)) is torch.Tensor


@pytest.mark.parametrize(
    "function, error, message",
    [
        (lambda x: x.argmax(1), TypeError, "boundary 0 act: a torch.int64 tensor cannot cross"),
        (lambda x: x[:, :0], ValueError, r"boundary 0 act: an empty activation of shape \[4, 0\]"),
        (lambda x: (x, x), TypeError, "stage 0.*returned a tuple"),
    ],
)
def test_what_cannot_cross_is_refused_before_anything_runs(function, error, message):
    with pytest.raises(error, match=message):
        plan(nn.Sequential(Does(function), *mlp()), [1, 5], rows(4)[0])


def test_a_batch_of_another_size_is_an_error_of_the_model():
    with pytest.raises(
        RuntimeError, match=r"stage 0 \(one to tanh\) cannot be run.*4, 12.*does not fit the model"
    ):
        plan(mlp(), MLP_SPLIT, torch.randn(4, 12))


# -- what changes in a batch ----------------------------------------------------------------------


class Changing(nn.Module):
    """Four stages, of a batch with something that is no tensor in it."""

    def __init__(self, calls):
        super().__init__()
        self.one, self.two, self.three = (Counted(calls) for _ in range(3))
        self.last = nn.Linear(13, CLASSES)

    def forward(self, x, given):
        x = x * scale_of(given)
        return self.last(self.three(self.two(self.one(x))))


@fx.wrap
def scale_of(given):
    return 1 + (sum(map(ord, str(given))) % 17) / 16


GIVEN = {
    "float": lambda i: i / 7,
    "int": lambda i: i,
    "string": lambda i: f"name {i}",
    "list": lambda i: [i, "of", i + 1],
    "mapping": lambda i: {"a": i, "b": ("deep", i)},
    "sometimes none": lambda i: i if i % 3 else None,
    "flag and number": lambda i: (bool(i % 2), i),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_changes_in_a_batch_is_not_kept_for_ever(name):
    """Nor are stages run again that do not take it."""
    calls = []
    model = Changing(calls)
    planner = Planner(split(model, ["one", "two", "three"]), CPU)
    autocast = Autocast.of_caller(CPU)
    x = rows(4)[0]
    for i in range(100):
        assert (
            planner.plan({"x": x, "given": GIVEN[name](i)}, autocast) == [TensorMeta((4, 13))] * 3
        )
    different = len({repr(GIVEN[name](i)) for i in range(100)})
    assert len(calls) == different + 2
    assert len(planner._known) <= 3 * shape_inference._REMEMBERED < 100
    calls.clear()
    planner.plan({"x": x, "given": GIVEN[name](99)}, autocast)
    assert not calls  # the newest are there


def test_a_batch_that_comes_again_is_not_forgotten_for_those_that_change():
    calls = []
    planner = Planner(split(Changing(calls), ["one", "two", "three"]), CPU)
    autocast = Autocast.of_caller(CPU)
    x = rows(4)[0]
    for i in range(100):
        planner.plan({"x": x, "given": i}, autocast)
        planner.plan({"x": x[:3], "given": "evaluation"}, autocast)
    assert len(calls) == 100 + 2 + 3


def test_torchs_notes_of_operations_are_bounded_too(monkeypatch):
    """It keeps one for each number that an operation was ever given."""
    monkeypatch.setattr(shape_inference, "_RUNS", 10)
    planner = Planner(split(Changing([]), ["one", "two", "three"]), CPU)
    sizes = []
    for i in range(100):
        planner.plan({"x": rows(4)[0], "given": i}, Autocast.of_caller(CPU))
        sizes.append(len(shape_inference.FakeTensorMode.cache))
    assert max(sizes[20:]) <= max(sizes[:20])
