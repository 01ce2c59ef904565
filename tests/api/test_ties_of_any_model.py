"""Weights that two blocks share, in models that nobody has prepared: cut as they are."""

import copy

import pytest
import torch
import torch.nn.functional as F
from lms import POSITIONS, VOCABULARY, NanoGPT
from methods import same_bits
from models import rows
from torch import nn

import mpcomp
from mpcomp import CausalLMLoss


def tokens(seed=0):
    return torch.randint(VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(seed))


def tied_chain():
    model = nn.Sequential(nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 13))
    model[3].weight = nn.Parameter(torch.randn(13, 5) / 4)
    head = nn.Linear(13, 5)
    model.append(head)
    model[0].weight = head.weight
    return model


MODELS = {
    "nanoGPT": (NanoGPT, 3, CausalLMLoss(), lambda i: (tokens(i),) * 2),
    "chain": (tied_chain, [2, 1, 2], F.cross_entropy, lambda i: rows(6, i)),
}


@pytest.mark.parametrize("ties", ["together", "apart"])
@pytest.mark.parametrize("kind", MODELS)
def test_it_trains_as_the_uncut_model(kind, ties):
    make, split, loss_fn, batch = MODELS[kind]
    model = make()
    plain, names = copy.deepcopy(model), list(model.state_dict())
    pipe = mpcomp.pipeline(model, 2, split=split, loss_fn=loss_fn, ties=ties)
    (tie,) = pipe.ties or pipe.shared_weights
    assert sorted(pipe.state_dict()) == sorted(names)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pipe, plain)]
    for number in range(3):
        x, y = batch(number)
        loss = pipe.forward_backward(x, y)
        expected = torch.zeros(())
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            share = loss_fn(plain(part), target) / 2
            share.backward()
            expected += share.detach()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = pipe.state_dict()
    first, last = (state[name] for _, name in tie.copies)
    assert same_bits(first, last) and (first is last) == (ties == "together")
    merged = pipe.merge()
    assert merged is model
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-4)
    parameters = dict(merged.named_parameters(remove_duplicate=False))
    assert len({id(parameters[name]) for _, name in tie.copies}) == 1


def test_nano_gpt_is_cut_by_names_and_keeps_its_assert():
    torch.manual_seed(0)
    model = NanoGPT()
    pipe = mpcomp.pipeline(model, 2, split=["transformer.h.0", "transformer.h.2"])
    assert [stage.block_names[-1] for stage in pipe.stages[:-1]] == [
        "transformer.h.0",
        "transformer.h.2",
        "transformer.ln_f",  # the head is beside the embedding
    ]
    with torch.no_grad():
        assert same_bits(pipe(tokens()), model(tokens()))
        long = torch.zeros(2, POSITIONS + 1, dtype=torch.long)
        with pytest.raises(AssertionError, match="positions <= self.block_size"):
            pipe(long)
