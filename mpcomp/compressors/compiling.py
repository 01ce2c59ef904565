"""The machine code of the coder, made or loaded ahead: else the first messages wait for it."""

from __future__ import annotations

import numpy as np
import torch

from mpcomp import entropy
from mpcomp.compressors.base import Compressor
from mpcomp.compressors.tokens import transposed
from mpcomp.core.context import TensorMeta
from mpcomp.core.spec import parse
from mpcomp.entropy.lanes import MANY

__all__ = ["compile_coder"]


def compile_coder() -> None:
    """Codes a small array in each way, by which all loops are compiled or loaded.

    That takes ten seconds and more once an installation, and one in a process after that.
    """
    q = np.full((2, 2), -1, np.int16)
    entropy.decode(entropy.encode(q), *q.shape)
    smooth = np.add.outer(np.arange(64), np.arange(64)).astype(np.int16)  # with large ones
    rows, columns = smooth.shape
    entropy.decode(entropy.encode(smooth), rows, columns)
    entropy.decode(entropy.encode(smooth, (8, 8)), rows, columns, (8, 8))
    signs, offsets = (smooth % 2).astype(np.int16), (smooth % 2 * 3).astype(np.int8)
    coded = entropy.encode(signs, None, offsets)
    entropy.decode(coded, rows, columns, None, offsets)
    squares = np.arange(MANY).reshape(-1, 256) ** 2
    many = (squares % 61 // 8 - 3).astype(np.int16)  # of few kinds, so that lanes are taken
    offsets = np.resize(offsets, many.shape)
    coded = entropy.encode(many, None, offsets, in_lanes=True)
    entropy.decode(coded, *many.shape, None, offsets)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        transposed(torch.zeros((1, 2, 2), dtype=dtype))
    x = torch.from_numpy(many).float()
    for method in ("step:0.5:centre=true", "step:0.5:rounding=dither"):
        compressor: Compressor = parse(method)
        generator = torch.Generator().manual_seed(0)
        payload = compressor.compress(x, generator)
        generator.manual_seed(0)
        compressor.decompress(payload, TensorMeta.of(x), generator)
