"""Several processes with GPUs: gloo through pinned memory (also on one GPU), and NCCL."""

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import MLP_SPLIT, mlp, rows, sgd

import mpcomp


def _train(devices, act, grad):
    torch.manual_seed(0)
    local = not torch.distributed.is_initialized()
    pipe = mpcomp.pipeline(
        mlp(),
        4,
        split=MLP_SPLIT,
        devices=devices,
        act_comp=act,
        grad_comp=grad,
        loss_fn=F.cross_entropy,
        engine="local" if local else None,
    )
    optimizer = sgd(pipe)
    losses = []
    for step in range(4):
        x, y = rows(10, step)
        losses.append(pipe.forward_backward(x, y, sample_ids=torch.arange(10)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.cpu() for name, value in pipe.merge().state_dict().items()}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("act", "grad"),
    [
        ("topk:0.3", "none"),
        ("topk:0.3", "topk:0.3+fp16"),
        ("topk:0.3", "ef21+topk:0.3"),
        ("topk:0.3", "aqsgd+quant:4"),
        ("step:0.3:centre=true", "step:1:scale=tensor:rounding=dither"),
        ("auto", "auto"),
        ("auto:memory", "auto:memory"),
        ("auto:scratch", "auto:scratch"),
    ],
)
def test_gloo_through_pinned_memory_is_the_local_engine_on_one_gpu(ranks, act, grad):
    losses, weights = _train("cuda:0", act, grad)
    for others, theirs in ranks(_train, 3, "cuda:0", act, grad):
        assert others == losses
        assert all(same_bits(weights[name], theirs[name]) for name in weights)


def _train_with_nccl(act, grad):
    rank = torch.distributed.get_rank()
    store = torch.distributed.distributed_c10d._get_default_store()
    torch.distributed.destroy_process_group()
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store=torch.distributed.PrefixStore("nccl", store), rank=rank,
        world_size=3,
    )  # fmt: skip
    return _train([f"cuda:{i}" for i in range(3)], act, grad)


@pytest.mark.gpu(3)
@pytest.mark.parametrize("grad", ["none", "ef21+topk:0.3"])
def test_nccl_is_the_local_engine(ranks, grad):
    """It has not run yet, as no machine had three GPUs."""
    losses, weights = _train([f"cuda:{i}" for i in range(3)], "topk:0.3", grad)
    for others, theirs in ranks(_train_with_nccl, 3, "topk:0.3", grad):
        assert others == losses
        assert all(same_bits(weights[name], theirs[name]) for name in weights)
