"""Batches of other sizes and shapes, inference and evaluation, over several ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from everyday import by_halves, slow
from methods import same_bits
from models import assert_same_state, links_state, rows
from runs import (
    KINDS,
    Run,
    assert_same,
    assert_same_links,
    data_of,
    links_of,
    make,
    masked,
    optimizer_of,
    train,
)
from test_ranks_law8 import check
from torch import fx, nn

import mpcomp

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

COMPRESSED = {"act": "ef21+topk:0.3", "grad": "ef21+quant:4"}


OTHER_SIZES = [
    Run("deep", 4, schedule, rows=(10, 7, 4, 13), steps=5, **COMPRESSED)
    for schedule in ("ZBVZeroBubble", "InterleavedZeroBubble", "Interleaved1F1B")
]
OTHER_SIZES += [
    Run("deep", rows=(10, 4, 9), steps=4, act="aqsgd+quant:4", grad="ef+topk:0.3"),
    Run("deep convnet", rows=(12, 5, 12), steps=4, **COMPRESSED),
]


@pytest.mark.parametrize(
    "runs", [[OTHER_SIZES[0], *OTHER_SIZES[3:]], slow(OTHER_SIZES[1:3])], ids=["some", "rest"]
)
def test_batches_of_other_sizes_in_training(ranks, runs):
    """A short last batch, a longer one, and the usual again."""
    check(ranks, 2, runs)


# -- other shapes ---------------------------------------------------------------------------------


def train_on_shapes(run, shapes, alone):
    """One step for each shape: side of an image, or length of a sequence."""
    pipe, _ = make(run, alone=alone)
    optimizer = optimizer_of(run, pipe)
    losses, lengths = [], []
    for step, shape in enumerate(shapes):
        batch = masked if run.model == "masked" else KINDS["convnet"].batch
        x, y = batch(8, step, shape)
        before = pipe.wire_bytes, pipe.dense_bytes
        losses.append(pipe.forward_backward(x, y, sample_ids=torch.arange(8)))
        optimizer.step()
        optimizer.zero_grad()
        wire, dense = pipe.wire_bytes - before[0], pipe.dense_bytes - before[1]
        lengths.append(wire / dense)
        x, y = batch(5, 100 + step, shape + 3)  # evaluation has its own, and changes nothing
        pipe.evaluate([(x, y)])
    return torch.stack(losses), lengths, links_of(pipe)


def train_all_on_shapes(runs):
    return [train_on_shapes(run, shapes, alone=False) for run, shapes in runs]


@pytest.mark.slow
def test_another_image_size_or_sequence_length_starts_estimates_anew(ranks):
    """EF21's first send of a shape is raw, and only that; the same as in one process."""
    runs = [
        (Run("deep convnet", 2, **COMPRESSED), (8, 8, 12, 12, 8)),
        (Run("deep convnet", 2, "GPipe", act="topk:0.3", grad="ef+topk:0.3"), (8, 8, 12, 12, 8)),
        (Run("masked", 2, act="ef21+topk:0.3", grad="same"), (7, 7, 9, 5, 5)),
        (Run("masked", 2, act="aqsgd+quant:4", grad="ef21+topk:0.3"), (7, 7, 9, 9, 7)),
    ]
    results = ranks(train_all_on_shapes, 2, runs)
    for i, (run, shapes) in enumerate(runs):
        losses, lengths, state = train_on_shapes(run, shapes, alone=True)
        for rank in range(2):
            ours, our_lengths, links = results[rank][i]
            assert same_bits(ours, losses), run
            assert our_lengths == lengths, run
            assert_same_links(links, state)
        if "ef21" in run.act:
            known = [i > 0 and shapes[i - 1] == shape for i, shape in enumerate(shapes)]
            assert [length < 0.7 for length in lengths] == known, (run, lengths)


# -- inference ------------------------------------------------------------------------------------


def infer(runs, alone):
    return [infer_one(run, alone) for run in runs]


