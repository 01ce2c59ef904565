"""Advice at the start: numbers and a cure where a run would be slow, and silence elsewhere."""

import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import mlp
from torch import nn

import mpcomp
from mpcomp.api import advice


def advice_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


# -- cuts -----------------------------------------------------------------------------------------


class Skips(nn.Module):
    """A U-Net: two tensors are alive everywhere but at its end, where it is small."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(8, 8)
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.up = nn.Linear(16, 2)
        self.head = nn.Linear(10, 2)
        self.last = nn.Linear(2, 2)

    def forward(self, x):
        deep = torch.cat([x, self.deep(self.down(x))], 1)
        return self.last(self.head(torch.cat([x, self.up(deep)], 1)))


def test_a_stage_that_has_nearly_all_is_named():
    model = nn.Sequential(nn.Linear(90, 90), nn.Linear(90, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    (said,) = advice_of(lambda: mpcomp.pipeline(model, 2, split=3))
    assert "stage 0 (0) has 98% of all parameters, where 33% would be its share" in said
    assert "cut after '0', '1', '2'" in said and "split='time', sample=x" in said
    assert not advice_of(lambda: mpcomp.pipeline(model, 2, split=[1, 1, 2]))  # somebody's choice


def test_a_model_with_skips():
    (said,) = advice_of(lambda: mpcomp.pipeline(Skips(), 2, split=2))
    assert "stage 0 (down to up) has 90%" in said and "50%" in said
    assert "cut after 'up', 'head'" in said


def test_balanced_stages_are_not_spoken_of():
    assert not advice_of(lambda: mpcomp.pipeline(mlp(), 2, split=3, loss_fn=F.cross_entropy))


# -- threads --------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """A machine of 4 cores with a load, on which torch has threads."""

    def make(threads, load):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(advice, "num_cores", lambda: 4)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))

    return make


@pytest.mark.parametrize(
    "ranks, threads, load, said",
    [
        (4, 4, 0.0, "4 ranks of 4 threads each on 4 cores. Set OMP_NUM_THREADS=1"),
        (2, 4, 9.0, "2 ranks of 4 threads each on 4 cores. Set OMP_NUM_THREADS=2"),
        (1, 4, 5.6, r"busy \(load 6 on 4 cores\).*4 threads here. Set OMP_NUM_THREADS=1"),
        (2, 2, 0.0, None),
        (8, 1, 9.0, None),
        (1, 4, 3.9, None),
    ],
)
def test_more_threads_than_cores(machine, ranks, threads, load, said):
    machine(threads, load)
    if said is None:
        assert not advice_of(lambda: advice.advise_on_threads(ranks))
    else:
        with pytest.warns(UserWarning, match=said):
            advice.advise_on_threads(ranks)


def test_a_pipeline_says_so_unless_somebody_has_chosen(machine, monkeypatch):
    machine(4, 6.0)
    (said,) = advice_of(lambda: mpcomp.pipeline(mlp(), 2, split=2))
    assert "torch.set_num_threads(1)" in said
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert not advice_of(lambda: mpcomp.pipeline(mlp(), 2, split=2))


# -- ties -----------------------------------------------------------------------------------------


def test_a_weight_that_cannot_be_on_one_rank_is_named():
    """With the reason; not where that was chosen, and not where it can be."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3))
    model[3].weight = model[0].weight
    made = {"chunks": 1, "loss_fn": F.mse_loss}
    (said,) = advice_of(lambda: mpcomp.pipeline(model, split=[3, 1], **made))
    assert "0.weight and 3.weight are one weight" in said and "cut earlier" in said
    assert not advice_of(lambda: mpcomp.pipeline(model, split=[3, 1], ties="apart", **made))
    assert not advice_of(lambda: mpcomp.pipeline(model, split=[1, 3], **made))
