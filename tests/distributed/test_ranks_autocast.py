"""Autocast: whatever its context is held around, casts are of the weights as they are."""

import pytest
import torch
import torch.nn.functional as F
from models import mlp, rows

import mpcomp

STEPS = 3


def losses(updates, cached, **options):
    """Of steps within one context, which keeps casts of weights, or makes each anew."""
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(mlp(), 4, loss_fn=F.cross_entropy, timeout=60.0, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    within = {"update": update, "updates": 4} if updates else {}
    found = []
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        for step in range(STEPS):
            x, y = rows(16, seed=step)
            found.append(float(pipe.forward_backward(x, y, **within)))
            if not updates:
                update()
    return found


def compare(updates, options):
    assert losses(updates, True, **options) == losses(updates, False, **options)


@pytest.mark.parametrize(
    ("num_ranks", "updates", "options"),
    [
        (2, False, {}),
        (2, True, {}),
        (2, False, {"replicas": 2}),
        (2, False, {"replicas": 2, "shard": True}),
    ],
    ids=str,
)
def test_no_cast_of_a_weight_outlives_it(ranks, num_ranks, updates, options):
    ranks(compare, num_ranks, updates, options)
