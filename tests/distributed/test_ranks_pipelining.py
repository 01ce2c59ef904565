"""Compressed stages of torch's own, driven by its schedules, train as `mpcomp.pipeline` does."""

import copy
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from everyday import by_halves, slow_after, slow_but
from methods import EXAMPLES, beside, same_bits
from ranks import preload
from runs import (
    KINDS,
    SCHEDULES,
    Run,
    cut_evenly,
    data_of,
    descending,
    make,
    optimizer_of,
    train,
    with_stages,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleGPipe,
    SplitPoint,
    pipeline,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from mpcomp import Adaptive, SameIndices, TopK
from mpcomp.links.auto import GENERAL
from mpcomp.pipelining import compressed

preload("mpcomp.pipelining")
pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

#: All microbatches of one size, as torch's schedules take them; sums over 4 are exact.
EVEN = Run("deep", rows=(8,), chunks=4, steps=4)


def places(schedule: str, num_stages: int) -> list[int]:
    """The rank of each stage."""
    size = dist.get_world_size()
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return [min(i, num_stages - 1 - i) for i in range(num_stages)]
    return [i % size for i in range(num_stages)]


def parts_of(run: Run, model: nn.Module) -> list[nn.Sequential]:
    """The stages of a sequence, whose parameters keep their names."""
    blocks = list(model.named_children())
    ends = [int(name) + 1 for name in cut_evenly(KINDS[run.model], run.stages)]
    bounds = [0, *ends, len(blocks)]
    return [nn.Sequential(OrderedDict(blocks[a:b])) for a, b in itertools.pairwise(bounds)]


@dataclass
class Trained:
    """What a rank has at the end of a run."""

    losses: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    without: list[set[str]] = field(default_factory=list)
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)


class Loop:
    """A training loop in torch's own words; ``compress`` is done to this rank's stages."""

    def __init__(self, run: Run, compress: Any = None) -> None:
        torch.manual_seed(run.seed)
        self.run = run
        model = KINDS[run.model].make()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(run.frozen) or ("-",)))
        rank, of_stage = dist.get_rank(), places(run.schedule or "1F1B", run.stages)
        self.ids: list[int] = []
        self.stages: Any = [
            PipelineStage(part, i, run.stages, torch.device("cpu"))
            for i, part in enumerate(parts_of(run, model))
            if of_stage[i] == rank
        ]
        if compress is None:
            self.stages = compressed(
                self.stages, act=run.act, grad=run.grad, ids=lambda: self.ids, **run.pipeline
            )
        kind = get_schedule_class(run.schedule or "1F1B")
        several = issubclass(kind, PipelineScheduleMulti)
        # As mpcomp.pipeline weights losses: each microbatch by its share, and nothing later.
        self.schedule = kind(
            self.stages if several else self.stages[0],
            run.chunks,
            loss_fn=lambda output, target: F.cross_entropy(output, target) / run.chunks,
            scale_grads=False,
        )
        modules = nn.ModuleList(stage.submod for stage in self.stages)
        self.optimizer = torch.optim.SGD(
            modules.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3
        )
        self.trained = Trained(kinds=[type(stage).__name__ for stage in self.stages])

    def named(self) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for stage in self.stages
            for name, parameter in stage.submod.named_parameters()
        }

    def step(self, number: int) -> None:
        run, ours = self.run, self.trained
        x, y = KINDS[run.model].batch(run.rows[0], number)
        self.ids = torch.randperm(run.ids, generator=torch.Generator().manual_seed(number))[
            : len(y)
        ]
        first = any(stage.is_first for stage in self.stages)
        last = any(stage.is_last for stage in self.stages)
        given: dict[str, Any] = {"target": y, "losses": (losses := [])} if last else {}
        self.schedule.step(*([x] if first else []), **given)
        if last:
            ours.losses.append(torch.stack(losses).detach().sum())
        ours.without.append({name for name, p in self.named().items() if p.grad is None})
        self.optimizer.step()
        self.optimizer.zero_grad()
        if run.evaluate:
            x, y = KINDS[run.model].batch(run.rows[0], 100 + number)
            with torch.no_grad():
                given = {"target": y} if last else {}
                output = self.schedule.eval(*([x] if first else []), **given)
            if last:
                ours.values.append(output)

    def end(self) -> Trained:
        for stage in self.stages:
            self.trained.state |= {k: v.clone() for k, v in stage.submod.state_dict().items()}
            for link in getattr(stage, "links", ()):
                if link.sender_stage == stage.stage_index:
                    traffic = link.meter.train
                    self.trained.sent[link.name] = traffic.wire_bytes, traffic.dense_bytes
        return self.trained


