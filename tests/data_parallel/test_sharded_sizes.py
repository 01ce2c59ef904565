"""Which parameters go compressed where ranks own a piece of each: by the size of the whole."""

import pytest
import torch
import torch.distributed as dist
from replica_runs import alone

from mpcomp import ReplicaNetwork, TensorMeta, TopK
from mpcomp.compressors import Identity
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.sharded import ShardedExchange, ShardedParameter


def shared_out(name: str, rows: int, columns: int, num_ranks: int, dims: int) -> ShardedParameter:
    """A parameter of which each rank has as many rows, but the last ones."""
    each = -(-rows // num_ranks)
    sizes = [max(0, min(each, rows - rank * each)) for rank in range(num_ranks)]
    pieces = tuple(TensorMeta((size, columns)) for size in sizes)
    return ShardedParameter(name, pieces, TensorMeta((each, columns)), dims)


@pytest.mark.parametrize("num_ranks", [1, 4, 16])
def test_a_parameter_is_as_large_however_many_ranks_share_it(num_ranks):
    """Of 1,250 elements 16 ranks have 100 each, or 50, or none."""
    parts = [
        shared_out("large", 25, 50, num_ranks, dims=2),
        shared_out("small", 25, 40, num_ranks, dims=2),
        shared_out("vector", 2000, 1, num_ranks, dims=1),
    ]
    with alone():
        exchange = ShardedExchange(
            parts,
            replica_method_of("ef+topk:0.1"),
            dist.group.WORLD,
            device=torch.device("cpu"),
            network=ReplicaNetwork(smallest=1024),
            param_comp=TopK(0.1),
        )
        owners = [rank for rank, piece in enumerate(parts[0].pieces) if piece.numel]
        assert set(exchange._compressible) == {f"large/{rank}" for rank in owners}
        assert exchange.num_compressible == 1250
        codecs = [exchange._param_codec(part, torch.float32, True) for part in parts]
        assert codecs == [TopK(0.1), Identity(), Identity()]
