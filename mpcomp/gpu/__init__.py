"""Kernels for GPUs, in Triton: of the bits that the same operations have on a CPU.

`mpcomp.core.kernels` loads them with the first tensor on CUDA, if ``MPCOMP_TRITON=1``. Divisions
are rounded to the nearest and products are not fused with sums, as each module's `launch` says.
`docs/develop/gpu.md` has how that is proved.
"""

from __future__ import annotations

from mpcomp.gpu import checks as checks
from mpcomp.gpu import lanes as lanes
from mpcomp.gpu import quantize as quantize
from mpcomp.gpu import randomness as randomness
from mpcomp.gpu import rounding as rounding
from mpcomp.gpu import tallies as tallies
from mpcomp.gpu import topk as topk
