"""The cost of methods between replicas: their own bytes, and the network's own formulas."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import mpcomp
from mpcomp.core.context import TensorMeta
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.plan.replica_cost import replica_cost

PARAMETERS = {f"w{i}": TensorMeta((64, 128)) for i in range(3)} | {
    f"b{i}": TensorMeta((64,)) for i in range(3)
}
MATRICES, BIASES = 3 * 64 * 128, 3 * 64
NETWORK = ReplicaNetwork(bandwidth_mbps=10.0, latency_ms=20.0)


@pytest.mark.parametrize(
    ("method", "matrix_bytes"),
    [
        ("none", 4 * MATRICES),
        ("bf16", 2 * MATRICES),
        ("powersgd:2", 3 * 4 * 2 * (64 + 128)),
        (
            "ef+topk:0.1+quant:4",
            3 * mpcomp.parse("topk:0.1+quant:4").wire_bytes(TensorMeta((1, 8192))),
        ),
    ],
)
def test_bytes_are_the_methods(method: str, matrix_bytes: int) -> None:
    found = replica_cost(method, PARAMETERS, 4, NETWORK)
    assert found.dense_bytes == 4 * (MATRICES + BIASES)
    assert found.wire_bytes == pytest.approx(matrix_bytes + 4 * BIASES, rel=0.01)
    assert found.coding_s > 0
    assert not dist.is_initialized()


def test_seconds_are_the_networks() -> None:
    dense = replica_cost("none", PARAMETERS, 4, NETWORK)
    assert dense.link_s == pytest.approx(NETWORK.seconds("dense", dense.wire_bytes, 4))
    half = replica_cost("bf16", PARAMETERS, 4, NETWORK)
    assert 0.4 * dense.link_s < half.link_s < dense.link_s
    sparse = replica_cost("ef+topk:0.01", PARAMETERS, 4, NETWORK)
    more = replica_cost("ef+topk:0.01", PARAMETERS, 8, NETWORK)
    assert more.link_s > sparse.link_s
    assert sparse.seconds == sparse.link_s + sparse.coding_s


def test_replicas_that_train_alone_send_once_a_period() -> None:
    always = replica_cost("ef+quant:4", PARAMETERS, 2, NETWORK)
    seldom = replica_cost("diloco:30+ef+quant:4", PARAMETERS, 2, NETWORK)
    assert seldom.wire_bytes == pytest.approx(always.wire_bytes / 30)
    assert seldom.link_s == pytest.approx(always.link_s / 30)
    assert seldom.dense_bytes == always.dense_bytes


def test_a_large_parameter_counts_whole() -> None:
    large = {"w": TensorMeta((1 << 14, 1 << 10))}
    found = replica_cost("quant:8", large, 2, NETWORK)
    assert found.wire_bytes == pytest.approx(1 << 24, rel=0.01)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="powersgd"):
        replica_cost("powersgf:2", PARAMETERS, 2, NETWORK)
    assert not dist.is_initialized()
