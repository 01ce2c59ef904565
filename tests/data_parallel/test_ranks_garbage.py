"""Steps leave nothing behind that only Python's collector of circles would find.

Gradients were in such circles, which are collected when there are many objects, not when there is
much memory.
"""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpcomp

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


@pytest.mark.parametrize("method", METHODS)
def test_a_step_leaves_no_circles(ranks, method):
    assert ranks(garbage, 2, method) == [0, 0]
