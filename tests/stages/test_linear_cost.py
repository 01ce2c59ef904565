"""Cutting a model takes twice the calls for twice the blocks or stages, and no more."""

import sys

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import mpcomp
from stages import blocks, partition, split


def calls(function, *arguments, **options):
    """Calls of all functions and generators, in Python and C, that a call of this one makes."""
    count = 0

    def noting(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(noting)
    try:
        function(*arguments, **options)
    finally:
        sys.setprofile(before)
    return count


def chain(num_blocks):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_blocks)))


def decoder(num_blocks):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    with torch.device("meta"):
        config = AutoConfig.for_model("llama", num_hidden_layers=num_blocks, **sizes)
        return AutoModelForCausalLM.from_config(config)


def pipeline(model, where):
    return mpcomp.pipeline(model, 2, split=where)


#: More than double by what a logarithm adds, far below the four times of a square.
DOUBLE = 2.4


@pytest.mark.parametrize("make", [chain, decoder])
def test_the_units_of_a_model(make):
    few, many = (calls(blocks, make(number)) for number in (50, 100))
    assert many < DOUBLE * few


@pytest.mark.parametrize("cut", [split, pipeline])
def test_blocks_in_four_stages(cut):
    cut(chain(8), 4)  # what is done once
    few, many = (calls(cut, chain(number), 4) for number in (200, 400))
    assert many < DOUBLE * few


@pytest.mark.parametrize("cut", [split, pipeline])
def test_as_many_blocks_in_more_stages(cut):
    cut(chain(8), 4)
    few, many = (calls(cut, chain(200), [200 // number] * number) for number in (50, 100))
    assert many < DOUBLE * few


@pytest.mark.parametrize("make", [chain, decoder])
def test_stages_of_two_blocks(make):
    few, many = (calls(split, make(2 * number), [2] * number) for number in (25, 50))
    assert many < DOUBLE * few


@pytest.mark.parametrize("prices", [False, True], ids=["even", "cheap"])
@pytest.mark.parametrize(
    "size",
    [lambda unit: 1.0, lambda unit: 1.0 + unit % 7, lambda unit: 1.0 + 500 * (unit == 0)],
    ids=["alike", "unlike", "one large"],
)
def test_a_partition(size, prices):
    def steps(num_units, num_stages):
        sizes = [size(unit) for unit in range(num_units)]
        bytes_at_cuts = [1.0 + unit % 5 for unit in range(num_units)] if prices else None
        return calls(partition, sizes, num_stages, prices=bytes_at_cuts, slack=0.25 * prices)

    assert steps(800, 4) < DOUBLE * steps(400, 4)
    assert steps(800, 32) < DOUBLE * steps(800, 16)