def train_by_torch(runs: list[Run], compress: Any = None) -> list[Trained]:
    """Called in every rank."""
    ended = []
    for run in runs:
        loop = Loop(run, compress)
        for number in range(run.steps):
            loop.step(number)
        ended.append(loop.end())
    return ended


def check(ranks: Any, num_ranks: int, runs: list[Run], *, shrinks: bool = True) -> None:
    """Trains in so many ranks by torch's schedules, and here by `mpcomp.pipeline`."""
    for run, ours in zip(
        runs, zip(*ranks(train_by_torch, num_ranks, runs), strict=True), strict=True
    ):
        alone = descending(run) if run.schedule == "LoopedBFS" else train(run)
        assert_same(run, ours, alone)
        within = run.schedule in (
            "ZBVZeroBubble",
            "DualPipeV",
        )  # the cut in the middle is in a rank
        middle = f"boundary {run.stages // 2 - 1} "
        for name, (wire, dense) in (item for one in ours for item in one.sent.items()):
            expected = (0, 0) if within and name.startswith(middle) else alone.sent[name]
            assert (wire, dense) == expected, f"{run}: {name}"
            assert not (shrinks and wire) or wire < dense, f"{run}: {name}"


def assert_same(run: Run, ours: Any, alone: Any) -> None:
    state = {name: value for one in ours for name, value in one.state.items()}
    assert state.keys() == alone.state.keys()
    losses = next(one.losses for one in ours if one.losses)
    torch.testing.assert_close(torch.stack(losses), torch.stack(alone.losses), rtol=1e-6, atol=0)
    for name, value in alone.state.items():
        assert same_bits(state[name], value), f"{run}: {name}"
    for step, without in enumerate(alone.without):
        assert set().union(*(one.without[step] for one in ours)) == without, f"{run}, step {step}"


BOTH = {"act": "ef21+quant:4", "grad": "ef+topk:0.3"}


@pytest.mark.parametrize(
    "schedule", slow_but(("1F1B", "LoopedBFS", "ZBVZeroBubble"), filter(None, SCHEDULES))
)
def test_every_schedule_on_two_ranks_gives_the_pipelines_bits(ranks, schedule):
    """Feedback both ways; of V schedules the middle cut is within a rank, and compressed too."""
    run = with_stages(replace(EVEN, schedule=schedule, **BOTH), 2)
    check(ranks, 2, [run, replace(run, act=None, grad=None)], shrinks=False)


@pytest.mark.parametrize("schedule", slow_after(1, ["ZBVZeroBubble", "1F1B", "Interleaved1F1B"]))
def test_four_ranks_give_the_pipelines_bits(ranks, schedule):
    """Eight stages where a rank takes two."""
    run = with_stages(replace(EVEN, schedule=schedule, steps=3, **BOTH), 4)
    check(ranks, 4, [run, replace(run, act=GENERAL[0], grad=GENERAL[1])], shrinks=False)


def both_ways(method: Any) -> Run:
    run = replace(EVEN, steps=3, schedule="GPipe")
    if isinstance(method, SameIndices):
        return replace(run, act=TopK(0.3), grad=method)
    return replace(run, act=method, grad=beside(method, method))


FIXED = [examples[0] for kind, examples in EXAMPLES.items() if kind is not Adaptive]


