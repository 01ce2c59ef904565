"""What goes over a replica's link on each path, and how dense the results become."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from everyday import slow
from ranks import preload
from replica_runs import SMALLEST, exchange_of, exchanged, gradients, parameters

from mpcomp import Cast, ReplicaNetwork, parse
from mpcomp.core.context import TensorMeta

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


SMALL = ("bias", "small")
STEPS = 4


def with_small_ones(method: str, small: Cast | None) -> Any:
    """The results of some steps, the fourth uncompressed, and bytes by step."""
    like = parameters()
    exchange = exchange_of(method, like, ReplicaNetwork(smallest=SMALLEST, small=small))
    results = []
    for step in range(STEPS):
        given = gradients(like, dist.get_rank(), step)
        given["small"][0, 0] = 1e6  # more than fp16 holds
        results.append(exchanged(exchange, given, compress=step < STEPS - 1))
    narrow = {"bias": torch.zeros(80, dtype=torch.bfloat16)}
    other = exchange_of(method, narrow, ReplicaNetwork(smallest=SMALLEST, small=small))
    exchanged(other, gradients(narrow, dist.get_rank(), 0))
    steps = [entry["wire_bytes"] for entry in exchange.history]
    return results, steps, other.history[-1]["wire_bytes"]


@pytest.mark.parametrize("method", ["ef+topk:0.1", "dgc:0.1", "powersgd:1"])
@pytest.mark.parametrize("small", [Cast("bf16"), slow(Cast("fp16"))])
def test_small_ones_in_16_bits(ranks, method, small):
    rounded, plain = (ranks(with_small_ones, 3, method, to) for to in (small, None))
    for results, steps, already in rounded:
        expected, all_steps, _ = plain[0]
        *compressed, uncompressed = [a - b for a, b in zip(all_steps, steps, strict=True)]
        assert set(compressed) == {2 * (80 + 15)} and uncompressed == 0
        assert already == 2 * 80  # nothing is made of what is so narrow
        for step, (own, wide) in enumerate(zip(results, expected, strict=True)):
            for name, result in own.items():
                assert torch.equal(result, rounded[0][0][step][name]), "alike on all replicas"
                if name not in SMALL:
                    assert torch.equal(result, wide[name])
            if method == "dgc:0.1":
                continue  # its momentum keeps what was rounded before
            if step == STEPS - 1:
                assert all(torch.equal(own[name], wide[name]) for name in SMALL)
            else:
                assert not torch.equal(own["bias"], wide["bias"])
                torch.testing.assert_close(own["bias"], wide["bias"], rtol=0.03, atol=1.0)
                largest = 65504 if small.dtype == "fp16" else 1e6
                assert float(own["small"][0, 0]) == pytest.approx(largest, rel=0.01)


def largest(spec: str, dtype: torch.dtype) -> float:
    like = {"only": torch.zeros(SHAPE, dtype=dtype)}
    exchange = exchange_of(spec, like, ReplicaNetwork())
    given = {"only": torch.full(SHAPE, 65504.0, dtype=dtype)}
    return float(exchanged(exchange, given)["only"].max())


@pytest.mark.parametrize(("spec", "dtype"), [("fp16", torch.float32), ("none", torch.float16)])
def test_sums_in_fp16_do_not_overflow_by_rounding(ranks, spec, dtype):
    """A third of the largest number rounds up."""
    assert ranks(largest, 3, spec, dtype) == [pytest.approx(65504, rel=0.01)] * 3
