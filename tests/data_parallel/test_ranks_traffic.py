"""What goes over a replica's link on each path, and how dense the results become."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import preload
from replica_runs import exchange_of, exchanged, gradients

from mpcomp import ReplicaNetwork, parse
from mpcomp.tensor_meta import TensorMeta

preload("replica_runs")

SHAPE = (64, 200)
NUMEL = 12_800
CASES = [
    ("identity", "auto"),
    ("bf16", "auto"),
    ("randomk:0.1", "auto"),
    ("topk:0.05", "gather"),
    ("topk:0.05", "two-phase"),
    ("onebitsgd", "gather"),
    ("onebitsgd", "two-phase"),
    ("powersgd:2", "auto"),
    ("topk:0.05", "auto"),
]


def sent(cases: list[tuple[str, str]]) -> list[Any]:
    found = []
    for spec, path in cases:
        like = {"only": torch.zeros(SHAPE), "bias": torch.zeros(64)}
        exchange = exchange_of(spec, like, ReplicaNetwork(path, bandwidth_mbps=1.0))
        exchanged(exchange, gradients(like, dist.get_rank(), 0))
        entry, report = exchange.history[-1], exchange.report()
        found.append((entry, report, exchange.density))
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_traffic_is_that_of_the_formulas(ranks, n):
    results = ranks(sent, n, CASES)
    ring = 2 * (n - 1) / n
    bias = 64 * 4
    wire = parse("topk:0.05").wire_bytes(TensorMeta((1, NUMEL)))
    onebit = NUMEL / 8 + 200 * 8
    expected = {
        ("identity", "auto"): ("dense", 4 * NUMEL, ring * 4 * NUMEL),
        ("bf16", "auto"): ("sum", 2 * NUMEL, ring * 2 * NUMEL),
        ("randomk:0.1", "auto"): ("sum", 4 * NUMEL / 10, ring * 4 * NUMEL / 10),
        ("topk:0.05", "gather"): ("gather", wire, (n - 1) * wire),
        ("topk:0.05", "two-phase"): ("two-phase", wire * (1 + 1 / n), ring * wire),
        ("onebitsgd", "gather"): ("gather", onebit, (n - 1) * onebit),
        # Means for each column, in every piece and again in each piece's mean.
        ("onebitsgd", "two-phase"): (
            "two-phase",
            NUMEL / 8 * (1 + 1 / n) + (n + 1) * 200 * 8,
            (n - 1) * (NUMEL / 8 / n + 200 * 8) * 2,
        ),
        ("powersgd:2", "auto"): ("factors", 4 * 2 * 264, ring * 4 * 2 * 264),
        ("topk:0.05", "auto"): ("gather", wire, (n - 1) * wire),
    }
    for of_rank in results:
        for case, (entry, report, _) in zip(CASES, of_rank, strict=True):
            path, wire_bytes, traffic = expected[case]
            # Messages are rounded up to 16 bytes, pieces to whole elements.
            slack = {"rel": 0.02, "abs": 16 * 2 * n}
            assert set(report["paths"]) == {"dense", path}, case
            assert entry["wire_bytes"] - bias == pytest.approx(wire_bytes, **slack), case
            assert entry["traffic_bytes"] - ring * bias == pytest.approx(traffic, **slack), case
            assert report["dense_bytes"] == 4 * NUMEL + bias
            assert report["dense_traffic_bytes"] == pytest.approx(ring * (4 * NUMEL + bias))


def test_density_grows_with_replicas_on_one_phase_alone(ranks):
    cases = [("topk:0.05", "gather"), ("topk:0.05", "two-phase"), ("randomk:0.05", "auto")]
    for n in (2, 4):
        for of_rank in ranks(sent, n, cases):
            one, two, shared = (density for _, _, density in of_rank)
            assert one == pytest.approx(1 - 0.95**n, rel=0.05)
            assert two == pytest.approx(0.05, rel=0.02) == shared
