"""Law 8: many processes do what one does, bit for bit: losses, weights, buffers, links' memory.

One exception is torch's: LoopedBFS differentiates microbatches in descending order, so its sums of
gradients are those of a loop that does the same, and differ from the ascending ones by rounding.
"""

import math
from dataclasses import replace

import pytest
import torch
from everyday import slow_after
from methods import EXAMPLES, beside
from runs import (
    KINDS,
    SCHEDULES,
    SINGLE,
    SPLITTING,
    Run,
    assert_same,
    descending,
    make,
    train,
    train_all,
    with_stages,
)

from mpcomp import AQSGD, EF21, Feedback, Identity, SameIndices, TopK

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")


def check(ranks, num_ranks, runs, shrinks=True):
    """Runs in so many ranks, and alone; compares everything. Returns all outcomes."""
    all_ours = list(zip(*ranks(train_all, num_ranks, runs), strict=True))
    for run, ours in zip(runs, all_ours, strict=True):
        alone = descending(run) if run.schedule == "LoopedBFS" else train(run)
        assert_same(run, ours, alone)
        sent = alone.sent
        if run.schedule in ("ZBVZeroBubble", "DualPipeV"):  # the cut in the middle is in a rank
            middle = f"boundary {run.stages // 2 - 1} "
            sent = {name: figures for name, figures in sent.items() if middle not in name}
            assert len(sent) == len(alone.sent) - 2
        for outcome in ours:
            wire, dense = outcome.bytes
            assert wire == sum(w for w, _ in sent.values()), run
            assert dense == sum(d for _, d in sent.values()), run
            if (run.act or run.grad) and shrinks:
                assert 0 < wire < dense, run
            for name, error in outcome.fidelity.items():  # of the same microbatches in any engine
                assert math.isnan(error) or error == pytest.approx(alone.fidelity[name]), run
    return all_ours


COMPRESSED = {"act": "topk:0.3", "grad": "ef21+topk:0.3"}


#: Steps of runs in every schedule: compressed ones every day, more and longer in the whole suite.
LENGTHS = {"compressed": 3, "uncompressed": 3, "for longer": 8}


@pytest.mark.parametrize("kind", slow_after(1, LENGTHS))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_two_ranks(ranks, schedule, kind):
    """Uneven microbatches (10 rows in 4); BatchNorm, dropout and operations in place as well."""
    runs = [
        Run("deep", schedule=schedule, **COMPRESSED),
        Run("deep convnet", schedule=schedule, act="ef21+quant:4", grad="ef+topk:0.3"),
    ]
    if kind == "uncompressed":
        runs = [replace(run, act=None, grad=None) for run in runs]
    if kind == "compressed":  # feedback both ways, BatchNorm and dropout: all that adds up
        runs = runs[1:]
    check(ranks, 2, [with_stages(replace(run, steps=LENGTHS[kind]), 2) for run in runs])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_four_ranks(ranks, schedule):
    """Eight stages where a rank takes two."""
    methods = {"act": "ef21+quant:4", "grad": "ef+topk:0.3"}
    run = Run("deep convnet", schedule=schedule, rows=(10, 9), steps=4, **methods)
    check(ranks, 4, [with_stages(run, 4)])


@pytest.mark.slow
def test_looped_bfs_differs_from_the_ascending_order_by_rounding(ranks):
    """After 10 uncompressed steps: 1e-5 relative to the largest weight of a tensor."""
    run = Run("deep", stages=4, schedule="LoopedBFS")
    alone = train(run)
    [ours] = ranks(train_all, 2, [run])[1]
    assert not ours.error, ours.error
    torch.testing.assert_close(
        torch.stack(ours.losses), torch.stack(alone.losses), rtol=1e-5, atol=0
    )
    for name, value in alone.state.items():
        bound = 1e-5 * float(value.abs().max())
        torch.testing.assert_close(ours.state[name], value, rtol=0, atol=bound)
    one = replace(run, chunks=1)  # one microbatch has one order
    assert_same(one, [row[0] for row in ranks(train_all, 2, [one])], train(one))


def both_ways(method):
    """A run with this method both ways over a cut; one that needs a method for activations: it."""
    if isinstance(method, SameIndices):
        return Run("mlp", act=TopK(0.3), grad=method, steps=3)
    uneven = (10,) if method == Identity() else (10, 9, 7)
    return Run("mlp", act=method, grad=beside(method, method), rows=uneven, steps=3)


def lossy(method):
    return not (isinstance(method, Identity) or method == TopK(1.0) or "fp32" in str(method))


@pytest.fixture(scope="module")
def of_each_class(ranks):
    """Of each class the first example, all in two starts of processes."""
    runs = [both_ways(examples[0]) for examples in EXAMPLES.values()]
    half = len(runs) // 2
    outcomes = [*check(ranks, 2, runs[:half], False), *check(ranks, 2, runs[half:], False)]
    return dict(zip(EXAMPLES, zip(runs, outcomes, strict=True), strict=True))


