"""Gradients that are None in the plain model: so they are in one process, and on many ranks.

Zeros in their place would let momentum and weight decay move the weights.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from methods import same_bits
from models import CLASSES, rows
from runs import KINDS, SCHEDULES, Kind, Run, assert_same, descending, train, train_all, with_stages
from torch import Tensor, nn

import mpcomp

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

WIDTH, BLOCKS = 13, 8


class _Stopped(torch.autograd.Function):
    """A copy whose backward gives no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


class Block(nn.Linear):
    """A layer that may keep a gradient from its input, or from a parameter."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__(WIDTH, width)
        self.kind = kind
        self.calls = 0
        if "extra" in kind:
            self.extra = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += type(x) is Tensor  # and none without data
        sometimes = not self.kind.endswith("sometimes") or self.calls % 3 == 1
        if self.kind.startswith("stopped") and sometimes:
            x = _Stopped.apply(x)
        elif self.kind.startswith("detached") and sometimes:
            x = x.detach()
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and not (self.kind.startswith("constant") and sometimes)
        ):
            y = super().forward(x)
        if self.kind == "extra sometimes" and sometimes:
            y = y * self.extra
        return y if self.out_features == CLASSES else torch.tanh(y)


def of(tied: bool = False, **kinds: str) -> Kind:
    """A chain of blocks, some of a kind, by "b" and their number."""

    def make() -> nn.Module:
        widths = [WIDTH] * (BLOCKS - 1) + [CLASSES]
        model = nn.Sequential(*(Block(kinds.get(f"b{i}", ""), w) for i, w in enumerate(widths)))
        if tied:
            model[6].weight = model[0].weight
        return model

    return Kind(make, rows, blocks=BLOCKS)


MEMBERS = {
    "last stage detached": of(b7="detached"),
    "middle stage detached": of(b4="detached"),
    "several detached": of(b2="detached sometimes", b4="detached sometimes", b6="detached"),
    "detached at times": of(b5="detached sometimes"),
    "stopped": of(b4="stopped"),
    "stopped at times": of(b6="stopped sometimes"),
    "constant": of(b4="constant"),
    "constant at times": of(b3="constant sometimes", b4="constant sometimes"),
    "unused": of(b1="extra", b6="extra"),
    "used at times": of(b1="extra sometimes", b7="extra sometimes"),
    "tied": of(True, b4="detached"),
    "tied and unused": of(True, b7="detached"),
    "tied and at times": of(True, b5="detached sometimes"),
}
KINDS.update(MEMBERS)

METHODS = [
    {},
    {"act": "topk:0.5", "grad": "ef+topk:0.5"},
    {"act": "aqsgd+quant:4", "grad": "ef21+topk:0.5"},
    {"act": "step:0.3", "grad": "step:0.3"},
]


def runs_of(members, methods, **options) -> list[Run]:
    return [
        Run(member, steps=3, optimizer=("adamw", "sgd")[(i + j) % 2], **method, **options)
        for i, member in enumerate(members)
        for j, method in enumerate(methods)
        if len(methods) < 3 or j in (0, 1 + i % (len(methods) - 1))
    ]


def plain(run: Run) -> tuple[list[set[str]], dict[str, Tensor]]:
    """Names of None gradients by step, and weights at last, of the plain model."""
    torch.manual_seed(run.seed)
    model = KINDS[run.model].make()
    options = {"adamw": {"lr": 0.01}, "sgd": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}}
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[run.optimizer]
    optimizer = made(model.parameters(), **options[run.optimizer])
    without = []
    for step in range(run.steps):
        x, y = KINDS[run.model].batch(run.rows[0], step)
        for a, b in zip(x.chunk(run.chunks), y.chunk(run.chunks), strict=True):
            (F.cross_entropy(model(a), b) * (len(b) / len(y))).backward()
        without.append({n for n, p in model.named_parameters() if p.grad is None})
        optimizer.step()
        optimizer.zero_grad()
    return without, model.state_dict()


def train_members(runs):
    """As `train_all`, found here, where the members are known."""
    return train_all(runs)


def check(ranks, num_ranks, runs):
    all_ours = list(zip(*ranks(train_members, num_ranks, runs), strict=True))
    for run, ours in zip(runs, all_ours, strict=True):
        alone = descending(run) if run.schedule == "LoopedBFS" else train(run)
        assert_same(run, ours, alone)
        if run.stages == num_ranks:  # all cuts are between ranks
            for outcome in ours:
                wire, dense = outcome.bytes
                assert wire == sum(w for w, _ in alone.sent.values()), run
                assert dense == sum(d for _, d in alone.sent.values()), run


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_one_process_is_the_plain_model(member, optimizer):
    run = Run(member, rows=(8,), steps=3, stages=3, optimizer=optimizer)
    alone = train(run)
    without, weights = plain(run)
    tied = {"6.weight"} if "tied" in member else set()
    # Copies of a tie have a name each.
    assert [names - tied for names in alone.without] == without
    for name, value in weights.items():
        if not tied:  # whose gradients are added up in another order
            assert same_bits(alone.state[name], value), name
    if not member.endswith("at times"):
        assert any(without), "a member has a gradient that is None"


@pytest.mark.timeout(120)
def test_two_ranks(ranks):
    check(ranks, 2, runs_of(MEMBERS, METHODS))


@pytest.mark.timeout(120)
def test_three_ranks(ranks):
    check(ranks, 3, runs_of(MEMBERS, METHODS[1:3], stages=3))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("schedules", [SCHEDULES[:4], SCHEDULES[4:]], ids=str)
def test_every_schedule(ranks, schedules):
    members = ("last stage detached", "detached at times", "stopped at times", "constant at times")
    runs = [
        with_stages(run, 2)
        for schedule in schedules
        for run in runs_of(members, METHODS[1:2], schedule=schedule)
    ]
    check(ranks, 2, runs)


@pytest.mark.timeout(120)
def test_clipping_scalers_and_what_goes_with_messages(ranks):
    """Also shapes that change, several connections, checksums, and a frozen stage."""
    options = (
        {"clip": 0.1},
        {"scale": 64.0, "clip": 0.1},
        {"scale": 64.0, "overflow": (1, 1)},
        {"rows": (10, 7)},
        {"pipeline": {"connections": 3}},
        {"pipeline": {"checks": "message"}},
        {"accumulate": 2},
        {"frozen": ("0.", "1.", "2.", "3.")},
    )
    (one,) = runs_of(("several detached",), METHODS[1:2])
    (other,) = runs_of(("last stage detached",), METHODS[2:3])
    runs = [replace(run, **option) for run in (one, other) for option in options]
    runs.append(replace(other, pipeline={"recompute": True}))
    runs += runs_of(("tied", "tied and unused"), METHODS[1:2], clip=0.1)
    check(ranks, 2, runs)


# -- replicas --------------------------------------------------------------------------------------


class Chosen(nn.Module):
    """Parameters that all replicas use, one does, or none."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.used = used
        self.of_all = nn.Linear(WIDTH, WIDTH)
        self.of_one = nn.Linear(WIDTH, WIDTH)
        self.of_none = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.of_all(x)
        return y + self.of_one(x) if self.used else y


