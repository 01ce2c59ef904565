"""The table of kernels: each implementation gives what torch's operations give, bit for bit."""

import kernels  # noqa: F401 - fills the table
import numpy as np
import pytest
import torch
from methods import same_bits

from mpcomp.compressors.rounding import Grid
from mpcomp.core.kernels import KERNELS, Kernel, kernel

NUM_ROWS, WIDTH = 40, 5003  # of more than one block, and of no whole one
#: Of which the sums may differ in their last bits.
SUMS = {"compressors.rounding.norms_of", "compressors.rounding.sums_of"}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def given():
    """Arguments of every kernel."""
    x = drawn(NUM_ROWS, WIDTH)
    x[3] = 0
    x[4, ::2] = x[4, 0]  # equal magnitudes
    grid = Grid(x.abs().amax(1, keepdim=True) / 9, drawn(WIDTH), (drawn(NUM_ROWS, 1) > 0).float())
    dither = torch.rand(x.shape, generator=torch.Generator().manual_seed(8)) - 0.5
    q = (x * 9).round().to(torch.int16)
    mask = x.reshape(-1) > 1
    classes = (torch.arange(n).to(torch.uint8) % 16 for n in q.shape)
    classes = tuple(classes)
    cpu = torch.device("cpu")
    return {
        "compressors.bits.pack_low": [((q & ((1 << b) - 1)).to(torch.uint8), b) for b in (1, 2, 4)],
        "compressors.bits.unpack_low": [
            (q.to(torch.uint8), b, WIDTH * 8 // b - 3) for b in (1, 2, 4)
        ],
        "compressors.bits.nonzero": [(mask, int(mask.sum()))],
        "compressors.topk.mask_of_largest": [(x, 100), (x.bfloat16(), 700), (x[:1, :9], 1)],
        "compressors.topk.kth_largest": [(q.long(), 100), (x.abs(), 1)],
        "compressors.threshold.at_least": [(x.reshape(-1), 0.7), (x[4], torch.nan)],
        "compressors.threshold.count_set": [(mask,)],
        "compressors.rows.rows_with_bits": [(q,), (torch.zeros(5, 3, dtype=torch.int32),)],
        "compressors.rounding.norms_of": [(x,)],
        "compressors.rounding.sums_of": [(x, grid)],
        "compressors.rounding.rounded": [
            *((x, grid, None, dead_zone, 127) for dead_zone in (0.5, 0.8)),
            (x, grid._replace(means=None), dither, 0.5, 127),
        ],
        "compressors.rounding.restored": [(q, grid, None, 3.0), (q, grid, dither, 1e38)],
        "compressors.rounding.parts_of": [(dither, 16)],
        "entropy.tallies.summed": [(q,), (9000 * q,)],
        "entropy.tallies.tallied": [
            (q, torch.empty((0, 0), dtype=torch.int8), *classes, 60),
            (q, (dither * 8).floor().to(torch.int8), *classes, 120),
        ],
        "compressors.tokens.transposed": [
            (drawn(3, 40, 33),),
            (drawn(2, 16, 64).bfloat16(),),
            (drawn(2, 1, 5).double(),),
        ],
        "core.randomness.hashed": [(cpu, numel, -9, 1 << 30) for numel in (3, 100_003)],
    }


def test_every_kernel_is_examined():
    """Kernels of GPUs alone are in `tests/gpu/test_gpu_bits.py`."""
    assert {name for name in KERNELS if "cpu" in KERNELS[name].by_device} == set(given()) >= SUMS


@pytest.mark.parametrize("name", sorted(given()))
def test_an_implementation_gives_the_bits_of_torch(name):
    """Law 4 on the CPU; for GPUs it is in `tests/gpu/test_gpu_bits.py`."""
    each = KERNELS[name]
    for arguments in given()[name]:
        expected = torch.as_tensor(each.anywhere(*arguments))
        result = torch.as_tensor(each.by_device["cpu"](*arguments))
        if name in SUMS:
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        else:
            assert same_bits(result, expected)


def test_a_kernel_for_another_device_is_one_function(monkeypatch):
    """A stranger's kernel, for tensors on "meta", which have no numbers to work on."""
    monkeypatch.setattr("mpcomp.core.kernels.KERNELS", {})

    @kernel
    def twice(x):
        """Twice x."""
        return x + x

    assert isinstance(twice, Kernel) and (twice.__name__, twice.__doc__) == ("twice", "Twice x.")
    assert twice(torch.ones(2)).tolist() == [2, 2]

    @twice.on("meta")
    def _(x):
        return np.zeros(len(x))

    assert twice.own(torch.device("meta")) and not twice.own(torch.device("cpu"))
    assert twice(torch.ones(3, device="meta")).tolist() == [0, 0, 0]
    assert twice(torch.ones(2)).tolist() == [2, 2]
