"""A link whose messages are further from what was meant than zeros: said once, with the cure."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpcomp


def pipe_of(act=None, grad=None):
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 3))
    return mpcomp.pipeline(
        model, 2, split=[2, 1], act_comp=act, grad_comp=grad, loss_fn=F.cross_entropy
    )


def batch():
    return torch.randn(6, 8), torch.arange(6) % 3


def messages_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if "of its norm" in str(each.message)]


@pytest.mark.parametrize("phase", ["training", "evaluation"])
def test_said_once_with_the_link_and_the_cure(phase):
    pipe = pipe_of("randomk:0.2:unbiased=true")

    def run():
        for _ in range(3):
            if phase == "training":
                pipe.forward_backward(*batch())
            else:
                pipe.evaluate([batch()])

    (message,) = messages_of(run)
    assert message.startswith("boundary 0 act: with randomk:0.2:unbiased=True what arrives")
    assert "scale=token" in message and "None" in message


@pytest.mark.parametrize(
    "act, grad",
    [
        ("quant:8", "quant:8"),
        ("topk:0.5", "randomk:0.2:unbiased=true"),  # right on average
        ("topk:0.5", "ef+randomk:0.1"),  # the rest is sent later
        (None, None),
    ],
)
def test_what_is_better_than_zeros_or_made_good_is_not_spoken_of(act, grad):
    pipe = pipe_of(act, grad)
    assert not messages_of(lambda: [pipe.forward_backward(*batch()) for _ in range(8)])


def test_a_gradient_that_nothing_makes_good():
    link = pipe_of(None, "sign").boundaries[0].grad
    traffic = link.meter.train
    traffic.count(1, 1, 1)
    traffic.compare(torch.full((100,), 0.1), torch.full((100,), -0.2))
    found = messages_of(lambda: [link.warnings.of_error(traffic) for _ in range(2)])
    assert len(found) == 1 and found[0].startswith("boundary 0 grad: with sign what arrives is wro")
