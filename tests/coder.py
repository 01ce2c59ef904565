"""Compiles, or loads, the machine code of the entropy coder, which takes seconds."""

import numpy as np
import torch

import mpcomp
from mpcomp import entropy
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.entropy import lanes
from mpcomp.entropy.message import Reader


def compile_coder() -> None:
    """Codes one small array in each way."""
    q = np.full((2, 2), -1, np.int16)
    entropy.decode(entropy.encode(q), *q.shape)
    smooth = np.add.outer(np.arange(64), np.arange(64)).astype(np.int16)
    entropy.decode(entropy.encode(smooth, (8, 8)), *smooth.shape, (8, 8))
    signs, offsets = (smooth % 2).astype(np.int16), (smooth % 2 * 3).astype(np.int8)
    coded = entropy.encode(signs, None, offsets)
    entropy.decode(coded, *signs.shape, None, offsets)
    many = np.tile(signs, (2, 1))
    for of_many in (None, np.tile(offsets, (2, 1))):
        coded = lanes.encode(many, of_many)
        assert coded is not None
        data = np.frombuffer(bytearray(b"".join([b"\n", *coded])), np.uint8)
        lanes.decode(Reader(data), *many.shape, of_many)
    x = torch.from_numpy(smooth).float()
    for method in ("step:0.5:centre=true", "step:0.5:rounding=dither"):
        compressor = mpcomp.parse(method)
        generator = torch.Generator().manual_seed(0)
        payload = compressor.compress(x, generator)
        generator.manual_seed(0)
        compressor.decompress(payload, TensorMeta.of(x), generator)
