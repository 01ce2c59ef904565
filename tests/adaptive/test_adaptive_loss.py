"""The gain by the loss: extra forward passes that leave no trace."""

import pytest
import torch
import torch.nn.functional as F
from models import CONV_SPLIT, assert_same_training, convnet, images

import mpcomp
from mpcomp import Adaptive, TopK

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")


def pipe_of(act, grad=None, loss_fn=F.cross_entropy, **kwargs):
    torch.manual_seed(0)
    return mpcomp.pipeline(
        convnet(), 2, split=CONV_SPLIT, act_comp=act, grad_comp=grad, loss_fn=loss_fn,
        engine="local", **kwargs,
    )  # fmt: skip


def run(pipe, first, last):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(first, last):
        losses.append(pipe.forward_backward(*images(8, step)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def by_loss(**settings):
    settings = {"cf": (2, 20), "window": 3, "eps": 0.9, "bandwidth_mbps": 1.0, **settings}
    return Adaptive(TopK(0.1), gain="loss", **settings)


def test_passes_leave_no_trace(global_rng_untouched):
    """BatchNorm, dropout, meters, generators and the feedback of other links are as without."""
    pipe = pipe_of(by_loss(eps=0.999999, cf=(15, 20)), "ef21+topk:0.3")
    plain = pipe_of(None, "ef21+topk:0.3")
    with global_rng_untouched():
        losses = run(pipe, 0, 3)
    assert torch.equal(losses, run(plain, 0, 3))
    assert_same_training(pipe, plain)
    assert pipe.wire_bytes == plain.wire_bytes
    for link in pipe.links:
        assert link.meter.eval.messages == link.meter.eval_off.messages == 0
    assert pipe.boundaries[0].act.meter.probe.messages > 0


def test_the_gain_is_the_rise_of_the_loss_of_one_microbatch(monkeypatch):
    seen = []

    def loss_fn(output, target):
        loss = F.cross_entropy(output, target)
        if not torch.is_grad_enabled():
            seen.append(loss.item())
        return loss

    pipe = pipe_of(by_loss(), loss_fn=loss_fn)
    run(pipe, 0, 1)
    dense, *compressed = seen
    assert len(compressed) == 4  # two links, two CFs
    for link, at in zip(("0.act", "1.act"), (compressed[:2], compressed[2:]), strict=True):
        said = pipe.adaptive_history[0]["links"][link]
        gains = [max(0.0, min(1.0, 1 - (loss - dense) / dense)) for loss in at]
        assert [said["gain_min"], said["gain_candidate"]] == pytest.approx(gains)
    run(pipe, 1, 3)
    assert len(seen) == 5  # once a window
    run(pipe, 3, 4)
    assert len(seen) > 5


def test_links_compress_by_it_also_with_a_budget():
    pipe = pipe_of(by_loss(eps=0.5))
    assert run(pipe, 0, 8).isfinite().all()
    assert any(s["cf"] > 1 for e in pipe.adaptive_history for s in e["links"].values())
    method = Adaptive(TopK(0.1), gain="loss", cf=(2, 20), window=3, budget=0.3)
    pipe = pipe_of(method)
    run(pipe, 0, 5)
    traffic = [link.meter.train for link in pipe.links if link.direction == "act"]
    wire, dense = (sum(getattr(t, n) for t in traffic) for n in ("wire_bytes", "dense_bytes"))
    assert 0.1 * dense < wire <= 0.3 * dense
    assert pipe.boundaries[0].act.adaptive.gains()


def test_with_a_budget_it_is_measured_beside_what_the_others_send():
    """So that without a change it is the loss of training itself."""
    trained, seen = [], []

    def loss_fn(output, target):
        loss = F.cross_entropy(output, target)
        (trained if torch.is_grad_enabled() else seen).append(loss.item())
        return loss

    method = Adaptive(TopK(0.1), gain="loss", cf=(2, 20), window=1, budget=0.2)
    pipe = pipe_of(method, "topk:0.3", loss_fn=loss_fn)
    for module in pipe.modules():
        if isinstance(module, torch.nn.Dropout | torch.nn.Dropout2d):
            module.p = 0.0  # a pass of one microbatch draws as the first
    rungs = len(method.rungs)
    for step in range(4):
        trained.clear(), seen.clear()
        factors = [b.act.adaptive.cf for b in pipe.boundaries] if step else []
        run(pipe, step, step + 1)
        without, *rest = seen
        assert len(rest) == 2 * rungs  # of two links
        assert without == trained[step % 2]  # the microbatch of the step
        for at, cf in zip((rest[:rungs], rest[rungs:]), factors, strict=bool(step)):
            assert at[method.rungs.index(cf)] == without
        assert len(set(rest)) > rungs


def test_a_loss_that_is_not_finite_measures_nothing():
    pipe = pipe_of(by_loss(), loss_fn=lambda output, target: F.cross_entropy(output, target)
                   + (0.0 if torch.is_grad_enabled() else torch.nan))  # fmt: skip
    run(pipe, 0, 2)
    assert all(s["branch"] == "dense" for e in pipe.adaptive_history for s in e["links"].values())
    assert pipe.boundaries[0].act.adaptive.search.gain_min is None
