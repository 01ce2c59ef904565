"""Encoders, and encoder-decoders, over several processes do what they do in one, bit for bit."""

from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from encoder_runs import train_encoders
from everyday import by_halves
from lm_runs import check, lm_run

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

COMPRESSED = {"act": "quant:8", "grad": "ef21+topk:0.3"}


RUNS = [
    lm_run("bert", pipeline={"ties": "apart"}, **COMPRESSED),
    lm_run("bert"),
    lm_run("deberta", **COMPRESSED),
    lm_run("bert", 2, "GPipe", **COMPRESSED),
    lm_run("vit"),
    lm_run("vit", pipeline={"recompute": True}, **COMPRESSED),
    lm_run("bart", pipeline={"data": "first", "split": [2, 4]}, **COMPRESSED),
    lm_run("bart", pipeline={"ties": "apart", "recompute": True}, **COMPRESSED),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("runs", by_halves(RUNS))
def test_encoders_on_two_ranks(ranks, runs):
    """Ties apart and at one place, weights that all blocks read, images, two parts, padding."""
    check(ranks, 2, [replace(run, steps=2) for run in runs], train_encoders)
