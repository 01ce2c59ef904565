"""SampledTopK and RedSyncTopK: what TopK sends, found by a threshold, whatever the tensor."""

import itertools
import time

import pytest
import torch
from methods import FLOATS, drawn, same_bits

from mpcomp import Quantize, RedSyncTopK, SampledTopK, TopK
from mpcomp.compressors import threshold
from mpcomp.compressors.threshold import at_least

METHODS = [
    SampledTopK,
    lambda keep: SampledTopK(keep, sample=0.001),
    lambda keep: SampledTopK(keep, sample=1.0),
    RedSyncTopK,
    lambda keep: RedSyncTopK(keep, search="binary"),
]
EVERY = pytest.mark.parametrize("method", METHODS)


def tensors(n: int) -> dict[str, torch.Tensor]:
    normal = torch.randn(n, dtype=torch.float64)
    sparse = torch.zeros(n, dtype=torch.float64)
    sparse[::311] = normal[::311]
    periodic = torch.zeros(n, dtype=torch.float64)
    periodic[::97] = 5.0
    return {
        "normal": normal,
        "Student-t, 3 degrees": normal / torch.randn(3, n).double().square().mean(dim=0).sqrt(),
        "Cauchy": (normal / torch.randn(n).double()).clamp(-3e4, 3e4),
        "one giant": torch.where(torch.arange(n) == n // 2, 3e4, normal / 1000),
        "ties": normal.round(),
        "two values": torch.where(normal > 1, 2.0, -1.0).double(),
        "constant": torch.full_like(normal, 0.3),
        "zeros": torch.zeros_like(normal),
        "sparse": sparse,
        "periodic": periodic,
        "sorted": normal.sort().values,
        "huge": torch.where(normal > 0, 6e4, -6e4).double(),
    }


@pytest.mark.each_once
@EVERY
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [1, 5, 300, 30_011])
def test_sends_what_top_k_sends(method, dtype, n):
    """Bit for bit, for any start of the sample; k = 1 and k = n too."""
    for name, x in tensors(n).items():
        x = x.to(dtype)
        for keep in (1e-5, 0.001, 0.01, 0.1, 0.5, 1.0):
            expected = TopK(keep, scope="tensor").compress(x)
            for generator in (None, drawn(1), drawn(2)):
                got = method(keep).compress(x, generator)
                same = all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
                assert same, (name, keep)


def test_overflowing_means_and_values_that_are_not_finite_end_in_the_exact_choice():
    x = torch.full((10_000,), 3e38)
    x[77] = -3.1e38
    for method in METHODS:
        assert 77 in method(1e-4).choose(x, 1).tolist()
        for bad in (float("nan"), float("inf")):
            broken = torch.randn(10_000)
            broken[5] = bad
            positions = method(0.01).choose(broken, 100, drawn())
            assert positions.numel() == 100 and 5 in positions.tolist()


def counted(monkeypatch) -> list[float]:
    """The thresholds that are tried, and none by sorting the whole tensor."""
    tried: list[float] = []
    monkeypatch.setattr(
        threshold, "at_least", lambda flat, value: tried.append(value) or at_least(flat, value)
    )
    exact = threshold.largest_positions

    def of_few(rows, k):
        assert rows.shape[1] < 100_000, "sorted them all"
        return exact(rows, k)

    monkeypatch.setattr(threshold, "largest_positions", of_few)
    return tried


@pytest.mark.parametrize("keep", [0.001, 0.01, 0.1])
def test_a_sampled_threshold_mostly_serves_at_once(keep, monkeypatch):
    tried = counted(monkeypatch)
    x = torch.randn(200_000)
    for seed in range(20):
        assert SampledTopK(keep).choose(x, int(200_000 * keep), drawn(seed)).numel()
    assert len(tried) <= 24
    sizes = [int((x.abs() >= value).sum()) / (200_000 * keep) for value in tried]
    assert sum(sizes) / len(sizes) < 4  # few more than wanted to choose among


