"""The local engine: what it hands to the transport, recomputation, threads, where ends live."""

import threading

import pytest
import torch
import torch.nn.functional as F
from everyday import slow_but_one_a_class
from methods import COMPRESSORS, FEEDBACK, beside
from models import (
    CONV_SPLIT,
    MLP_SPLIT,
    RESNET_SPLIT,
    assert_same_state,
    assert_same_training,
    clone,
    convnet,
    images,
    links_state,
    mlp,
    num_stored_rows,
    resnet,
    resnet_channels_last,
    rows,
    sgd,
)
from torch import nn
from torchgpipe.pipeline import Pipeline as GPipeSchedule

import mpcomp
from mpcomp import SameIndices, TopK
from mpcomp.comm.channels import LocalChannel
from mpcomp.core.wire import HEADER_BYTES
from mpcomp.engines import local
from mpcomp.engines.stage_runner import Autocast, StageRunner, frozen_buffers

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")


@pytest.mark.parametrize("method", slow_but_one_a_class([*COMPRESSORS, *FEEDBACK]), ids=str)
def test_bytes_metered_are_bytes_handed_to_the_transport(method, monkeypatch):
    """Law 2, in training and in evaluation, both directions, uneven microbatches."""
    moved = []

    def counting(channel, microbatch, message):
        assert message.dtype == torch.uint8 and message.dim() == 1
        moved.append(message.numel())
        send(channel, microbatch, message)

    send = LocalChannel.send
    monkeypatch.setattr(LocalChannel, "send", counting)
    pipe = mpcomp.pipeline(
        mlp(),
        3,
        split=MLP_SPLIT,
        act_comp=method,
        grad_comp=beside(method, method),
        loss_fn=F.cross_entropy,
    )
    x, y = rows(7)
    for _ in range(3):
        pipe.forward_backward(x, y, sample_ids=range(7))
    assert len(moved) == 3 * 3 * 4 == sum(link.meter.train.messages for link in pipe.links)
    assert sum(moved) == pipe.wire_bytes
    dense = sum(link.meter.train.dense_bytes for link in pipe.links)
    assert dense == pipe.dense_bytes == 3 * 7 * (19 + 17) * 4 * 2
    moved.clear()
    pipe.evaluate([(x, y)])
    assert sum(moved) == sum(link.meter.eval.wire_bytes for link in pipe.links)
    assert len(moved) == 3 * 2 and sum(moved) > 6 * HEADER_BYTES
    assert not any(link.meter.eval.messages for link in pipe.links if link.direction == "grad")


@pytest.mark.parametrize(
    "make, layout",
    [(resnet, torch.contiguous_format), (resnet_channels_last, torch.channels_last)],
    ids=["channels second", "channels last"],
)
def test_behind_a_relu_gradients_of_zeros_are_not_needed(make, layout):
    """Not to send them leaves every gradient of every weight as it was, bit for bit."""
    x = torch.randn(6, 3, 16, 16).contiguous(memory_format=layout)
    y = torch.arange(6) % 3
    original = make()
    found = []
    for grad in (None, "same:where=nonzero"):
        model = clone(original)
        pipe = mpcomp.pipeline(
            model, 2, split=RESNET_SPLIT, grad_comp=grad, loss_fn=F.cross_entropy
        )
        pipe.forward_backward(x, y)
        found.append((pipe.wire_bytes, [p.grad for p in pipe.parameters()]))
    (dense, plain), (sent, masked) = found
    assert sent < 0.9 * dense
    assert all(torch.equal(a, b) for a, b in zip(plain, masked, strict=True))


STATEFUL = [
    ("ef21+topk:0.2", "ef+topk:0.2"),
    ("aqsgd+quant:4:rounding=stochastic", "ef21:storage=8+quant:3:rounding=stochastic"),
    ("randomk:0.3", "efmixed+topk:0.3"),
    ("ef+topk:0.3", "same"),
    ("step:0.5", "same:where=nonzero+step:1:scale=tensor"),
]


