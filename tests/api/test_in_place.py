"""Blocks that write to what they are given: the plain model's numbers, wherever the cut is."""

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import assert_same_training, clone, plain_step
from ranks import preload
from torch import nn

import mpcomp

preload("test_in_place")
WIDTH, CLASSES, CHUNKS = 6, 3, 3


def adds(x):
    x += 1
    return x


def scales_rows(x):
    x[:, ::2] *= 2
    return x


def through_a_view(x):
    x.view(-1).sub_(0.5)
    return x.tanh()


def after_use(x):
    y = x.sum(1, keepdim=True)
    return x.mul_(3) + y


def masks(x):
    return x.masked_fill_(x > 0.3, 0.0)


def by_index(x):
    return x.index_add_(1, torch.tensor([0, 2]), torch.ones(len(x), 2))


def functional(x):
    return F.leaky_relu(x, inplace=True)


def without_a_gradient(x):
    with torch.no_grad():
        x.clamp_(-1, 1)
    return x * 2


WAYS = (
    adds, scales_rows, through_a_view, after_use, masks, by_index, functional, without_a_gradient
)  # fmt: skip


class Writing(nn.Module):
    """Writes to its input, in training and in evaluation, or in one of them."""

    def __init__(self, way, modes=(True, False)):
        super().__init__()
        self.way, self.modes = way, modes
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.training not in self.modes:
            x = x.clone()
        return self.linear(self.way(x))


def model_of(way, modes=(True, False)):
    torch.manual_seed(0)
    first, second = Writing(way, modes), Writing(way, modes)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), first, nn.Linear(WIDTH, WIDTH), second, nn.Linear(WIDTH, CLASSES)
    )


def data():
    torch.manual_seed(1)
    return torch.randn(6, WIDTH), torch.arange(6) % CLASSES


def trained(way, modes=(True, False), split=(1, 2, 2), **options):
    """Two steps: the pipeline, what it said, and what became of the batch."""
    pipe = mpcomp.pipeline(
        model_of(way, modes), CHUNKS, split=list(split), loss_fn=F.cross_entropy, **options
    )
    x, y = data()
    said = [pipe.forward_backward(x, y), pipe.evaluate([(x, y)]), pipe.forward_backward(x, y)]
    return pipe, torch.tensor(said), x


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("modes", [(True, False), (True,), (False,)], ids=["both", "train", "eval"])
@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_the_plain_models(way, modes, recompute):
    pipe, said, x = trained(way, modes, recompute=recompute)
    plain, (before, y) = model_of(way, modes), data()
    assert same_bits(x, before)
    for step in (0, 1):
        assert said[2 * step] == plain_step(plain, x, y, [2] * CHUNKS, step=step)
        if step == 0:
            with torch.no_grad():
                assert said[1] == pytest.approx(float(F.cross_entropy(plain.eval()(x), y)))
            plain.train()
    assert_same_training(pipe, plain)


class First(nn.Module):
    """A first block that writes to the batch itself, which has names."""

    def __init__(self, way):
        super().__init__()
        self.writing = Writing(way)

    def forward(self, x, scale):
        scale.mul_(2)
        return self.writing(x) * scale


@pytest.mark.parametrize("way", WAYS)
def test_the_batch_stays_as_it_is(way):
    """The plain model would find it changed in its next epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(First(way), nn.Linear(WIDTH, CLASSES))
    x, y = data()
    scale = torch.rand(6, 1)
    kept = clone(model)
    pipe = mpcomp.pipeline(model, 1, split=2, loss_fn=F.cross_entropy)
    for _ in range(2):
        loss = pipe.forward_backward({"x": x, "scale": scale}, y)
        assert same_bits(
            loss, F.cross_entropy(kept[1](kept[0](x.clone(), scale.clone())), y).detach()
        )


@pytest.mark.parametrize("way", WAYS)
def test_no_estimate_is_written_to(way):
    """An end may remember the very tensor that it gives to the stage."""

    methods = {"act_comp": "ef21+topk:0.4", "grad_comp": "ef+topk:0.4"}
    pipe, said, _ = trained(way, **methods)
    other, expected, _ = trained(lambda x: way(x.clone()), **methods)
    assert same_bits(said, expected)
    assert_same_training(pipe, other)


def in_ranks(names, schedules):
    found = []
    for name in names:
        for schedule in schedules:
            split = (1, 4) if schedule is None else (1, 1, 1, 2)
            pipe, said, _ = trained(globals()[name], split=split, schedule=schedule, timeout=60.0)
            found.append((said, {key: p.grad for key, p in pipe.named_parameters()}))
    return found


def test_two_ranks_do_what_one_process_does(ranks):
    names = [way.__name__ for way in WAYS]
    schedules = (None, "InterleavedZeroBubble")
    results = ranks(in_ranks, 2, names, schedules)
    for i, name in enumerate(names):
        for j, split in enumerate(((1, 4), (1, 1, 1, 2))):
            pipe, expected, _ = trained(globals()[name], split=split)
            grads = {key: p.grad for key, p in pipe.named_parameters()}
            seen = set()
            for of_rank in results:
                said, ours = of_rank[2 * i + j]
                assert same_bits(said, expected)
                assert all(same_bits(grad, grads[key]) for key, grad in ours.items())
                seen |= ours.keys()
            assert seen == grads.keys()