def infer_one(run, alone):
    """Outputs for several sizes of batch, in evaluation mode and in training mode."""
    pipe, _ = make(run, alone=alone)
    for step in range(2):
        x, y, ids = data_of(run, step)
        pipe.forward_backward(x, y, sample_ids=ids)
    before, weights = links_state(pipe), [p.grad.clone() for p in pipe.parameters()]
    outputs = []
    pipe.eval()
    for count in (10, 3):  # 4 chunks: batches with fewer rows have one for each row
        x, _ = KINDS[run.model].batch(count, 7)
        outputs.append(pipe(x))  # evaluation mode needs no no_grad
        with pipe.uncompressed(), torch.no_grad():
            outputs.append(pipe(x))
        with torch.inference_mode():
            outputs.append(pipe(x).clone())
        only_last = pipe(x, everywhere=False)
        has_last = alone or run.stages - 1 in [stage.index for stage in pipe.stages]
        assert (only_last is not None) == has_last
        if has_last:
            assert same_bits(only_last, outputs[-3])
    # In one process a graph as of any module, where the caller allows one; none over ranks.
    assert [output.requires_grad for output in outputs] == [alone, False, False] * 2
    pipe.train()
    with torch.no_grad():
        outputs.append(pipe(KINDS[run.model].batch(6, 8)[0]))
    assert_same_state(links_state(pipe), before)
    assert all(same_bits(p.grad, g) for p, g in zip(pipe.parameters(), weights, strict=True))
    assert pipe.num_steps == 2
    return outputs


INFERRED = [
    Run("deep", 2, **COMPRESSED),
    Run("deep", 4, "DualPipeV", act="randomk:0.3", grad="ef21+quant:4"),
    Run("deep convnet", 4, "ZBVZeroBubble", **COMPRESSED),
    Run("deep", 4, "Interleaved1F1B", act="quant:4:rounding=stochastic"),
    Run("named", 2, "1F1B", **COMPRESSED),
    Run("deep convnet", 2, "GPipe", channels_last=True, **COMPRESSED),
]


@pytest.mark.parametrize("runs", by_halves(INFERRED))
def test_inference_gives_the_output_of_one_process_on_every_rank(ranks, runs):
    """For schedules that cannot evaluate, too; with the last stage on the first rank."""
    results = ranks(infer, 2, runs, False)
    for i, run in enumerate(runs):
        expected = infer_one(run, True)
        for rank in range(2):
            ours = results[rank][i]
            assert len(ours) == len(expected)
            for a, b in zip(ours, expected, strict=True):
                assert same_bits(a, b), (run, rank)
        if run.act:
            assert not torch.equal(expected[0], expected[1])  # compressed, and not


def train_by_output(how):
    pipe, _ = make(Run("deep", 2), alone=False)
    x, y, _ = data_of(Run(), 0)
    if how == "called":
        pipe(x)
    else:
        pipe.eval()
        pipe.forward_backward(x, y)


@pytest.mark.parametrize(
    "how, message",
    [
        ("called", "autograd does not reach other processes; train with pipe.forward_backward"),
        ("evaluating", "forward_backward in evaluation mode: call pipe.train"),
    ],
)
def test_training_by_the_output_is_refused_on_every_rank(ranks, how, message):
    for kind, said in ranks(train_by_output, 2, how, may_fail=True):
        assert kind == "ValueError" and message in said, said


# -- evaluation -----------------------------------------------------------------------------------


def several_figures(output, target):
    return {
        "loss": F.cross_entropy(output, target),
        "right": (output.argmax(1) == target).float().mean().item(),
    }


def evaluate(runs, alone):
    return [evaluate_one(run, alone) for run in runs]


def evaluate_one(run, alone):
    pipe, _ = make(run, alone=alone)
    x, y, ids = data_of(run, 0)
    pipe.forward_backward(x, y, sample_ids=ids)
    modes = [module.training for module in pipe.modules()]
    loader = [KINDS[run.model].batch(count, count) for count in (10, 5, 1)]
    values = [pipe.evaluate(loader), pipe.evaluate(iter(loader), several_figures)]
    with pipe.uncompressed():
        values.append(pipe.evaluate([(*batch, "more") for batch in loader], several_figures))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values.append(pipe.evaluate(loader))
    assert [module.training for module in pipe.modules()] == modes
    meters = [(link.meter.eval.wire_bytes, link.meter.eval_off.wire_bytes) for link in pipe.links]
    return values, meters


EVALUATED = [
    Run("deep convnet", 2, **COMPRESSED),
    Run("deep", 4, "Interleaved1F1B", **COMPRESSED),
    Run("deep convnet", 4, "ZBVZeroBubble", **COMPRESSED),
    Run("deep convnet", 2, act="topk:0.3", pipeline={"recompute": True}),
    Run("masked", 2, "GPipe", **COMPRESSED),
]


