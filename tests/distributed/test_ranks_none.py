"""Gradients that are None in the plain model: so they are in one process, and on many ranks.

Zeros in their place would let momentum and weight decay move the weights.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from everyday import by_halves, slow_after
from methods import same_bits
from models import CLASSES, rows
from runs import (
    COMMON,
    KINDS,
    SCHEDULES,
    Kind,
    Run,
    assert_same,
    descending,
    train,
    train_all,
    with_stages,
)
from strict import strictly
from torch import Tensor, nn

import mpcomp
from mpcomp import Adaptive, ErrorFeedback, TopK

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

#: A ratio that is chosen anew in every step.
ADAPTIVE = Adaptive(
    ErrorFeedback(TopK(0.1)),
    cf=(2.0, 20.0),
    window=1,
    bandwidth_mbps=1.0,
    latency_ms=0.1,
    compute_ms=0.5,
)
METHODS = [
    {},
    {"act": "topk:0.5", "grad": "ef+topk:0.5"},
    {"act": "aqsgd+quant:4", "grad": "ef21+topk:0.5"},
    {"act": "step:0.3", "grad": "step:0.3"},
    {"act": "klt:weighted=true+step:0.3", "grad": "klt+step:0.3"},
    {"act": "topk:0.5", "grad": "same"},
    {"act": ADAPTIVE, "grad": ADAPTIVE},
]


def runs_of(members, methods, **options) -> list[Run]:
    return [
        Run(member, steps=3, optimizer=("adamw", "sgd")[(i + j) % 2], **method, **options)
        for i, member in enumerate(members)
        for j, method in enumerate(methods)
        if len(methods) < 3 or j in (0, 1 + i % 3, 4 + i % 3)
    ]


def in_turn(turn: int, of: int, runs: list[Run]) -> list[Run]:
    """Of so many runs of each member, or of each schedule, one: another for the next."""
    return [run for i, run in enumerate(runs) if (i + i // of) % of == turn]


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


def check(ranks, num_ranks, runs, train_them=train_members):
    all_ours = list(zip(*ranks(train_them, num_ranks, runs), strict=True))
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
@pytest.mark.parametrize("turn", slow_after(1, range(3)))
def test_two_ranks(ranks, turn):
    check(ranks, 2, in_turn(turn, 3, runs_of(MEMBERS, METHODS)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", slow_after(1, range(2)))
def test_three_ranks(ranks, turn):
    check(ranks, 3, in_turn(turn, 2, runs_of(MEMBERS, METHODS[1:3], stages=3)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", slow_after(1, range(4)))
def test_every_schedule(ranks, turn):
    members = ("last stage detached", "detached at times", "stopped at times", "constant at times")
    runs = [
        with_stages(run, 2)
        for schedule in SCHEDULES
        for run in runs_of(members, METHODS[1:2], schedule=schedule)
    ]
    check(ranks, 2, in_turn(turn, 4, runs))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", slow_after(1, range(2)))
def test_clipping_scalers_and_what_goes_with_messages(ranks, turn):
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
    runs = [replace(run, **option) for option in options for run in (one, other)]
    runs = in_turn(turn, 2, runs)
    runs.append(replace(other, pipeline={"recompute": True}))
    runs += runs_of(("tied", "tied and unused"), METHODS[1:2], clip=0.1)
    check(ranks, 2, runs)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_model_of_these_tests(ranks):
    """They use all their parameters; with some frozen these have no gradient either."""
    runs = [Run(name, steps=2) for name in COMMON]
    runs += [Run("deep", steps=2, frozen=(f"{i}.",)) for i in (0, 3, 5)]
    check(ranks, 2, runs)


def train_with_updates(members):
    """By member: None gradients before each update of a step, and the weights."""
    results = []
    for member in members:
        torch.manual_seed(0)
        options = {"timeout": 60.0} if dist.is_initialized() else {"engine": "local"}
        pipe = mpcomp.pipeline(
            KINDS[member].make(),
            6,
            split=2,
            loss_fn=F.cross_entropy,
            grad_comp="ef+topk:0.5",
            **options,
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01, weight_decay=0.5)
        without = []

        def update(pipe=pipe, optimizer=optimizer, without=without):
            without.append({n for n, p in pipe.named_parameters() if p.grad is None})
            optimizer.step()
            optimizer.zero_grad()

        for step in range(2):
            pipe.forward_backward(*rows(12, step), update=update, updates=3)
        results.append((without, pipe.merge().state_dict(), pipe.wire_bytes))
    return results


@pytest.mark.timeout(120)
def test_updates_within_a_step(ranks):
    """Six updates, of two microbatches each, in an asynchronous pipeline."""
    members = ("last stage detached", "detached at times", "stopped", "constant", "unused")
    all_ours = zip(*ranks(train_with_updates, 2, members), strict=True)
    for member, ours, alone in zip(members, all_ours, train_with_updates(members), strict=True):
        found = [set.union(*each) for each in zip(*(without for without, *_ in ours), strict=True)]
        assert found == alone[0] and len(found) == 6
        assert any(found) or member == "detached at times"
        for _, state, wire_bytes in ours:
            assert wire_bytes == alone[2]
            assert all(same_bits(state[name], value) for name, value in alone[1].items())


@pytest.mark.timeout(120)
def test_where_lengths_must_be_equal_and_nothing_is_posted_ahead(ranks):
    """NCCL's rules: a notice is as long as the message that was due, and is waited for as one."""
    members = ("several detached", "detached at times", "constant at times", "tied and at times")
    runs = [
        *runs_of(members, METHODS[:2]),
        *(
            Run(each, steps=8, chunks=2, rows=(64,), ids=64, act="topk:0.5", grad="klt+step:0.05")
            for each in members
        ),
    ]
    for run, *ours in zip(runs, *ranks(train_strictly, 2, runs), strict=True):
        assert_same(run, ours, train(run))