@pytest.mark.parametrize("methods", by_halves(FIXED))
def test_every_method_gives_the_pipelines_bits(ranks, methods):
    """The first example of each class, but of those whose ratio adapts."""
    runs = [both_ways(method) for method in methods]
    assert len(runs) >= 10
    check(ranks, 2, runs, shrinks=False)


WORDS = ("auto", "auto:scratch", "auto:relu", "auto:memory")


@pytest.mark.slow
def test_words_learned_bases_and_memories_of_samples_give_the_pipelines_bits(ranks):
    """Samples come again: 8 of 12 ids a step. A basis is learned from the messages themselves."""
    runs = [replace(EVEN, act=word, grad=word, ids=12, steps=6) for word in WORDS]
    check(ranks, 2, runs, shrinks=False)


UNCOMPRESSED = {
    "plain": EVEN,
    "first stage frozen": replace(EVEN, frozen=("0.", "1.", "2.", "3.")),
    "last stage frozen": replace(EVEN, frozen=("4.", "5.", "6.", "7.")),
    "evaluation between steps": replace(EVEN, evaluate=True),
    "interleaved": replace(EVEN, schedule="Interleaved1F1B", stages=4),
    "V": replace(EVEN, schedule="ZBVZeroBubble", stages=4),
}


def test_uncompressed_stages_have_the_bits_of_torchs_own(ranks):
    runs = list(UNCOMPRESSED.values())
    ours, torchs = (ranks(train_by_torch, 2, runs, compress) for compress in (None, "none"))
    for rank in range(2):
        for name, a, b in zip(UNCOMPRESSED, ours[rank], torchs[rank], strict=True):
            assert all("Compressed" in kind for kind in a.kinds), name
            assert not any("Compressed" in kind for kind in b.kinds), name
            assert a.without == b.without, name
            assert a.state.keys() == b.state.keys(), name
            pairs = [*zip(a.losses, b.losses, strict=True), *zip(a.values, b.values, strict=True)]
            assert all(same_bits(x, y) for x, y in pairs), name
            assert all(same_bits(a.state[key], b.state[key]) for key in a.state), name


# -- evaluation, non-finite numbers, resuming -----------------------------------------------------


def evaluated_here(run: Run) -> tuple[list[Tensor], dict[str, Tensor]]:
    pipe, _ = make(run, alone=True)
    optimizer = optimizer_of(run, pipe)
    values = []
    for number in range(run.steps):
        x, y, _ = data_of(run, number)
        pipe.train()
        pipe.forward_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
        x, _ = KINDS[run.model].batch(run.rows[0], 100 + number)
        pipe.eval()
        with torch.no_grad():
            values.append(pipe(x))
    return values, pipe.merge().state_dict()


def test_evaluation_sends_what_the_pipelines_does_and_changes_nothing(ranks):
    """With feedback both ways, which evaluation neither reads nor writes."""
    run = replace(EVEN, schedule="GPipe", evaluate=True, **BOTH)
    values, state = evaluated_here(run)
    for rank, (ours,) in enumerate(ranks(train_by_torch, 2, [run])):
        assert len(ours.values) == (run.steps if rank == 1 else 0)
        for a, b in zip(ours.values, values, strict=False):
            assert same_bits(a, b)
        assert all(same_bits(value, state[name]) for name, value in ours.state.items())


def states_of(loop: Loop) -> dict[str, Any]:
    return {
        link.name: copy.deepcopy(link.endpoint.state_dict())
        for stage in loop.stages
        for link in stage.links
    }


def train_over_nan(run: Run, bad: int) -> tuple[bool, dict[str, Tensor]]:
    """In each rank; the step of a batch with NaN is left out by the loop, as by a scaler."""
    loop = Loop(run)
    for number in range(run.steps):
        if number != bad:
            loop.step(number)
            continue
        before = states_of(loop)
        x, y = KINDS[run.model].batch(run.rows[0], number)
        x[3] = torch.nan
        first, last = loop.stages[0].is_first, loop.stages[-1].is_last
        loop.schedule.step(*([x] if first else []), **({"target": y} if last else {}))
        loop.optimizer.zero_grad()
        after = states_of(loop)
    kept = all(
        torch.equal(value, before[name][key])
        for name, state in after.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    )
    return kept and any(before.values()), loop.end().state