@pytest.mark.parametrize("of_class", EXAMPLES, ids=lambda c: c.__name__)
def test_every_method(of_each_class, of_class):
    """The first example of each class, both ways over a cut."""
    run, ours = of_each_class[of_class]
    for way, method in (("act", run.act), ("grad", run.grad)):
        [error] = [f for o in ours for name, f in o.fidelity.items() if name.endswith(way)]
        assert (error > 0) == lossy(method) and error < 10, run  # metered where it is sent


#: Methods of activations and of gradients, of all other examples.
OTHERS = [
    *(
        (method, beside(method, method))
        for of_class, examples in EXAMPLES.items()
        if of_class is not SameIndices
        for method in examples[1:]
    ),
    *((act, SameIndices()) for act in (EF21(TopK(0.3)), AQSGD(TopK(0.3)))),
    *((TopK(0.3), method) for method in EXAMPLES[SameIndices][1:]),
]
#: Cuts of three stages a rank.
CUTS = 5


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(OTHERS), 3 * CUTS))
def test_every_other_example(ranks, first):
    """Five to a pipeline, as each of its cuts has methods of its own."""
    runs = []
    for start in range(first, min(first + 3 * CUTS, len(OTHERS)), CUTS):
        pairs = OTHERS[start : start + CUTS]
        act, grad = zip(*pairs, *[(None, None)] * (CUTS - len(pairs)), strict=True)
        methods = {"act": list(act), "grad": list(grad)}
        settings = {"rows": (10, 9, 7), "steps": 3, "ids": 12}  # AQ-SGD meets its samples again
        runs.append(Run("deep", 6, "Interleaved1F1B", **settings, **methods))
    for run, ours in zip(runs, check(ranks, 2, runs, shrinks=False), strict=True):
        errors = {name: error for outcome in ours for name, error in outcome.fidelity.items()}
        for way, methods in (("act", run.act), ("grad", run.grad)):
            for cut, method in enumerate(methods):
                error = errors[f"boundary {cut} {way}"]
                assert (error > 0) == (method is not None and lossy(method)), (run, cut)
                assert error < 10, (run, cut)


LOOPS = {
    "warm-up": {"pipeline": {"warmup_steps": 3}},
    "off for a step": {"off": (0, 4)},
    "another seed": {"pipeline": {"seed": 7}, "act": "ef21+randomk:0.3"},
    "bf16": {"autocast": torch.bfloat16},
    "adamw": {"optimizer": "adamw", "clip": 0.1},
    "clipped": {"clip": 0.2},
    "accumulated": {"accumulate": 3, "steps": 3, "clip": 0.3},
    "evaluated": {"evaluate": True, "steps": 4},
    "scaled": {"scale": 1024.0, "clip": 0.2},
    "fp16": {"scale": 2.0**24, "autocast": torch.float16, "steps": 12},
    "overflow in the first stage": {"scale": 64.0, "overflow": (3, 0)},
    "overflow in the last stage": {"scale": 64.0, "overflow": (3, 3), "clip": 0.2},
    "frozen first stage": {"frozen": ("0.", "1.")},
    "frozen first stages": {"frozen": ("0.", "1.", "2.", "3.", "4.")},
    "frozen middle stage": {"frozen": ("2.", "3.")},
    "thawed": {"frozen": ("0.", "1.", "2.", "3."), "thaw": 3},
    "to bf16": {"to": (0, torch.bfloat16)},
    "to fp64 later": {"to": (2, torch.float64), "model": "masked"},
    "named methods": {"act": {"1": "topk:0.2"}, "grad": ["quant:4", None, "sign"]},
}


@pytest.mark.parametrize("name", slow_after(4, LOOPS))
def test_what_a_training_loop_does(ranks, name):
    """Interleaved stages, and one of the schedules with a split backward: in turn."""
    turn = list(LOOPS).index(name)
    schedule = (SPLITTING[0], "Interleaved1F1B", *SPLITTING[1:])[turn % 4]
    settings = {"stages": 4, "steps": 5, **COMPRESSED, **LOOPS[name]}
    runs = [Run(**settings, schedule=schedule)]
    all_ours = check(ranks, 2, runs)
    for run, ours in zip(runs, all_ours, strict=True):
        for outcome in ours:
            if run.overflow is not None:
                assert outcome.skipped == [step == 3 for step in range(run.steps)]
                assert outcome.scales[2:4] == [64.0, 32.0]
            if name == "fp16":
                assert outcome.skipped[0] and not outcome.skipped[-1]
            if run.evaluate:
                assert len(outcome.values) == 8


