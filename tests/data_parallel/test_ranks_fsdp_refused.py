"""What `compress_gradients` refuses of FSDP2: on all ranks, saying what is accepted."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunks import Chunks
from ranks import preload
from sharded_runs import HALF, NETWORK, WIDTH, Run, Training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpcomp
from mpcomp import Quantize, ReplicaNetwork

preload("replica_runs", "sharded_runs", "torch.distributed.fsdp")


def small(*, dtype: torch.dtype = torch.float32, mesh: Any = None) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise((WIDTH, 40, 16))]
    model = nn.Sequential(*layers)
    model[1].to(dtype)
    options = {} if mesh is None else {"mesh": mesh}
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def compressed(what: str) -> list[str]:
    """Does it wrong, and says how that ended."""
    rank = dist.get_rank()
    options: dict[str, Any] = {"network": NETWORK}
    method: Any = "ef+topk:0.1"
    model = (
        small(dtype=HALF if what == "mixed dtypes" else torch.float32) if what != "hsdp" else None
    )
    if what == "plain model":
        model = nn.Linear(4, 4)
    if what == "hsdp":
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b"))
        model = small(mesh=mesh)
    if what == "ddp and param_comp":
        model, options["param_comp"] = DistributedDataParallel(nn.Linear(4, 4)), "quant:8"
    methods = {
        "powersgd": "powersgd:2",
        "accordion of powersgd": "accordion:low=powersgd/2:high=powersgd/1:interval=4",
        "clip": "dgc:0.1:clip=4",
        "exact": "gravac:exact=true+topk:0.1",
        "a cut's method": "aqsgd+quant:4",
        "another method": f"ef+topk:0.{1 + rank}",
        "nonsense": 0.1,
    }
    networks = {
        "per_machine": ReplicaNetwork(smallest=16, per_machine=2),
        "path": ReplicaNetwork("gather", smallest=16),
        "another network": ReplicaNetwork(smallest=16 + rank),
    }
    comps: dict[str, Any] = {
        "param_comp in feedback": "ef+topk:0.1",
        "param_comp of nothing": 8,
        "another param_comp": Quantize(8 - rank),
    }
    method = methods.get(what, method)
    options["network"] = networks.get(what, NETWORK)
    if what in comps:
        options["param_comp"] = comps[what]
    if what == "another seed":
        options["seed"] = rank
    said = []
    for _ in range(2 if what == "second" else 1):
        try:
            mpcomp.compress_gradients(model, method, **options)
            said.append("done")
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def refused(cases: list[str]) -> list[list[str]]:
    return [compressed(what) for what in cases]


APART = "ValueError: replicas 1 were given another model, method, network or seed than replica 0"
REFUSED = {
    "plain model": "TypeError: Linear is wrapped in neither DistributedDataParallel nor FSDP2",
    "second": "ValueError: this model's gradients are compressed already",
    "mixed dtypes": "ValueError: the model's shards are of torch.bfloat16, torch.float32: FSDP2",
    "hsdp": "ValueError: the model is sharded and replicated (a mesh of two dimensions)",
    "ddp and param_comp": "ValueError: param_comp='quant:8' with a DDP model",
    "powersgd": "ValueError: powersgd:2 with FSDP2: a block's gradient is sent at once; factors",
    "accordion of powersgd": "ValueError: accordion:",
    "clip": "ValueError: dgc:0.1:clip=4.0 with FSDP2: a block's gradient is sent at once; clip",
    "exact": "ValueError: gravac:exact=True+topk:0.1 with FSDP2: a block's gradient is sent at",
    "per_machine": "ValueError: path='auto', per_machine=2 with FSDP2",
    "path": "ValueError: path='gather', per_machine=1 with FSDP2",
    "param_comp in feedback": "TypeError: param_comp=",
    "param_comp of nothing": "TypeError: param_comp=8: expected a compressor",
    "a cut's method": "ValueError: dp_comp=aqsgd+quant:4: it belongs at a cut",
    "nonsense": "TypeError: dp_comp=0.1: expected a compressor",
    "another method": APART,
    "another network": APART,
    "another seed": APART,
    "another param_comp": APART,
}


@pytest.fixture(scope="module")
def sayings(ranks):
    return Chunks(ranks, refused, 2, {what: what for what in REFUSED}, size=len(REFUSED))


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_on_all_ranks(sayings, what):
    for said in sayings[what]:
        assert said[-1].startswith(REFUSED[what]), said
        assert said[:-1] == ["done"] * (len(said) - 1)


def late() -> list[str]:
    """What can only be told in the first backward."""
    said = []
    for what in ("divide", "lr"):
        model = small()
        if what == "divide":
            model[0].set_gradient_divide_factor(3.0)
        mpcomp.compress_gradients(
            model, "ef:lr_scaled=true+topk:0.1" if what == "lr" else "ef+topk:0.1", network=NETWORK
        )
        try:
            model(torch.randn(4, WIDTH)).sum().backward()
            said.append("done")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_what_is_refused_in_backward(ranks):
    for divide, lr in ranks(late, 2):
        assert "leave set_gradient_divide_factor out" in divide
        assert "follow(optimizer)" in lr


def looked_at_first() -> bool:
    """An evaluation before compression begins leaves the root's parameters gathered."""
    training = Training(Run(None))
    with torch.no_grad():
        training.loss(0)
    mpcomp.compress_gradients(training.model, "ef+topk:0.1", network=NETWORK)
    training.step(0)
    return all(bool(p.to_local().isfinite().all()) for p in training.model.parameters())


def test_a_model_that_was_evaluated_first(ranks):
    assert ranks(looked_at_first, 2) == [True, True]