@pytest.mark.each_once
@pytest.mark.parametrize("act, grad", STATEFUL)
@pytest.mark.parametrize("name", ["convnet", "resnet18"])
def test_recomputation_changes_nothing(name, act, grad):
    """Law 6: same losses, gradients, BatchNorm statistics, states and bytes, with dropout."""
    model = convnet() if name == "convnet" else resnet()
    where = CONV_SPLIT if name == "convnet" else RESNET_SPLIT
    pipes = [
        mpcomp.pipeline(
            clone(model),
            2,
            split=where,
            act_comp=act,
            grad_comp=grad,
            loss_fn=F.cross_entropy,
            recompute=recompute,
        )
        for recompute in (False, True)
    ]
    optimizers = [sgd(pipe) for pipe in pipes]
    for step in range(3):
        x, y = images(5, step)
        losses = [pipe.forward_backward(x, y, sample_ids=range(5)) for pipe in pipes]
        assert torch.equal(*losses)
        assert_same_training(*pipes)
        assert_same_state(*(links_state(pipe) for pipe in pipes))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert pipes[0].wire_bytes == pipes[1].wire_bytes < pipes[0].dense_bytes
    counted = [b for n, b in pipes[1].named_buffers() if n.endswith("num_batches_tracked")]
    assert counted and all(int(count) == 3 * 2 for count in counted)  # microbatches, once each


def test_torchgpipes_worker_threads_give_the_same_bits(monkeypatch, global_rng_untouched):
    """The path of several devices, run on the CPU: autocast, grad mode and dropout cross over."""

    def run():
        torch.manual_seed(0)
        pipe = mpcomp.pipeline(
            convnet(), 3, split=CONV_SPLIT, act_comp="ef21+topk:0.3", grad_comp="ef+topk:0.3",
            loss_fn=F.cross_entropy, recompute=True,
        )  # fmt: skip
        x, y = images(5)
        with global_rng_untouched(), torch.autocast("cpu", dtype=torch.bfloat16):
            losses = [pipe.forward_backward(x, y) for _ in range(2)]
            losses.append(torch.tensor(pipe.evaluate([(x, y)])))
        with torch.no_grad():
            assert not pipe.eval()(x).requires_grad
        return pipe, torch.stack(losses)

    here, losses = run()
    threads = set()
    runner = StageRunner.__call__

    def noting(self, *args):
        threads.add(threading.get_ident())
        torch.set_num_threads(1)  # of this thread
        return runner(self, *args)

    monkeypatch.setattr(StageRunner, "__call__", noting)
    monkeypatch.setattr(local._Schedule, "run", GPipeSchedule.run)
    there, others = run()
    assert threading.get_ident() not in threads and threads
    assert torch.equal(losses, others)
    assert_same_training(here, there)
    assert_same_state(links_state(here), links_state(there))


def test_recomputation_does_drop_and_compute_again():
    """The test above would pass for an engine that ignored recompute."""
    model = mlp()
    calls = []
    model.two.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    pipe = mpcomp.pipeline(model, 2, split=MLP_SPLIT, loss_fn=F.cross_entropy, recompute=True)
    pipe.forward_backward(*rows(4))
    assert len(calls) == 4
    calls.clear()
    pipe.evaluate([rows(4)])
    assert calls == [False, False]


def test_frozen_buffers_are_copies_that_go_again():
    module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False))
    before = dict(module.named_buffers())
    kept = {name: buffer.clone() for name, buffer in before.items()}
    with frozen_buffers(module):
        module(torch.randn(5, 3))
        assert int(module[0].num_batches_tracked) == 1
    for name, buffer in module.named_buffers():
        assert buffer is before[name] and torch.equal(buffer, kept[name])


