"""What a piece's memory owes is handed back when a step takes another path."""

import torch
import torch.distributed as dist
from torch import Tensor

from mpcomp import ReplicaNetwork
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.methods import replica_method_of


def one_step(exchange: Exchange, gradient: Tensor) -> Tensor:
    x = gradient.clone()
    exchange.begin()
    exchange.add({"w": x})
    exchange.finish()
    exchange.finish_step(finite=True)
    return x


def owed_in_all(exchange: Exchange) -> Tensor:
    """What this replica's memories owe: its own residual / n, and its piece of the mean."""
    total = torch.zeros(60 * 40)
    tensors = exchange.state_dict()["tensors"]
    for key, value in tensors.items():
        if key == "own/w/residual":
            total += value / exchange.num_replicas
        elif key == "phase/w/residual":
            start = int(tensors["phase/w/start"])
            total[start : start + value.numel()] += value
    return total


def two_paths():
    parameter = torch.zeros(60, 40)
    network = ReplicaNetwork(path="two-phase")
    exchange = Exchange(
        {"w": parameter}, replica_method_of("ef+topk:0.1"), dist.group.WORLD, network=network
    )
    torch.manual_seed(dist.get_rank())
    sent, wanted, phases = torch.zeros(2400), torch.zeros(2400), []
    for step in range(6):
        if step == 3:
            exchange.network = ReplicaNetwork(path="gather")
        gradient = torch.randn(60, 40)
        sent += one_step(exchange, gradient).flatten()
        wanted += gradient.flatten() / exchange.num_replicas
        phase = exchange.state_dict()["tensors"].get("phase/w/residual")
        phases.append(0.0 if phase is None else float(phase.norm()))
    owed = owed_in_all(exchange)
    for x in (wanted, owed):
        dist.all_reduce(x)
    return sent, wanted, owed, phases


def test_no_mass_is_stranded_when_the_path_changes(ranks):
    for sent, wanted, owed, phases in ranks(two_paths, 3):
        assert phases[2] > 0 and phases[3:] == [0.0, 0.0, 0.0]
        torch.testing.assert_close(sent + owed, wanted, rtol=0, atol=1e-4)