def test_methods_forget_a_step_with_nan_and_ends_still_agree(ranks):
    """As the pipeline, which raises there and goes on."""
    run = replace(EVEN, act="ef21+topk:0.3", grad="ef+quant:4")
    pipe, _ = make(run, alone=True)
    optimizer = optimizer_of(run, pipe)
    for number in range(run.steps):
        x, y, _ = data_of(run, number)
        if number == 1:
            x[3] = torch.nan
            with pytest.raises(FloatingPointError):
                pipe.forward_backward(x, y)
            optimizer.zero_grad()
            continue
        pipe.forward_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
    expected = pipe.merge().state_dict()
    for kept, state in ranks(train_over_nan, 2, run, 1):
        assert kept
        assert all(same_bits(value, expected[name]) for name, value in state.items())


def train_and_resume(runs: list[Run], after: int, folder: str) -> list[tuple[Trained, Trained]]:
    """In each rank: in one go, and by new stages from a checkpoint of the first steps."""
    ended = []
    for i, run in enumerate(runs):
        (whole,) = train_by_torch([run])
        loop = Loop(run)
        for number in range(after):
            loop.step(number)
        weights = copy.deepcopy([stage.submod.state_dict() for stage in loop.stages])
        optimizer = copy.deepcopy(loop.optimizer.state_dict())
        links = {f"links of stage {stage.stage_index}": stage for stage in loop.stages}
        dcp.save(links, checkpoint_id=f"{folder}/{i}")
        loop = Loop(run)
        for stage, state in zip(loop.stages, weights, strict=True):
            stage.submod.load_state_dict(state)
        loop.optimizer.load_state_dict(optimizer)
        links = {f"links of stage {stage.stage_index}": stage for stage in loop.stages}
        dcp.load(links, checkpoint_id=f"{folder}/{i}")
        for number in range(after, run.steps):
            loop.step(number)
        ended.append((whole, loop.end()))
    return ended


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(ranks, tmp_path):
    """Memories of rows and of samples, a learned basis, random choices; two stages on a rank."""
    run = replace(EVEN, steps=5, ids=12)
    runs = [
        replace(run, act="ef21+randomk:0.3", grad="ef+topk:0.3"),
        replace(run, act="auto:memory", grad="auto:memory"),
        replace(run, act="auto:scratch", grad="auto:scratch"),
        replace(run, schedule="Interleaved1F1B", stages=4, **BOTH),
        replace(run, schedule="ZBVZeroBubble", stages=4, **BOTH),
    ]
    for pairs in ranks(train_and_resume, 2, runs, 3, str(tmp_path)):
        for one, (whole, resumed) in zip(runs, pairs, strict=True):
            assert all(same_bits(whole.state[k], v) for k, v in resumed.state.items()), one


# -- beside other things of torch -----------------------------------------------------------------


def train_traced() -> dict[str, Tensor]:
    """In each rank: stages of torch's tracing frontend, of a model that it cuts."""
    torch.manual_seed(0)
    model = KINDS["deep"].make()
    x, y = KINDS["deep"].batch(8, 0)
    traced = pipeline(model, mb_args=(x[:2],), split_spec={"4": SplitPoint.BEGINNING})
    stage = compressed(
        traced.build_stage(dist.get_rank(), torch.device("cpu")), act="topk:0.3", grad="topk:0.3"
    )
    schedule = ScheduleGPipe(stage, 4, F.cross_entropy)
    schedule.step(*([x] if stage.is_first else []), **({"target": y} if stage.is_last else {}))
    assert stage.links[0].meter.train.messages == (4 if stage.is_first else 0)
    return {name: p.grad for name, p in stage.submod.named_parameters()}