def train_strictly(runs):
    with strictly():
        return train_all(runs)


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


def train_replicas(all_options):
    """By options: names without gradients in each step, and weights at last."""
    results = []
    for options in all_options:
        torch.manual_seed(0)
        first = Chosen(used=dist.get_rank() >= 2)  # of the second replica
        model = nn.Sequential(first, nn.Linear(WIDTH, WIDTH), Chosen(True), nn.Linear(WIDTH, 5))
        pipe = mpcomp.pipeline(
            copy.deepcopy(model),
            2,
            replicas=2,
            loss_fn=F.cross_entropy,
            timeout=60.0,
            **{"split": 2, **options},
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01, weight_decay=0.5)
        pipe.follow(optimizer)
        without = []
        for step in range(4):
            pipe.forward_backward(*rows(6, 10 * step + pipe.replica))
            without.append({n for n, p in pipe.named_parameters() if p.grad is None})
            optimizer.step()
            optimizer.zero_grad()
        held = {name for name, _ in pipe.named_parameters()}
        weights = {n: x.clone() for n, x in pipe.merge().state_dict().items() if n in held}
        results.append((without, weights))
    return results


#: Ways for replicas to make one gradient of theirs, the last five with pieces of each parameter.
REPLICAS = [
    {},
    {"dp_comp": "topk:0.5"},
    {"dp_comp": "ef+topk:0.3"},
    {"dp_comp": "powersgd:1"},
    {"shard": True},
    {"shard": True, "dp_comp": "topk:0.5"},
    {"shard": True, "dp_comp": "conef+topk:0.3"},
    {"shard": True, "param_comp": "bf16"},
    {"shard": True, "split": 4, "schedule": "Interleaved1F1B"},
]
UNTOUCHED = {f"{i}.of_none.{name}" for i in (0, 2) for name in ("weight", "bias")}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ways", by_halves(REPLICAS))
def test_replicas(ranks, ways):
    """None where no replica has a gradient; zeros where another has one, and the mean of both."""
    results = ranks(train_replicas, 4, ways)
    torch.manual_seed(0)
    begin = nn.Sequential(Chosen(False), nn.Linear(WIDTH, WIDTH), Chosen(True), nn.Linear(WIDTH, 5))
    for of_way in zip(*results, strict=True):
        for rank, (without, weights) in enumerate(of_way):
            assert without == [UNTOUCHED & set(weights)] * 4
            for name, value in weights.items():
                assert same_bits(value, of_way[rank ^ 2][1][name]), name
                assert same_bits(value, dict(begin.named_parameters())[name]) == (name in UNTOUCHED)


def add_up(all_options):
    """By options: gradients of a step, and after another in which a stage detaches its input."""
    results = []
    for options in all_options:
        torch.manual_seed(0)
        pipe = mpcomp.pipeline(
            of(b5="detached sometimes").make(),
            2,
            split=2,
            replicas=2,
            loss_fn=F.cross_entropy,
            timeout=60.0,
            **options,
        )
        found = []
        for step in range(2):
            for block in pipe.modules():
                if isinstance(block, Block) and step:
                    block.kind = block.kind.removesuffix(" sometimes")
            pipe.forward_backward(*rows(8, 10 * step + pipe.replica))
            grads = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
            found.append(
                {n: pipe.mesh.whole(grad, "gradients").clone() for n, grad in grads.items()}
            )
        results.append(found)
    return results


@pytest.mark.timeout(120)
def test_gradients_of_an_earlier_step_stay(ranks):
    options = [{}, {"dp_comp": "topk:0.5"}, {"shard": True}, {"shard": True, "dp_comp": "topk:0.5"}]
    for of_rank in ranks(add_up, 4, options):
        for before, after in of_rank:
            assert before.keys() == after.keys() and before
            for name, value in before.items():
                assert same_bits(value, after[name]) == (name[0] in "01234"), name


@pytest.mark.timeout(120)
def test_replicas_that_train_alone(ranks):
    """Each has the gradients of its own data; what nobody trains stays where it was."""
    (results,) = zip(*ranks(train_replicas, 4, [{"dp_comp": "diloco:2"}]), strict=True)
    for rank, (without, weights) in enumerate(results):
        unused = UNTOUCHED | ({"0.of_one.weight", "0.of_one.bias"} if rank < 2 else set())
        assert without == [unused & set(weights)] * 4
        for name, value in weights.items():
            assert same_bits(value, results[rank ^ 2][1][name]), name
