"""Draws that both ends share and that nobody else feels."""

import hashlib
import itertools
import struct

import pytest
import torch
from methods import drawn, same_bits
from torch import nn

from mpcomp.core.randomness import derive_seed, generator_for, normal, stage_randomness, uniform

CPU = torch.device("cpu")


def test_seeds_are_the_same_on_every_machine_and_python():
    """Pinned: a checkpoint of today must go on tomorrow."""
    digest = hashlib.blake2b(digest_size=8)
    for raw in (struct.pack("<q", 7), b"act", struct.pack("<q", -1)):
        digest.update(struct.pack("<I", len(raw)) + raw)
    assert derive_seed(7, "act", -1) == int.from_bytes(digest.digest(), "little") >> 1
    assert derive_seed(0, "train", 3) == 4661080073792881083


def test_seeds_tell_all_their_parts_apart():
    parts = [(0,), (1,), (0, 0), (0, 1), (1, 0), ("a",), ("a", "b"), ("ab",), ("", "ab"), ("1",)]
    seeds = [derive_seed(*part) for part in parts]
    assert len(set(seeds)) == len(parts) and all(0 <= seed < 2**63 for seed in seeds)


def test_equal_parts_give_equal_generators(global_rng_untouched):
    with global_rng_untouched():
        draws = [torch.rand(5, generator=generator_for(1, "act", 2)) for _ in range(2)]
        other = torch.rand(5, generator=generator_for(1, "act", 3))
    assert same_bits(*draws) and not torch.equal(draws[0], other)


def hashed(index: int, keys: list[int]) -> float:
    """The counter-based generator in Python's integers."""
    mask = 0xFFFFFFFF
    x = (index + keys[0]) & mask
    x = ((x ^ x >> 16) * 0x7FEB352D) & mask
    x ^= keys[1] & mask
    x = ((x ^ x >> 15) * 0x846CA68B) & mask
    x ^= x >> 16
    return (x >> 8) / 2**24


@pytest.mark.parametrize("n", [1000, (1 << 15) + 7])
def test_uniform_is_its_formula(n, global_rng_untouched):
    """Any kernel on any device can compute element i alone; many are made by machine code."""
    keys = torch.randint(-(1 << 31), 1 << 31, (2,), generator=drawn(3)).tolist()
    with global_rng_untouched():
        got = uniform(drawn(3), n, CPU)
    assert got.dtype == torch.float32
    assert got.tolist() == [hashed(i, keys) for i in range(n)]


@pytest.mark.parametrize("seed", range(4))
def test_uniform_is_uniform_and_neighbours_are_independent(seed):
    """Moments, histogram and correlations of 200,000 draws within 5 standard deviations."""
    n = 200_000
    u = uniform(drawn(seed), n, CPU).double()
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    counts = torch.histc(u, 64, 0, 1)
    assert (counts - n / 64).abs().max() < 5 * (n / 64) ** 0.5
    for lag in (1, 2, 64, 1024):
        correlation = ((u[:-lag] - 0.5) * (u[lag:] - 0.5)).mean() * 12
        assert abs(correlation) < 5 / (n - lag) ** 0.5, lag


def test_streams_of_different_seeds_are_no_shifts_of_each_other():
    streams = [set(uniform(drawn(seed), 2000, CPU).tolist()) for seed in range(6)]
    for a, b in itertools.combinations(streams, 2):
        assert len(a & b) < 20  # by chance of 2^24 values


def test_stage_randomness_depends_on_its_arguments_alone(global_rng_untouched):
    dropout = nn.Dropout(0.5)
    x = torch.ones(200)

    def draw(seed=1, step=2, stage=3, microbatch=4):
        torch.rand(int(torch.randint(5, ())))  # whatever else has been drawn
        with global_rng_untouched(), stage_randomness(CPU, seed, step, stage, microbatch):
            return dropout(x)

    assert same_bits(draw(), draw())
    others = [draw(seed=0), draw(step=0), draw(stage=0), draw(microbatch=0)]
    assert all(not torch.equal(draw(), other) for other in others)


def test_stage_randomness_is_undone_after_an_error(global_rng_untouched):
    with global_rng_untouched(), pytest.raises(RuntimeError), stage_randomness(CPU, 0, 0, 0, 0):
        raise RuntimeError


def test_normal_is_the_inverse_of_its_distribution_function(global_rng_untouched):
    """Of the same keys: the distribution function of what is drawn is what `uniform` draws."""
    n = 20_000
    with global_rng_untouched():
        z = normal(drawn(4), n, CPU)
    assert z.dtype == torch.float32 and z.shape == (n,) and bool(z.isfinite().all())
    below = 0.5 * (1 + torch.erf(z.double() / 2**0.5))
    assert float((below - uniform(drawn(4), n, CPU).double()).abs().max()) < 1e-7
    assert abs(float(z.mean())) < 0.03 and abs(float(z.square().mean()) - 1) < 0.03
    assert abs(float(z.pow(4).mean()) - 3) < 0.2


def test_normal_is_finite_for_every_number_of_uniform(monkeypatch):
    """Also for its smallest, 0, and its largest."""
    ends = torch.tensor([0.0, (2**24 - 1) / 2**24])
    monkeypatch.setattr("mpcomp.core.randomness.uniform", lambda *_: ends)
    low, high = normal(drawn(0), 2, CPU).tolist()
    assert -6 < low < -5 and high == pytest.approx(-low, abs=1e-3)
