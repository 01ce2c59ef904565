"""`recipes.bench.accelerator`: blocks and a head that wait in place of an accelerator."""

import pytest
import torch

from recipes.bench import accelerator, link_worker
from recipes.bench.accelerator import MIXTURES, WaitingBlock, WaitingHead, loss_of_mixtures
from recipes.bench.link_report import cores_shared


def test_it_waits_forward_and_twice_as_long_backward(monkeypatch):
    waits = []
    monkeypatch.setattr(accelerator.time, "sleep", waits.append)
    block = WaitingBlock(4, 0.5)
    x = torch.randn(2, 3, 4, requires_grad=True)
    out = block(x)
    assert waits == [0.5]
    out.sum().backward()
    assert waits == [0.5, 1.0]


def test_its_gradient_is_that_of_what_it_computes(monkeypatch):
    monkeypatch.setattr(accelerator.time, "sleep", lambda seconds: None)
    block = WaitingBlock(4, 0.5).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,))


def test_a_head_gives_dense_gradients_for_a_few_logits(monkeypatch):
    waits = []
    monkeypatch.setattr(accelerator.time, "sleep", waits.append)
    head = WaitingHead(width=4, vocab=50, context=12, forward_s=0.5)
    x = torch.randn(3, 12, 4, requires_grad=True)
    logits = head(x)
    assert logits.shape == (3, MIXTURES, 50)
    loss_of_mixtures(logits, torch.randint(50, (3, 12))).backward()
    assert waits == [0.5, 1.0]
    assert x.grad.count_nonzero() == x.numel()
    assert head.to_logits.weight.grad.count_nonzero() == 50 * 4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("milliseconds", "num_waiting"), [(0.0, 0), (5.0, 2)])
def test_the_model_of_the_bench_waits_if_it_is_asked_to(milliseconds, num_waiting, tied):
    sizes = {"chunks": 2, "microbatch": 1, "num_blocks": 2, "width": 8, "context": 4, "vocab": 9}
    job = link_worker.Job(
        rank=0, size=2, address="", port=0, device="lo", num_threads=1, timeout_s=1.0,
        seed=0, lr=0.01, tied=tied, accelerator_ms=milliseconds, variants=(), **sizes,
    )  # fmt: skip
    model = link_worker._model(job)
    waiting = [each for each in model if isinstance(each, WaitingBlock)]
    assert len(model) == 4 and len(waiting) == num_waiting
    assert all(each.forward_s == 0.005 for each in waiting)
    assert isinstance(model[-1], WaitingHead) == (tied and num_waiting > 0)
    if isinstance(model[-1], WaitingHead):
        assert model[-1].forward_s == pytest.approx(0.005 * 9 / (12 * 8))  # blocks of its weight


def test_accelerators_share_no_cores():
    assert cores_shared({"stages": [2, 4], "accelerator_ms": 15.0}, 2) == 4
    assert cores_shared({"stages": [2, 4], "accelerator_ms": 0.0}, 2) == 2
    assert cores_shared({"stages": [2, 4]}, 2) == 2  # of a time before there was the option
