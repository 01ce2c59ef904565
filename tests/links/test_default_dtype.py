"""torch.set_default_dtype changes no number and no byte of any method at a cut."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from methods import EXAMPLES, beside, same_bits
from torch import nn

import mpcomp
from mpcomp import SameIndices, TopK

AT_CUTS = [v for values in EXAMPLES.values() for v in values]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(method, default, dtype, direction):
    """Losses, gradients, state of links and bytes of three steps, one of them dense."""
    torch.manual_seed(0)
    blocks = (nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))
    model = nn.Sequential(*blocks).to(dtype)
    x, y = torch.randn(3, 8, 6).to(dtype), torch.randint(3, (3, 8))
    methods = {direction: method}
    if isinstance(method, SameIndices):
        methods = {"act_comp": TopK(0.3), "grad_comp": method}
    elif beside(method, None) is not None:  # its memory needs gradients beside it
        methods = {"act_comp": method, "grad_comp": beside(method, None)}
    with default_dtype(default):
        pipe = mpcomp.pipeline(
            model, 2, split=["1"], loss_fn=F.cross_entropy, warmup_steps=1, **methods
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            found.append(pipe.forward_backward(x[step], y[step], sample_ids=torch.arange(8)))
            found += [p.grad.clone() for p in pipe.parameters()]
            optimizer.step()
        found.append(torch.tensor(pipe.evaluate([(x[0], y[0])]), dtype=torch.float64))
    states = [link.endpoint.state_dict() for link in pipe.links]
    return found, states, pipe.wire_bytes


def assert_same_state(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(value, theirs[name]), name
        else:
            assert value == theirs[name], name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.each_once
@pytest.mark.parametrize("direction", ["act_comp", "grad_comp"])
@pytest.mark.parametrize("method", AT_CUTS, ids=str)
def test_a_cut(method, direction):
    if direction == "act_comp" and isinstance(method, SameIndices):
        pytest.skip("of gradients alone")
    for dtype in (torch.float32, torch.float64):
        found, states, wire_bytes = trained(method, torch.float32, dtype, direction)
        again, states_again, bytes_again = trained(method, torch.float64, dtype, direction)
        assert bytes_again == wire_bytes
        assert all(map(same_bits, again, found)), dtype
        for ours, theirs in zip(states_again, states, strict=True):
            assert_same_state(ours, theirs)
