"""Language models over several processes do what they do in one, bit for bit.

Rows of unequal lengths, one of them without anything to predict, in uneven microbatches: masks and
positions reach every stage from the batch, and a microbatch weighs as much as it has tokens.
"""

from dataclasses import replace

import pytest
import torch
from everyday import by_halves
from lm_runs import check, lm_run, lora, lora_late, not_adapted

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
pytest.importorskip("transformers")

COMPRESSED = {"act": "topk:0.3", "grad": "ef21+topk:0.3"}
#: All but those with adapters.
MODELS = (
    "gpt2",
    "gpt2 left",
    "gpt2 full",
    "deep gpt2",
    "calm gpt2",
    "llama",
    "llama left",
    "tied llama",
)


OF_EACH_SCHEDULE = [
    lm_run("gpt2"),
    lm_run("gpt2 left", 2, "GPipe"),
    lm_run("gpt2 full", 2, "1F1B"),
    lm_run("gpt2", 4, "ZBVZeroBubble"),
    lm_run("gpt2 left", 4, "Interleaved1F1B"),
    lm_run("gpt2", 4, "DualPipeV"),
    lm_run("llama", 4, "DualPipeV"),
    lm_run("llama left"),
    lm_run("llama", 4, "InterleavedZeroBubble"),
    lm_run("calm gpt2", 4, "InterleavedZeroBubble"),
    lm_run("tied llama", 2, "GPipe"),
    lm_run("tied llama", 4, "ZBVZeroBubble"),
]


@pytest.mark.parametrize("runs", by_halves(OF_EACH_SCHEDULE))
def test_models_and_schedules_on_two_ranks(ranks, runs):
    """Dropout is on in all but one."""
    check(ranks, 2, [replace(run, steps=2) for run in runs])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("models", by_halves(MODELS))
def test_the_same_parameters_have_no_gradient(ranks, models):
    """On two ranks as in one process, of every model; adapters leave most without."""
    runs = [lm_run(model, steps=1) for model in models]
    for model, make in {"lora": lora, "late lora": lora_late}.items():
        runs.append(lm_run(model, steps=1, frozen=not_adapted(make)))
    all_ours = check(ranks, 2, runs)
    without = [set().union(*(o.without[0] for o in ours)) for ours in all_ours]
    assert not any(without[:-2]) and all(names for names in without[-2:])


@pytest.mark.slow
def test_models_and_schedules_on_four_ranks(ranks):
    runs = [
        lm_run("gpt2 left", 4, **COMPRESSED),
        lm_run("llama", 4, "GPipe", **COMPRESSED),
        lm_run("deep gpt2", 8, "Interleaved1F1B", steps=2, **COMPRESSED),
        lm_run("deep gpt2", 8, "ZBVZeroBubble", steps=2),
    ]
    check(ranks, 4, [replace(run, steps=2) for run in runs])


WAYS = {
    "recompute": {"pipeline": {"recompute": True}, **COMPRESSED},
    "bf16": {"autocast": torch.bfloat16, **COMPRESSED},
    "bf16 recomputed": {"autocast": torch.bfloat16, "pipeline": {"recompute": True}},
    "accumulated": {"accumulate": 2, "steps": 2, **COMPRESSED},
    "ef21": {"act": "ef21+quant:4", "grad": "ef+topk:0.3"},
    "aqsgd": {"act": "aqsgd+topk:0.3", "grad": "same", "ids": 9, "steps": 4},
    "warm-up": {"pipeline": {"warmup_steps": 2}, **COMPRESSED},
    "off for a step": {"off": (1,), **COMPRESSED},
    "to bf16": {"to": (0, torch.bfloat16)},
    "in flight": {"pipeline": {"in_flight": 1}},
    "tied top-k": {"pipeline": {"tie_comp": "topk:0.3"}},
    "tied feedback": {
        "pipeline": {"tie_comp": "ef+topk:0.3"},
        "accumulate": 2,
        "steps": 2,
        **COMPRESSED,
    },
    "tied, scaled": {
        "pipeline": {"tie_comp": "ef21+topk:0.3"},
        "scale": 1024.0,
        "overflow": (2, 1),
        "steps": 4,
        **COMPRESSED,
    },
    "overflow in the first stage": {"scale": 64.0, "overflow": (1, 0), **COMPRESSED},
}


@pytest.mark.slow
def test_what_a_training_loop_does(ranks):
    """Each in one schedule, the engine's own and others in turn."""
    schedules = (None, "Interleaved1F1B", None, "GPipe", "ZBVZeroBubble")
    runs = []
    for i, (name, way) in enumerate(WAYS.items()):
        model = "gpt2 left" if i % 2 else "gpt2"
        schedule = schedules[i % 5]
        if "in flight" in name or ("recompute" in str(way) and schedule == "ZBVZeroBubble"):
            schedule = None  # neither is for every schedule
        stages = 4 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 2
        runs.append(lm_run(model if "tied" in name or i % 4 else "llama", stages, schedule, **way))
    for run, ours in zip(runs, check(ranks, 2, runs), strict=True):
        for outcome in ours:
            if run.overflow is not None:
                assert outcome.skipped == [i == run.overflow[0] for i in range(run.steps)]