def train_replicas(dp_comps):
    """By method: names without gradients in each step, and weights at last."""
    results = []
    for dp_comp in dp_comps:
        torch.manual_seed(0)
        first = Chosen(used=dist.get_rank() >= 2)  # of the second replica
        model = nn.Sequential(first, nn.Linear(WIDTH, WIDTH), Chosen(True), nn.Linear(WIDTH, 5))
        pipe = mpcomp.pipeline(
            copy.deepcopy(model),
            2,
            split=2,
            replicas=2,
            loss_fn=F.cross_entropy,
            dp_comp=dp_comp,
            timeout=60.0,
        )
        ours = train_steps(pipe, pipe.parameters(), pipe.replica, pipe.forward_backward)
        results.append((ours, {n: p.detach().clone() for n, p in pipe.named_parameters()}))
    return results


def train_steps(module, parameters, replica, backward):
    """Names of None gradients by step."""
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)
    without = []
    for step in range(3):
        backward(*rows(6, 10 * step + replica))
        without.append({n for n, p in module.named_parameters() if p.grad is None})
        optimizer.step()
        optimizer.zero_grad()
    return without


@pytest.mark.timeout(120)
def test_replicas(ranks):
    """None where no replica has a gradient; zeros where another has one, and the mean of both."""
    results = ranks(train_replicas, 4, [None, "topk:0.5", "ef+topk:0.3", "powersgd:1"])
    untouched = {f"{i}.of_none.{name}" for i in (0, 2) for name in ("weight", "bias")}
    torch.manual_seed(0)
    begin = nn.Sequential(Chosen(False), nn.Linear(WIDTH, WIDTH), Chosen(True), nn.Linear(WIDTH, 5))
    for of_method in zip(*results, strict=True):
        for rank, (without, weights) in enumerate(of_method):
            assert without == [untouched & set(weights)] * 3
            for name, value in weights.items():
                assert same_bits(value, of_method[rank ^ 2][1][name]), name
                assert same_bits(value, dict(begin.named_parameters())[name]) == (name in untouched)
