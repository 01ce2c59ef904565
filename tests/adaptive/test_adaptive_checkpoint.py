"""Law 7 for adaptive links: save, load, go on = never stopped."""

import json

import pytest
import torch
import torch.nn.functional as F
from models import (
    CONV_SPLIT,
    adamw,
    assert_same_state,
    assert_same_training,
    convnet,
    images,
    links_state,
)

import mpcomp
from mpcomp import EF21, Adaptive, ErrorFeedback, TopK

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
CLOCK = {"bandwidth_mbps": 1.0, "latency_ms": 0.1, "compute_ms": 0.5}
SETTINGS = {"cf": (2, 20), "eps": 0.5, "window": 3}
METHODS = {
    "topk": Adaptive(TopK(0.1), **SETTINGS, **CLOCK),
    "ef": Adaptive(ErrorFeedback(TopK(0.1)), **SETTINGS, **CLOCK),
    "ef21": Adaptive(EF21(TopK(0.1)), **SETTINGS, **CLOCK),
    "budget": Adaptive(TopK(0.1), cf=(2, 20), window=3, budget=0.3),
    "ef21 with a budget": Adaptive(EF21(TopK(0.1)), cf=(2, 20), window=3, budget=0.3),
}


def pipe_of(act, grad=None, seed=0):
    torch.manual_seed(seed)
    return mpcomp.pipeline(
        convnet(), 2, split=CONV_SPLIT, act_comp=act, grad_comp=grad, loss_fn=F.cross_entropy,
        engine="local",
    )  # fmt: skip


def run(pipe, optimizer, first, last):
    losses = []
    for step in range(first, last):
        losses.append(pipe.forward_backward(*images(8, step)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


@pytest.mark.parametrize("name", METHODS)
def test_going_on_is_as_if_never_stopped(name, tmp_path):
    method = METHODS[name]
    straight = pipe_of(method, method)
    optimizer = adamw(straight)
    run(straight, optimizer, 0, 5)
    straight.save(tmp_path / "a", optimizer=optimizer)
    expected = run(straight, optimizer, 5, 12)
    resumed = pipe_of(method, method, seed=9)
    again = adamw(resumed)
    run(resumed, again, 0, 2)
    resumed.load(tmp_path / "a", optimizer=again)
    resumed.zero_grad()
    assert torch.equal(run(resumed, again, 5, 12), expected)
    assert_same_training(resumed, straight)
    assert_same_state(links_state(resumed), links_state(straight))
    assert resumed.adaptive_history[-7:] == straight.adaptive_history[-7:]
    assert len({str(e["links"]) for e in straight.adaptive_history[-7:]}) > 1
    assert resumed.wire_bytes == straight.wire_bytes


def test_the_state_is_plain_json(tmp_path):
    pipe = pipe_of(METHODS["topk"])
    run(pipe, adamw(pipe), 0, 4)
    pipe.save(tmp_path / "a")
    links = json.loads((tmp_path / "a" / "checkpoint.json").read_text())["links"]
    assert (
        links["link.0.act"]["adaptive"] == pipe.boundaries[0].act.endpoint.state_dict()["adaptive"]
    )
    assert links["link.0.grad"]["adaptive"] is None


def test_other_methods_are_refused_and_none_begins_anew(tmp_path):
    pipe = pipe_of(METHODS["topk"])
    run(pipe, adamw(pipe), 0, 4)
    pipe.save(tmp_path / "a")
    other = pipe_of(METHODS["budget"])
    with pytest.raises(ValueError, match=r"state of adaptive.*link.0.act.*same compressors"):
        other.load(tmp_path / "a")
    plain = pipe_of(None)
    plain.save(tmp_path / "b")
    pipe.load(tmp_path / "b")
    assert pipe.boundaries[0].act.endpoint.policy.dense
    assert pipe.boundaries[0].act.endpoint.policy.search.steps == 0
