"""Nothing that comes over the network is unpickled: that would run a stranger's code."""

import pickle

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import mlp, rows

import mpcomp


def _train(schedule, replicas):
    def refuse(*args, **kwargs):
        raise AssertionError("something was unpickled")

    pickle.loads = pickle.load = refuse
    pickle.Unpickler = refuse
    dist.distributed_c10d._tensor_to_object = refuse
    dist.distributed_c10d._unpickler = refuse
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(
        mlp(),
        4,
        split=[2, 1, 1, 1] if schedule == "ZBVZeroBubble" else ["tanh"],
        act_comp="topk:0.3",
        grad_comp="ef21+topk:0.3",
        loss_fn=F.cross_entropy,
        schedule=schedule,
        replicas=replicas,
        timeout=30,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(2):
        x, y = rows(9 + step, step)
        pipe.forward_backward(x, y)
        mpcomp.clip_grad_norm_(pipe, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    pipe.evaluate([rows(5)])
    pipe.report(show=False)
    pipe.merge()
    return pipe.wire_bytes


def test_nothing_is_unpickled(ranks):
    for schedule, replicas, count in ((None, 1, 2), ("ZBVZeroBubble", 1, 2), ("GPipe", 2, 4)):
        assert all(bytes_sent > 0 for bytes_sent in ranks(_train, count, schedule, replicas))


def _unpickles():
    objects = [None, None]
    dist.all_gather_object(objects, {"a": 1})


def test_the_guard_would_notice(ranks):
    """all_gather_object unpickles; with the guard in place it must fail."""
    results = ranks(_guarded_gather, 2, may_fail=True)
    assert [name for name, _ in results] == ["AssertionError", "AssertionError"]


def _guarded_gather():
    def refuse(*args, **kwargs):
        raise AssertionError("something was unpickled")

    dist.distributed_c10d._unpickler = refuse
    _unpickles()
