"""RandomK and RandomBlock: a choice both ends draw, fair, contracting in expectation."""

import pytest
import torch
from methods import drawn, round_trip, same_bits

from mpcomp import Cast, RandomBlock, RandomK, TensorMeta

BOTH = pytest.mark.parametrize("method", [RandomK, RandomBlock])
DRAWS = 3000


def many(compressor, x: torch.Tensor) -> torch.Tensor:
    """What arrives in many independent draws: [draws, n]."""
    return torch.stack([round_trip(compressor, x, seed) for seed in range(DRAWS)])


@BOTH
def test_nothing_but_values_is_sent(method):
    meta = TensorMeta((4, 100))
    assert method(0.1).wire_bytes(meta) == 40 * 4
    assert method(0.1, values=Cast("fp16")).wire_bytes(meta) == 40 * 2


@BOTH
def test_kept_elements_arrive_as_they_are_and_the_rest_as_zero(method):
    x = torch.randn(4, 100)
    compressor = method(0.1)
    y = round_trip(compressor, x)
    payload = compressor.compress(x, drawn())
    positions = compressor.indices(payload, TensorMeta.of(x), drawn())
    assert positions.numel() == 40 and (positions[1:] > positions[:-1]).all()
    mask = torch.zeros(400, dtype=torch.bool).index_fill_(0, positions, True).reshape(4, 100)
    assert same_bits(y, torch.where(mask, x, torch.zeros(())))


@BOTH
def test_the_choice_does_not_look_at_the_data(method):
    """Both ends and all replicas draw it from equal generators."""
    meta = TensorMeta((400,))
    choices = [
        method(0.1).indices(method(0.1).compress(x, drawn(3)), meta, drawn(3))
        for x in (torch.randn(400), torch.zeros(400))
    ]
    assert torch.equal(*choices)
    other = method(0.1).indices(method(0.1).compress(torch.zeros(400), drawn(4)), meta, drawn(4))
    assert not torch.equal(choices[0], other)


@BOTH
def test_every_element_has_the_same_chance(method):
    """Inclusion in k of n draws, at the ends of the tensor too; 5 standard deviations."""
    n, keep = 20, 0.25
    share = (many(method(keep), torch.ones(n)) != 0).double().mean(dim=0)
    assert ((share - keep).abs() < 5 * (keep * (1 - keep) / DRAWS) ** 0.5).all()


@BOTH
def test_unbiased_means_unbiased(method):
    """E C(x) = x with unbiased=True, and (k/n) x without; 5 standard deviations."""
    x = torch.randn(20)
    n_over_k = 4
    deviation = x.abs() * ((n_over_k - 1) / DRAWS) ** 0.5
    assert ((many(method(0.25, unbiased=True), x).mean(dim=0) - x).abs() < 5 * deviation).all()
    scaled = many(method(0.25), x).mean(dim=0) * n_over_k
    assert ((scaled - x).abs() < 5 * deviation).all()


@BOTH
def test_contraction_in_expectation(method):
    """E ‖x − C(x)‖² = (1 − k/n) ‖x‖² without scaling."""
    x = torch.randn(20)
    errors = (many(method(0.25), x) - x).square().sum(dim=1) / x.square().sum()
    assert abs(errors.mean() - 0.75) < 5 * errors.std() / DRAWS**0.5


def test_a_block_is_a_run_around_the_end():
    starts = set()
    for seed in range(300):
        kept = (round_trip(RandomBlock(0.3), torch.ones(10), seed) != 0).tolist()
        edges = [i for i in range(10) if kept[i] and not kept[i - 1]]  # kept[-1] wraps around
        assert sum(kept) == 3 and len(edges) == 1
        starts.add(edges[0])
    assert starts == set(range(10))


@BOTH
def test_everything_kept_is_the_tensor(method):
    x = torch.randn(30)
    assert same_bits(round_trip(method(1.0), x), x)
    assert same_bits(round_trip(method(1.0, unbiased=True), x), x)


@BOTH
def test_bad_settings(method):
    with pytest.raises(ValueError, match=r"keep=0.*\(0, 1\]"):
        method(0)
    with pytest.raises(ValueError, match="cannot be selected again"):
        method(0.1, values=RandomK(0.1))
    with pytest.raises(AssertionError, match="generator both ends share"):
        method(0.1).compress(torch.randn(100))