def train_compiled() -> dict[str, Tensor]:
    """In each rank: stages whose modules are compiled in place."""
    loop = Loop(replace(EVEN, **BOTH))
    for stage in loop.stages:
        stage.submod.compile(backend="aot_eager")
    for number in range(2):
        loop.step(number)
    return loop.end().state


@pytest.mark.slow
def test_traced_and_compiled_stages_are_compressed_too(ranks):
    traced = ranks(train_traced, 2)
    torch.manual_seed(0)
    pipe, _ = make(replace(EVEN, act="topk:0.3", grad="topk:0.3"), alone=True)
    x, y = KINDS["deep"].batch(8, 0)
    pipe.forward_backward(x, y)
    expected = {name: p.grad for name, p in pipe.named_parameters()}
    found = [grad for one in traced for grad in one.values()]
    assert len(found) == len(expected)
    for a, b in zip(found, expected.values(), strict=True):
        torch.testing.assert_close(a, b)
    alone = train(replace(EVEN, steps=2, **BOTH))
    for state in ranks(train_compiled, 2):
        for name, value in state.items():
            torch.testing.assert_close(value, alone.state[name])


def train_sharded(kind: str, act: str | None) -> tuple[list[float], list[Tensor]]:
    """In each of four ranks: two pipelines of two stages, each stage sharded by FSDP2 over two."""
    several = issubclass(get_schedule_class(kind), PipelineScheduleMulti)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    run = replace(EVEN, stages=2)
    torch.manual_seed(0)
    index = mesh["pp"].get_local_rank()
    part = parts_of(run, KINDS["deep"].make())[index]
    fully_shard(part, mesh=mesh["dp"])
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    if act is not None:
        stage = compressed(stage, act=act, grad=act)
    given_stages: Any = [stage] if several else stage
    schedule = get_schedule_class(kind)(given_stages, 4, F.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    losses: list[float] = []
    for number in range(3):
        x, y = KINDS["deep"].batch(8, 10 * number + mesh["dp"].get_local_rank())
        given = {"target": y, "losses": (parts := [])} if stage.is_last else {}
        schedule.step(*([x] if stage.is_first else []), **given)
        if stage.is_last:
            losses.append(float(torch.stack(parts).mean()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.full_tensor().detach() for p in part.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1F1B", "Interleaved1F1B"])
def test_sharded_stages_of_several_pipelines_are_compressed_too(ranks, kind):
    """Uncompressed with the bits of torch's own; compressed, pipelines end with equal weights.

    From torch 2.15 on, schedules of several stages a rank end a step of these in two calls.
    """
    torchs, none, topk = (ranks(train_sharded, 4, kind, act) for act in (None, "none", "topk:0.5"))
    for rank in range(4):
        assert none[rank][0] == torchs[rank][0]
        assert all(map(same_bits, none[rank][1], torchs[rank][1]))
        assert len(topk[rank][0]) == (3 if rank >= 2 else 0)
        assert all(map(same_bits, topk[rank][1], topk[rank ^ 1][1]))
        assert not all(map(same_bits, topk[rank][1], torchs[rank][1]))


# -- errors ---------------------------------------------------------------------------------------


def stage_of(width: int = 4, index: int | None = None, num_stages: int = 2) -> PipelineStage:
    index = dist.get_rank() if index is None else index
    return PipelineStage(nn.Linear(width, width), index, num_stages, torch.device("cpu"))


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1


def step_of(stages: Any, x: Tensor, kind: Any = ScheduleGPipe) -> None:
    listed = stages if isinstance(stages, list) else [stages]
    schedule = kind(stages, 2, nn.MSELoss())
    first = any(stage.is_first for stage in listed)
    last = any(stage.is_last for stage in listed)
    schedule.step(*([x] if first else []), **({"target": torch.ones_like(x)} if last else {}))


def message_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return f"{type(error).__name__}: {error}"
    return "none"


def refused_alone() -> dict[str, str]:
    """In each rank, without a message between them."""
    aqsgd, follows = "aqsgd+quant:4", "ef:lr_scaled=true+topk:0.1"
    stage = compressed(stage_of())
    other = compressed(stage_of(), act="topk:0.5")
    return {
        "adaptive": message_of(compressed, stage_of(), grad="adaptive+topk:0.1"),
        "no ids": message_of(compressed, stage_of(), act=aqsgd),
        "no rate": message_of(compressed, stage_of(), grad=follows),
        "no method": message_of(compressed, stage_of(), act="topp:0.1"),
        "twice": message_of(compressed, stage),
        "no stage": message_of(compressed, nn.Linear(1, 1)),
        "no state": message_of(stage.load_state_dict, {}),
        "state of another": message_of(stage.load_state_dict, other.state_dict()),
        "taken": message_of(compressed, stage_of(), act=aqsgd, grad=follows, ids=list, lr=float),
    }


def test_what_cannot_be_compressed_is_refused_with_the_cure(ranks):
    for found in ranks(refused_alone, 2):
        assert "grad=adaptive" in found["adaptive"] and "a fixed ratio" in found["adaptive"]
        assert "act=aqsgd" in found["no ids"] and "ids=f" in found["no ids"]
        assert "lr=f" in found["no rate"]
        assert "did you mean 'topk'" in found["no method"]
        assert "not yet compressed" in found["twice"]
        assert "compressed(Linear)" in found["no stage"]
        assert "no state of links for stage" in found["no state"]
        assert "cannot be loaded" in found["state of another"]
        assert found["taken"] == "none"


def refused_in_a_step(case: str) -> str:
    """In each rank: what a step says."""
    x, rank = torch.rand(4, 4), dist.get_rank()
    if case == "other settings":
        return message_of(step_of, compressed(stage_of(), act=("topk:0.5", "topk:0.25")[rank]), x)
    if case == "plain neighbour":
        stage = stage_of()
        return message_of(step_of, compressed(stage) if rank else stage, x)
    if case == "two tensors":
        stage = stage_of()
        if rank == 0:
            stage.submod = Two()
        return message_of(step_of, compressed(stage), x)
    if case == "apart":
        stages = [compressed(stage_of(index=i, num_stages=4)) for i in ((0, 3), (1, 2))[rank]]
        kind = get_schedule_class("ZBVZeroBubble")
        return message_of(
            lambda: kind(stages, 4, nn.MSELoss()).step(
                *([x] if rank == 0 else []), **({"target": x} if rank == 0 else {})
            )
        )
    assert case == "broken off"
    stage = compressed(stage_of(), act="topk:0.5")
    schedule = ScheduleGPipe(stage, 2, nn.MSELoss() if rank == 0 else broken_loss)
    given = [x] if rank == 0 else []
    target = {"target": x} if rank else {}
    first = message_of(schedule.step, *given, **target)
    if rank == 0:  # ended by the other's end
        return first
    assert "a loss that fails" in first
    return message_of(schedule.step, *given, **target)


def broken_loss(output: Tensor, target: Tensor) -> Tensor:
    if output.device.type == "cpu" and broken_loss.calls:  # type: ignore[attr-defined]
        raise ValueError("a loss that fails")
    broken_loss.calls += 1  # type: ignore[attr-defined]
    return nn.functional.mse_loss(output, target)


broken_loss.calls = 0  # type: ignore[attr-defined]
CASES = {
    "other settings": (1, "stage 0 has", "call compressed() on every rank"),
    "plain neighbour": (1, "call compressed() on every rank", "stage 0 has"),
    "two tensors": (0, "expected one plain tensor", "schedule.step by keyword"),
    "apart": (1, "this rank has the stages [1, 2]", "compressed() was given [1]"),
    "broken off": (1, "step 0 of compressed stages has not ended", "a checkpoint"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_cannot_be_says_so(ranks, case):
    rank, *said = CASES[case]
    found = ranks(refused_in_a_step, 2, case, may_fail=True, timeout_s=120.0)
    assert all(part in str(found[rank]) for part in said), found
    assert found[1 - rank] != "none"
