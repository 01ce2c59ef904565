"""Law 4 for kernels in Triton: they have the CPU's bits of whatever compressors ask of them.

On a GPU these are tests like others. Without one, `test_kernels_in_triton.py` has them interpreted,
in a process of their own, as Triton asks before it is loaded.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is no dependency: pip install triton")
from recipes.bench.gpu_kernels import calls_of, drawn, in_triton, methods

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else pytest.mark.gpu
ROUNDS, MOST = (3, 3000) if INTERPRETED else (40, 100_000)


def test_kernels_have_the_bits_of_the_cpu():
    generator, asked = torch.Generator().manual_seed(49), set()
    there = in_triton()
    for _ in range(ROUNDS):
        for method in methods(generator):
            x = drawn(generator, MOST)
            for call in calls_of(method, x):
                if call.name in there:
                    asked.add(call.name)
                    assert not call.differing(DEVICE), (method, x.shape, x.dtype, call.name)
    assert asked == set(there)