@pytest.mark.slow
def test_the_own_schedule_in_the_same_ways(ranks):
    """One stage a rank; with recomputation, which other tests cannot have in split backward."""
    runs = [
        Run(act="ef21+topk:0.3", grad="ef+topk:0.3", scale=64.0, overflow=(3, 1), clip=0.2),
        Run("deep convnet", pipeline={"recompute": True}, **COMPRESSED),
        Run("deep convnet", pipeline={"recompute": True}, autocast=torch.bfloat16, **COMPRESSED),
        Run("deep convnet", channels_last=True, **COMPRESSED),
        Run("deep convnet", evaluate=True, steps=4, **COMPRESSED),
        Run("masked", **COMPRESSED),
        Run("named", act="aqsgd+topk:0.3", grad="same"),
        Run(accumulate=2, steps=5, **COMPRESSED),
        Run(frozen=("0.", "1.", "2.", "3."), **COMPRESSED),
        Run(chunks=1, **COMPRESSED),
        *(Run(pipeline={"in_flight": depth}, **COMPRESSED) for depth in (1, 3, 100)),
    ]
    check(ranks, 2, [replace(run, steps=min(run.steps, 4)) for run in runs])


@pytest.mark.slow
def test_recomputation_and_memory_order_in_other_schedules(ranks):
    runs = [
        Run("deep convnet", 4, schedule, pipeline={"recompute": True}, **COMPRESSED)
        for schedule in ("Interleaved1F1B", "LoopedBFS")
    ]
    runs += [
        Run("deep convnet", 4, schedule, channels_last=True, **COMPRESSED)
        for schedule in ("Interleaved1F1B", *SPLITTING)
    ]
    runs += [Run("masked", 4, "ZBVZeroBubble", **COMPRESSED)]
    runs += [Run("named", 4, "InterleavedZeroBubble", **COMPRESSED)]
    check(ranks, 2, [replace(run, steps=3) for run in runs])


@pytest.mark.slow
def test_over_several_connections(ranks):
    """Of messages that have one length, of those that vary, and of those that are checked."""
    many = {"rows": (600,), "ids": 600, "steps": 3, "evaluate": True}
    check(
        ranks,
        2,
        [
            Run(**many, **COMPRESSED, pipeline={"connections": 4}),
            Run(**many, act="step:0.3", grad="step:0.5", pipeline={"connections": 3}),
            Run(
                **many,
                act="aqsgd+step:0.3",
                grad="step:0.5:rounding=dither",
                pipeline={"connections": 2, "checks": "message"},
            ),
            Run(**COMPRESSED, steps=3, pipeline={"connections": 4}),  # shorter than a packet
        ],
    )


@pytest.mark.slow
def test_three_stages_a_rank(ranks):
    runs = [
        Run("deep", 6, schedule, steps=3, **COMPRESSED)
        for schedule in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
    ]
    check(ranks, 2, runs)


def test_overflow_in_one_of_four_ranks(ranks):
    """All skip alike, whichever stage it was; nothing is learnt from that step."""
    runs = [
        Run(stages=4, schedule=schedule, scale=64.0, overflow=(2, stage), steps=4, **COMPRESSED)
        for schedule, stage in zip(SINGLE, (0, 2, 3), strict=True)
    ]
    check(ranks, 4, runs)


@pytest.mark.slow
def test_feedback_and_random_methods_on_four_ranks_too(ranks):
    """Pairs of methods that share a cut, another at each."""
    pairs = [
        ("ef21+topk:0.3", "same"),
        ("aqsgd+quant:4:rounding=stochastic", "ef21+randomk:0.3"),
        ("randomblock:0.4", "efmixed:second=remainder+topk:0.3"),
        ("aqsgd:storage=4+topk:0.3", "same+fp16"),
        ("step:0.5", "same:where=nonzero+step:1:scale=tensor"),
        ("ef+topk:0.3", "ef21+topk:0.3"),
    ]
    runs = []
    for cuts in (pairs[:3], pairs[3:]):
        act, grad = zip(*cuts, strict=True)
        runs.append(Run(stages=4, act=list(act), grad=list(grad), rows=(10, 9), steps=5))
    check(ranks, 4, runs)


def test_the_examples_cover_feedback():
    assert sum(issubclass(c, Feedback) for c in EXAMPLES) == 5


# -- nothing to train on a rank, and the whole model's state --------------------------------------


def test_a_rank_with_nothing_to_train_under_a_loss_scaler(ranks):
    """fp16 fine-tuning with the first stage frozen: its scaler skips, and grows, as the other."""
    frozen = {"frozen": ("0.", "1.", "2.", "3."), "scale": 64.0, "steps": 6, **COMPRESSED}
    for outcomes in check(ranks, 2, [Run(**frozen), Run(**frozen, overflow=(3, 1), clip=0.2)]):
        for outcome in outcomes:
            assert len(set(outcome.scales)) > 1


def load_the_whole_model():
    pipe, _ = make(Run(), alone=False)
    pipe.load_state_dict(KINDS["deep"].make().state_dict())


def test_the_state_of_the_whole_model_loads_on_every_rank(ranks):
    """As it does in one process."""
    ranks(load_the_whole_model, 2)
