"""torch.set_default_dtype changes no number and no byte of any method between replicas."""

import pytest
import torch
from methods import same_bits
from replica_methods import SPECS
from replica_runs import alone, exchange_of, exchanged, gradients, parameters


def after(spec, default):
    """Results of six steps, and what is kept then."""
    like = parameters()
    given = [gradients(like, 0, step) for step in range(6)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with alone():
            exchange = exchange_of(spec, like)
            results = [exchanged(exchange, each) for each in given]
            return results, exchange.state_dict()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", SPECS)
def test_an_exchange(spec):
    results, state = after(spec, torch.float32)
    for default in (torch.float64, torch.bfloat16):
        results_again, state_again = after(spec, default)
        for ours, theirs in zip(results_again, results, strict=True):
            assert all(same_bits(ours[name], theirs[name]) for name in theirs), default
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        assert state_again.keys() == state.keys()
        assert all(same_bits(state_again[k], v) for k, v in tensors.items()), default