def test_a_threshold_that_few_reach_is_lowered_to_four_fifths(monkeypatch):
    """A sample of the large elements alone: every 50th, the default stride here, from 0."""
    x = torch.randn(200_000).abs() + 1
    x[::100] *= 1.9
    tried = counted(monkeypatch)
    positions = SampledTopK(0.01).choose(x, 2000)
    assert len(tried) > 1
    for one, two in itertools.pairwise(tried):
        assert two == pytest.approx(0.8 * one)
    assert torch.equal(positions, TopK(0.01, scope="tensor").choose(x, 2000))


def test_the_sample_is_large_enough_for_the_ratio(monkeypatch):
    """At least 2 / keep elements, at least ``sample`` of them, evenly spread from the start."""
    seen = []
    original = SampledTopK._threshold
    monkeypatch.setattr(
        SampledTopK,
        "_threshold",
        staticmethod(lambda sample, share: seen.append(sample) or original(sample, share)),
    )
    x = torch.arange(100_000.0)
    SampledTopK(0.001).choose(x, 100)
    assert seen[-1].numel() >= 2000 and seen[-1][0] == 0 and len(seen[-1].diff().unique()) == 1
    SampledTopK(0.1, sample=0.05).choose(x, 10_000)
    assert 5000 <= seen[-1].numel() < 6000
    starts = set()
    for seed in range(20):
        SampledTopK(0.1).choose(x, 10_000, drawn(seed))
        starts.add(seen[-1][0].item())
    assert len(starts) > 5


def test_trimmed_search_lowers_by_tenths_from_nine(monkeypatch):
    tried = counted(monkeypatch)
    x = torch.rand(200_000)
    RedSyncTopK(0.25).choose(x, 50_000)
    mean, largest = x.mean().item(), x.max().item()
    # Uniform: a quarter lies above 0.75 = mean + 0.5 (largest - mean).
    expected = [mean + r / 10 * (largest - mean) for r in (9, 8, 7, 6, 5, 4)]
    assert tried[:5] == pytest.approx(expected[:5]) and len(tried) in (5, 6)


def test_binary_search_halves_until_k_to_2k_reach_it(monkeypatch):
    tried = counted(monkeypatch)
    x = torch.rand(200_000)
    RedSyncTopK(0.1, search="binary").choose(x, 20_000)
    mean, largest = x.mean().item(), x.max().item()
    # Above r lie (1 - r) / 2: 0.25 at a half, 0.125 at three quarters, which is k to 2 k.
    assert tried == pytest.approx([mean + r * (largest - mean) for r in (0.5, 0.75)])


def test_sampling_is_faster_than_sorting():
    """Ten to one, in this thread's own time; with a wide margin, as caches are shared."""
    x = torch.randn(4_000_000)
    k = 4000

    def best(method) -> float:
        times = []
        for _ in range(3):
            start = time.thread_time()
            method.choose(x, k)
            times.append(time.thread_time() - start)
        return min(times)

    assert best(SampledTopK(0.001)) < 0.7 * best(TopK(0.001, scope="tensor"))


def test_values_may_be_coded():
    x = torch.randn(1, 20_000)
    for method in (SampledTopK(0.01, values=Quantize(8)), RedSyncTopK(0.01, values=Quantize(8))):
        got = method.compress(x)
        expected = TopK(0.01, scope="tensor", values=Quantize(8)).compress(x)
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def test_bad_settings():
    for method in (SampledTopK, RedSyncTopK):
        with pytest.raises(ValueError, match=r"keep=0.*\(0, 1\]"):
            method(0)
        with pytest.raises(ValueError, match="cannot be selected again"):
            method(0.1, values=TopK(0.1))
    with pytest.raises(ValueError, match=r"sample=0: .*\(0, 1\]"):
        SampledTopK(0.1, sample=0)
    with pytest.raises(ValueError, match=r"search='linear'.*trimmed, binary"):
        RedSyncTopK(0.1, search="linear")
