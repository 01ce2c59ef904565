"""The cost of each path, and which one is taken."""

import math

import pytest

from mpcomp import Cast, ReplicaNetwork, TopK

NETWORK = ReplicaNetwork(latency_ms=1.0, bandwidth_mbps=8.0)  # 1 MB takes a second


@pytest.mark.parametrize(
    "path, num_replicas, seconds",
    [
        ("sum", 1, 0.0),
        ("sum", 2, 0.002 + 1.0),
        ("sum", 3, 0.004 + 4 / 3),  # 4 messages either way
        ("sum", 8, 0.006 + 14 / 8),  # 2 log2 8 rounds
        ("sum", 9, 0.008 + 16 / 9),  # 2 ceil(log2 9)
        ("dense", 8, 0.006 + 14 / 8),
        ("gather", 1, 0.0),
        ("gather", 2, 0.001 + 1.0),
        ("gather", 8, 0.007 + 7.0),
        ("two-phase", 2, 0.002 + 1.0),
        ("two-phase", 8, 0.014 + 14 / 8),
    ],
)
def test_seconds(path, num_replicas, seconds):
    assert NETWORK.seconds(path, 1e6, num_replicas) == pytest.approx(seconds)


def chosen(network: ReplicaNetwork, n: int, wire: float, dense: float = 1e8) -> str:
    return network.choose(summable=False, wire_bytes=wire, dense_bytes=dense, num_replicas=n)


def test_two_phases_where_replicas_are_many():
    """Twice 2 (n-1)/n messages against n-1: from five replicas on, where bandwidth counts."""
    assert [chosen(NETWORK, n, 1e6) for n in (1, 2, 3, 4, 5, 64)] == [
        *("gather", "gather", "gather", "gather"),
        *("two-phase", "two-phase"),
    ]


def test_one_gather_where_latency_counts():
    far = ReplicaNetwork(latency_ms=50.0, bandwidth_mbps=1000.0)
    assert chosen(far, 8, 1e4) == "gather" and chosen(far, 8, 1e8, 1e10) == "two-phase"
    # Twice the one is the other at 3 a (n-1) = (n-1) (1 - 4/n) B/b.
    n, latency, per_byte = 8, 0.05, 8 / 1e9
    equal = 3 * latency / (1 - 4 / n) / per_byte
    assert chosen(far, n, 0.99 * equal, 1e12) == "gather"
    assert chosen(far, n, 1.01 * equal, 1e12) == "two-phase"


def test_dense_where_little_is_saved():
    assert chosen(NETWORK, 8, 0.99e6, 1e6) == "two-phase"
    assert chosen(NETWORK, 8, 1.0e6, 1e6) == "dense"  # fewer rounds for as many bytes
    assert chosen(NETWORK, 2, 0.5e6, 1e6) == "gather"
    assert chosen(NETWORK, 4, 0.6e6, 1e6) == "two-phase"  # to gather costs more than dense
    # 15 messages of two phases against 2 * 4 of a sum, whatever they carry.
    late = ReplicaNetwork(latency_ms=100.0, bandwidth_mbps=1e6)
    assert chosen(late, 16, 1e3, 1e6) == "dense"


@pytest.mark.parametrize("path", ["gather", "two-phase"])
def test_overrides(path):
    network = ReplicaNetwork(path)
    assert {chosen(network, n, wire) for n in (2, 64) for wire in (1, 1e12)} == {path}


@pytest.mark.parametrize("path", ["auto", "sum", "gather", "two-phase"])
def test_what_can_be_added_is_added(path):
    network = ReplicaNetwork(path)
    arguments = {"wire_bytes": 1e3, "dense_bytes": 1e6, "num_replicas": 8}
    assert network.choose(summable=True, **arguments) == "sum"


def test_a_sum_of_what_cannot_be_added():
    with pytest.raises(ValueError, match="use randomk, randomblock, fp16 or powersgd, or path="):
        chosen(ReplicaNetwork("sum"), 4, 1e3)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"path": "ring"}, "path='ring': expected one of auto, sum, gather, two-phase"),
        ({"latency_ms": -1.0}, "latency_ms=-1.0: expected milliseconds, 0 or more"),
        ({"latency_ms": math.nan}, "latency_ms=nan: expected"),
        ({"latency_ms": math.inf}, "latency_ms=inf: expected"),
        ({"bandwidth_mbps": 0.0}, "bandwidth_mbps=0.0: expected megabits a second, more than 0"),
        ({"bandwidth_mbps": math.inf}, "bandwidth_mbps=inf: expected"),
        ({"per_machine": 0}, "per_machine=0: expected 1 replica or more"),
        ({"smallest": 0}, "smallest=0: expected 1 element or more"),
        ({"inside": Cast("bf16")}, "with per_machine=1: give per_machine as well"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ReplicaNetwork(**settings)


def test_inside_is_a_compressor():
    with pytest.raises(TypeError, match="inside='bf16': expected a compressor"):
        ReplicaNetwork(per_machine=2, inside="bf16")


@pytest.mark.parametrize("small", ["bf16", Cast("fp8_e4m3"), Cast("fp32"), TopK(0.1)])
def test_small_ones_take_a_type_that_can_be_added(small):
    with pytest.raises(TypeError, match=r"expected Cast\('bf16'\) or Cast\('fp16'\)"):
        ReplicaNetwork(small=small)