def test_a_runner_takes_tensors_tuples_and_mappings():
    class Add(nn.Module):
        def forward(self, a, b=None):
            return a if b is None else a + b

    runner = StageRunner(Add(), 0, CPU, recompute=False, seed=0)
    autocast = Autocast.of_caller(CPU)
    one = torch.ones(2)
    assert torch.equal(runner(one, {}, 0, 0, autocast), one)
    assert torch.equal(runner((one, one), {}, 0, 0, autocast), 2 * one)
    assert torch.equal(runner({"a": one, "b": one}, {}, 0, 0, autocast), 2 * one)
    assert torch.equal(runner(one, {"b": one}, 0, 0, autocast), 2 * one)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_callers_autocast_reaches_the_stages(recompute):
    """torchgpipe's worker threads know nothing of it; links compute without it."""
    dtypes = []
    model = mlp()
    model.three.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    pipe = mpcomp.pipeline(
        model, 2, split=MLP_SPLIT, act_comp="topk:0.3", loss_fn=F.cross_entropy, recompute=recompute
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.forward_backward(*rows(4))
    assert set(dtypes) == {torch.bfloat16}
    dtypes.clear()
    pipe.forward_backward(*rows(4))
    assert set(dtypes) == {torch.float32}


def test_inference_builds_no_graph():
    """Grad mode is thread-local too: an evaluation must not keep activations."""
    seen = []
    model = mlp()
    for module in model:
        module.register_forward_hook(lambda _m, _a, output: seen.append(output.requires_grad))
    pipe = mpcomp.pipeline(model, 2, split=MLP_SPLIT, act_comp=TopK(0.3)).eval()
    with torch.no_grad():
        assert not pipe(rows(4)[0]).requires_grad
    with torch.inference_mode():
        assert pipe(rows(4)[0]).shape == (4, 5)
    assert len(seen) == 20 and not any(seen)


def test_where_ends_live():
    """Activations are sent by the earlier stage, gradients by the later one."""
    devices = [torch.device("cpu"), torch.device("meta"), torch.device("cpu", 0)]
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT)
    engine = local.LocalEngine(list(pipe.stages), pipe.boundaries, devices, recompute=False, seed=0)
    assert [engine.device_of(stage) for stage in range(len(devices))] == devices


def test_gradients_travel_in_their_activations_memory_order():
    """Both ends know it, and the selection of SameIndices is in it."""
    model = convnet().to(memory_format=torch.channels_last)
    pipe = mpcomp.pipeline(
        model, 2, split=CONV_SPLIT, act_comp=TopK(0.2), grad_comp=SameIndices(),
        loss_fn=F.cross_entropy,
    )  # fmt: skip
    x, y = images(4)
    seen = []
    keep = lambda gradient: seen.append(gradient)  # noqa: E731
    pipe.stages[0].register_forward_hook(lambda _m, _a, output: output.register_hook(keep) and None)
    pipe.forward_backward(x.contiguous(memory_format=torch.channels_last), y)
    assert len(seen) == 2
    for gradient in seen:
        assert gradient.is_contiguous(memory_format=torch.channels_last)
        kept = (gradient != 0).sum()
        assert 0 < kept <= -(-gradient.numel() // 5) + 2


def test_stages_may_work_in_place_on_what_arrived():
    """A ReLU in place at the beginning of a stage must reach no estimate."""

    def model(inplace):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(13, 40),
            nn.ReLU(inplace),
            nn.Linear(40, 40),
            nn.ReLU(inplace),
            nn.Linear(40, 5),
        )

    pipes = [
        mpcomp.pipeline(
            model(inplace), 2, split=[1, 2, 2], act_comp="ef21+topk:0.2", grad_comp="ef+topk:0.2",
            loss_fn=F.cross_entropy,
        )
        for inplace in (False, True)
    ]  # fmt: skip
    for step in range(3):
        x, y = rows(6, step)
        assert torch.equal(*(pipe.forward_backward(x, y) for pipe in pipes))
    assert_same_training(*pipes)
    assert_same_state(*(links_state(pipe) for pipe in pipes))
    assert num_stored_rows(pipes[0]) == 2 * (6 + 6 + 6)
