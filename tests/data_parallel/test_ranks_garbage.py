"""Steps leave nothing behind that only Python's collector of circles would find.

Gradients were in such circles, which are collected when there are many objects, not when there is
much memory.
"""

import gc

import pytest
import torch
import torch.nn.functional as F
from replica_runs import alone, exchange_of, gradients, parameters
from torch import nn

import mpcomp
from mpcomp import ReplicaNetwork

METHODS = ["ef+topk:0.1", "powersgd:1", "dgc:0.1", "gravac:cf=2-4+topk:0.5", "diloco:2+ef+quant:4"]


def garbage(method):
    """Objects in circles after ten steps between two replicas."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    pipe = mpcomp.pipeline(model, 1, split=1, replicas=2, dp_comp=method, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.follow(optimizer)
    x = torch.randn(4, 32)

    def steps(number):
        for _ in range(number):
            pipe.forward_backward(x, x)
            optimizer.step()
            optimizer.zero_grad()

    steps(5)
    gc.collect()
    gc.disable()
    steps(10)
    found = gc.collect()
    gc.enable()
    return found


def garbage_by_method():
    return {method: garbage(method) for method in METHODS}


def test_a_step_leaves_no_circles(ranks):
    assert ranks(garbage_by_method, 2) == 2 * [dict.fromkeys(METHODS, 0)]


#: On each path, and one that waits for all gradients before it starts any.
STOPPED = ["bf16", "ef+randomk:0.2", "ef+topk:0.1", "powersgd:1", "dgc:0.1:clip=1"]


@pytest.mark.parametrize("ends", ["told", "begun again"])
@pytest.mark.parametrize("method", STOPPED)
def test_a_step_that_an_error_stops_half_way_leaves_none_either(method, ends):
    """Its paths, which nobody drives to their end, hold the step, and the step holds them."""
    like = parameters()
    with alone():
        exchange = exchange_of(method, like, ReplicaNetwork("gather", smallest=64))

        def stopped(number):
            for step in range(number):
                exchange.begin(lr=0.1)
                exchange.add(gradients(like, 0, step))
                if ends == "told":
                    exchange.finish_step(finite=False)

        stopped(2)
        gc.collect()
        gc.disable()
        stopped(10)
        found = gc.collect()
        gc.enable()
    assert found == 0
