"""The first rank runs its first microbatch while ranks agree on a step, and takes it back.

What a forward changes (buffers, attributes, weights, generators) and what its message does to links
is put back where ranks do not agree, so that the next step is as if nothing had been.
"""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from methods import same_bits
from models import CLASSES, assert_same_state, links_state
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import mpcomp

WIDTH, CHUNKS, ROWS = 12, 4, 8
PATIENT_S = 90.0


class Counting(nn.Module):
    """Counts its forwards in an attribute, in a buffer, behind autograd's back, and in a list."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen, self.log = 0, []

    def forward(self, x):
        self.seen += 1
        self.log.append(self.seen)
        self.calls.data.add_(1)
        return x * (1 + 0.01 * self.calls + 0.01 * self.seen)


class Drawing(nn.Module):
    """Draws from all generators of the process."""

    def forward(self, x):
        drawn = random.random() + float(np.random.rand())  # noqa: NPY002  (users do)
        return x + 0.01 * drawn + 0.01 * torch.rand(())


class Found(nn.Module):
    """A table whose rows are shortened in the forward that looks them up."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, max_norm=0.3)

    def forward(self, x):
        return self.table(x.abs().mul(7).long() % 20).sum(1)


FIRST = {
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
    "attributes": Counting,
    "generators": Drawing,
    "max_norm": Found,
    "dropout": lambda: nn.Dropout(0.3),
}
METHODS = {
    "batchnorm": ("ef21+topk:0.3", "ef+topk:0.3"),
    "attributes": ("aqsgd+quant:4", "quant:4:rounding=stochastic"),
    "generators": ("auto", "auto"),
    "max_norm": ("topk:0.3", "same"),
    "dropout": ("none", "none"),
}


def made(what, **kwargs):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = nn.Sequential(
        nn.Sequential(FIRST[what](), nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, CLASSES)),
    )
    act, grad = METHODS[what]
    options = {"act_comp": act, "grad_comp": grad, "loss_fn": F.cross_entropy, **kwargs}
    pipe = mpcomp.pipeline(model, CHUNKS, split=["0"], **options)
    return pipe, torch.optim.SGD(pipe.parameters(), lr=0.05)


def batch(number, rows=ROWS):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def step(pipe, optimizer, number):
    x, y = batch(number)
    loss = pipe.forward_backward(x, y, sample_ids=torch.arange(ROWS))
    optimizer.step()
    optimizer.zero_grad()
    return loss


def state_of(pipe):
    """All that a forward or a message may change on this rank."""
    modules = [module for stage in pipe.stages for module in stage.modules()]
    counted = [(m.seen, list(m.log)) for m in modules if isinstance(m, Counting)]
    meters = [
        (link.meter.train.messages, link.meter.train.wire_bytes, link.meter.train.nonfinite)
        for link in pipe.links
    ]
    drawn = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    tensors = [t.clone() for s in pipe.stages for t in (*s.parameters(), *s.buffers())]
    tensors.append(torch.get_rng_state())
    return (counted, meters, drawn, [p.grad for p in pipe.parameters()]), tensors


def refused(pipe, x, y):
    """The words of a step that ranks do not agree on, which has run the first microbatch."""
    ran = []

    def note(_module, _args, output):
        if not isinstance(output, FakeTensor):
            ran.append("forward")

    linear = [m for stage in pipe.stages for m in stage.modules() if isinstance(m, nn.Linear)]
    handles = [module.register_forward_hook(note) for module in linear]
    links, (plain, tensors) = links_state(pipe), state_of(pipe)
    with pytest.raises(ValueError, match="were given different data") as caught:
        pipe.forward_backward(x, y, sample_ids=torch.arange(len(x)))
    for handle in handles:
        handle.remove()
    assert_same_state(links_state(pipe), links)
    after, tensors_after = state_of(pipe)
    assert after == plain
    assert all(same_bits(a, b) for a, b in zip(tensors_after, tensors, strict=True))
    return str(caught.value), len(ran)


def disagreeing(what):
    """Steps with calls between them that ranks do not agree on."""
    pipe, optimizer = made(what, timeout=PATIENT_S)
    is_first = dist.get_rank() == 0
    losses, said = [], []
    for number in range(6):
        losses.append(step(pipe, optimizer, number))
        x, y = batch(100 + number)
        if number == 0:  # other numbers
            said.append(refused(pipe, x if is_first else x + 1, y))
        elif number == 2:  # what is not finite, on the first rank alone
            said.append(refused(pipe, x * float("inf") if is_first else x, y))
        elif number == 3:  # a batch that the first stage cannot take
            said.append(refused(pipe, x[:, :5] if is_first else x, y))
        elif number == 4:  # a target of the last rank's
            said.append(refused(pipe, x, y if is_first else (y + 1) % CLASSES))
    return torch.stack(losses), said, pipe.wire_bytes, pipe.num_steps


@pytest.mark.parametrize("what", FIRST)
def test_a_step_that_ranks_do_not_agree_on_leaves_nothing(ranks, what):
    pipe, optimizer = made(what, engine="local")
    expected = torch.stack([step(pipe, optimizer, number) for number in range(6)])
    results = ranks(disagreeing, 2, what)
    for losses, said, _, num_steps in results:
        assert num_steps == 6
        assert same_bits(losses, expected)
        assert len(said) == 4
    ran = [count for _, count in results[0][1]]
    # What the first stage could run it had, and nobody else had anything to run.
    takes_any_width = what == "max_norm"
    assert ran == [1, 1, int(takes_any_width), 1]
    assert [count for _, count in results[1][1]] == [0] * 4
    assert results[0][2] == results[1][2] == pipe.wire_bytes


def nothing_to_train():
    pipe, optimizer = made("batchnorm", timeout=PATIENT_S)
    losses = [step(pipe, optimizer, 0)]
    for parameter in pipe.parameters():
        parameter.requires_grad_(False)
    plain, tensors = state_of(pipe)
    with pytest.raises(ValueError, match="nothing to train"):
        step(pipe, optimizer, 1)
    after, tensors_after = state_of(pipe)
    assert after == plain
    assert all(same_bits(a, b) for a, b in zip(tensors_after, tensors, strict=True))
    for parameter in pipe.parameters():
        parameter.requires_grad_()
    return torch.stack([*losses, step(pipe, optimizer, 1)])


def test_neither_does_one_with_nothing_to_train(ranks):
    pipe, optimizer = made("batchnorm", engine="local")
    expected = torch.stack([step(pipe, optimizer, number) for number in range(2)])
    for losses in ranks(nothing_to_train, 2):
        assert same_bits(losses, expected)
