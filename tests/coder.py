"""Compiles, or loads, the machine code of the entropy coder, which takes seconds."""

import numpy as np
import torch

import mpcomp
from mpcomp import entropy
from mpcomp.core.tensor_meta import TensorMeta


def compile_coder() -> None:
    """Codes an array in each way."""
    q = np.full((2, 2), -1, np.int16)
    entropy.decode(entropy.encode(q), *q.shape)
    smooth = np.add.outer(np.arange(64), np.arange(64)).astype(np.int16)
    entropy.decode(entropy.encode(smooth, (8, 8)), *smooth.shape, (8, 8))
    signs, offsets = (smooth % 2).astype(np.int16), (smooth % 2 * 3).astype(np.int8)
    coded = entropy.encode(signs, None, offsets)
    entropy.decode(coded, *signs.shape, None, offsets)
    many = np.rint(3 * np.random.default_rng(0).standard_normal((256, 512))).astype(np.int16)
    offsets = (many % 8 - 4).astype(np.int8)
    for of_many in (None, offsets):
        coded = entropy.encode(many, None, of_many, in_lanes=True)
        assert coded[0] == 10
        entropy.decode(coded, *many.shape, None, of_many)
    x = torch.from_numpy(smooth).float()
    for method in ("step:0.5:centre=true", "step:0.5:rounding=dither"):
        compressor = mpcomp.parse(method)
        generator = torch.Generator().manual_seed(0)
        payload = compressor.compress(x, generator)
        generator.manual_seed(0)
        compressor.decompress(payload, TensorMeta.of(x), generator)