@pytest.mark.parametrize("runs", by_halves(EVALUATED))
def test_evaluation_is_that_of_one_process(ranks, runs):
    """Exactly, compressed and not, with batches smaller than chunks; on every rank."""
    results = ranks(evaluate, 2, runs, False)
    for i, run in enumerate(runs):
        expected, meters = evaluate_one(run, True)
        assert expected[0] != expected[2]["loss"]  # compressed, and not
        for rank in range(2):
            assert results[rank][i][0] == expected, run
        if run.schedule != "ZBVZeroBubble":
            ours = [
                [sum(pair) for pair in zip(*both, strict=True)]
                for both in zip(*(results[rank][i][1] for rank in range(2)), strict=True)
            ]
            assert ours == [list(pair) for pair in meters], run


@pytest.mark.slow
def test_evaluation_changes_no_training(ranks):
    """Evaluated after every step on the ranks, never in this process: the same bits."""
    runs = [
        Run("deep convnet", 2, evaluate=True, steps=3, act=act, grad=grad)
        for act, grad in [
            ("ef21+topk:0.3", "ef+topk:0.3"),
            ("aqsgd+quant:4", "ef21+randomk:0.3"),
            ("topk:0.3", "same"),
        ]
    ]
    results = ranks(train_several, 2, runs)
    for i, run in enumerate(runs):
        quiet = train(Run(**{**vars(run), "evaluate": False}))
        for rank in range(2):
            results[rank][i].values = []
        assert_same(run, [results[rank][i] for rank in range(2)], quiet)


def train_several(runs):
    return [train(run, alone=False) for run in runs]


def bad_batches():
    """What is wrong alike on all ranks is said on all ranks, and the pipeline goes on."""
    pipe, _ = make(Run("deep", 2, act="aqsgd+quant:4"), alone=False)
    x, y, ids = data_of(Run(), 0)
    calls = [
        lambda: pipe.forward_backward(x[:3], y[:3], sample_ids=ids[:3]),
        lambda: pipe.forward_backward(x, y[:5], sample_ids=ids),
        lambda: pipe.forward_backward(x, y),
        lambda: pipe.forward_backward(x, y, sample_ids=[1] * 10),
        lambda: pipe.forward_backward("no tensor", y),
        lambda: pipe.evaluate([]),
        lambda: pipe.evaluate([(x[:0], y[:0])]),
    ]
    said = []
    for call in calls:
        try:
            call()
        except (ValueError, TypeError) as error:
            said.append(str(error))
    return said, float(pipe.forward_backward(x, y, sample_ids=ids)), dist.get_rank()


def test_bad_batches_are_named_and_do_no_harm(ranks):
    results = ranks(bad_batches, 2)
    expected = train(Run("deep", 2, act="aqsgd+quant:4", steps=1)).losses[0]
    for said, loss, _ in results:
        assert loss == float(expected)
        for text, part in zip(
            said,
            (
                "chunks=4 is larger than the batch of 3 rows",
                "target has 5 rows, the batch 10",
                "needs sample_ids [batch] in every training step",
                "sample id 1 occurs twice in one batch",
                "holds no tensor",
                "the loader yielded no batch",
                "the batch has no rows",
            ),
            strict=True,
        ):
            assert part in text


# -- what changes in a batch ----------------------------------------------------------------------


class Given(nn.Module):
    """A model whose shapes depend on a number of the batch, and values on a word."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(13, 8), nn.Linear(8, 5)

    def forward(self, x, size, name):
        return self.last(widened(self.first(x), size, name)).mean(1)


@fx.wrap
def widened(x, size, name):
    return x.unsqueeze(1).repeat(1, size, 1) * (1 + sum(map(ord, name)) % 7)


def data_that_changes(i):
    x, y = rows(4, seed=i)
    return {"x": x, "size": 1 + i % 50, "name": f"step {i}"}, y


def losses_of_changes(alone):
    """The loss of each step, and how many plans are kept for them."""
    torch.manual_seed(0)
    options = {"engine": "local"} if alone else {"timeout": 60.0}
    pipe = mpcomp.pipeline(Given(), 1, split=["first"], loss_fn=F.cross_entropy, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    losses = []
    for i in range(100):
        losses.append(pipe.forward_backward(*data_that_changes(i)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), 0 if alone else len(pipe.engine._planner._known)


@pytest.mark.slow
def test_a_hundred_numbers_and_words_are_the_plain_model_and_not_kept(ranks):
    torch.manual_seed(0)
    model = Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    expected = []
    for i in range(100):
        batch, y = data_that_changes(i)
        expected.append(F.cross_entropy(model(**batch), y))
        expected[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.stack(expected).detach()
    for losses, kept in [losses_of_changes(alone=True), *ranks(losses_of_changes, 2, False)]:
        assert same_bits(losses, expected)
        assert kept <= 32
