"""What `compress_gradients` refuses: on all ranks, saying what is accepted."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpcomp
from mpcomp import ReplicaNetwork, parse


def ddp_of(*sizes: int, dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return DistributedDataParallel(nn.Sequential(*layers).to(dtype))


def compressed(what: str) -> list[str]:
    """Does it wrong, and says how that ended."""
    rank = dist.get_rank()
    small = ReplicaNetwork(smallest=16)
    model = ddp_of(40, 30, dtype=torch.float64 if what == "fp64" else torch.float32)
    arguments = {"network": small}
    method: object = "ef+topk:0.1"
    if what == "not DDP":
        model = model.module
    if what == "rank":
        method = "powersgd:31"
    if what == "no name":
        method = "redsync:0.1:same_sign=true:plain=nothing"
    if what == "another method":
        method = f"ef+topk:0.{1 + rank}"
    if what == "another network":
        arguments["network"] = ReplicaNetwork(smallest=16 + rank)
    if what == "another seed":
        arguments["seed"] = rank
    if what == "a cut's method":
        method = "aqsgd+quant:4"
    if what == "same indices":
        method = "same"
    if what == "machines":
        arguments["network"] = ReplicaNetwork(smallest=16, per_machine=3)
    if what == "exact machines":
        method = "gravac:exact=true+topk:0.1"
        arguments["network"] = ReplicaNetwork(smallest=16, per_machine=2)
    if what == "no sum":
        arguments["network"] = ReplicaNetwork("sum", smallest=16)
    if what == "first":
        method = "ef21:first=quant/8+topk:0.1"
    if what == "nonsense":
        method = 0.1
    said = []
    for _ in range(2 if what == "second hook" else 1):
        try:
            mpcomp.compress_gradients(model, method, **arguments)
            said.append("done")
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def refused(cases: list[str]) -> list[list[str]]:
    return [compressed(what) for what in cases]


REFUSED = {
    "second hook": "ValueError: this model's gradients are compressed already",
    "not DDP": "TypeError: Sequential is wrapped in neither DistributedDataParallel nor FSDP2",
    "fp64": "TypeError: 0.weight is fp64: gradients between replicas are at most fp32",
    "rank": "ValueError: rank=31 is above that of every matrix here (the largest is 30)",
    "no name": "ValueError: plain='nothing': no parameter of two dimensions or more",
    "another method": "ValueError: replicas 1 were given another model, method, network or seed",
    "another network": "ValueError: replicas 1 were given another model, method, network or seed",
    "another seed": "ValueError: replicas 1 were given another model, method, network or seed",
    "a cut's method": "ValueError: dp_comp=aqsgd+quant:4: it belongs at a cut",
    "same indices": "ValueError: dp_comp=same: it belongs at a cut",
    "machines": "ValueError: per_machine=3 with 2 replicas: expected a divisor of 2",
    "exact machines": "ValueError: gravac:exact=True+topk:0.1 with per_machine=2: exact=True looks",
    "no sum": "ValueError: path='sum' for a method whose messages cannot be added",
    "first": "ValueError: dp_comp=ef21:first=quant/8+topk:0.1: between replicas estimates begin at",
    "nonsense": "TypeError: dp_comp=0.1: expected a compressor such as TopK(0.01)",
}


@pytest.fixture(scope="module")
def sayings(ranks):
    results = ranks(refused, 2, list(REFUSED))
    return {what: [of_rank[i] for of_rank in results] for i, what in enumerate(REFUSED)}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_on_all_ranks(sayings, what):
    for said in sayings[what]:
        assert said[-1].startswith(REFUSED[what]), said
        assert said[:-1] == ["done"] * (len(said) - 1)


def other_model() -> str:
    """As many gradients, of other parameters: DDP itself compares numbers and shapes alone."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    names = ("one", "two") if rank == 0 else ("one", "three")
    layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
    ddp = DistributedDataParallel(layers)
    mpcomp.compress_gradients(ddp, "ef+topk:0.1")
    return "done"


def test_another_model(ranks):
    for kind, said in ranks(other_model, 2, may_fail=True):
        assert kind == "ValueError" and "given another model, method" in said


@pytest.mark.parametrize(
    "spec, message",
    [
        ("gravac:cf=0.5-10+topk:0.1", "1 or more"),
        ("gravac:cf=100-10+topk:0.1", r"write cf=\(10"),
        ("gravac:eps=1.2+topk:0.1", "eps=1.2: expected a number in"),
        ("gravac:eps=0+topk:0.1", "eps=0.0: expected a number in"),
        ("gravac:omega=1+topk:0.1", "omega=1.0: expected a number in"),
        ("gravac:omega=-0.1+topk:0.1", "omega=-0.1: expected a number in"),
        ("gravac:window=0+topk:0.1", "window=0: expected a number of steps"),
        ("gravac:masking=false+topk:0.1", "masking=False without momentum"),
        ("gravac+ef+topk:0.1", "leave out other methods"),
        ("powersgd:0", "rank=0: expected a whole number, 1 or more"),
        ("powersgd:2:min_saving=0.5", "min_saving=0.5: expected a factor, 1 or more"),
        ("accordion:low=topk/0.5:high=topk/0.1:interval=0", "interval=0: expected a number"),
        ("onebitsgd:storage=fp8", "storage='fp8'"),
        ("dgc:0", "keep=0"),
        ("redsync:2", "keep=2"),
        ("ef+randomk:0.1:unbiased=true", "unbiased"),
    ],
)
def test_settings_outside_their_range(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)
