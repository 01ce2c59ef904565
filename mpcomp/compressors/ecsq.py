"""Entropy-coded scalar quantization of a given step: the error is set, and the bits follow.

Elements are rearranged into tokens [T, C], a vector along the channels each. A token t has the unit

    u_t = step * 2^(k_t / 4),    k_t = round(4 log2 rms)

with the rms of its own elements or of the whole tensor (divided by ``spikes`` where the token
stands out: its rms is more than 8 times the median one), and is coded as

    y = x / u_t,    q = sign(z) floor(|z| + 1 - dead_zone),    z = y - m,    x^ = u_t (q + m)

where m [C] are channel means of y (``centre``), else zero. With ``dither`` an offset v, uniform in
[-1/2, 1/2), is added before rounding to the nearest and taken away behind it, by both ends:

    q = round(z + v),    x^ = u_t (q - v + m)

The error is then uniform in [-u/2, u/2), has mean zero and does not depend on x (Roberts, 1962;
Schuchman, 1964). The q are coded by their empirical entropy (`mpcomp.entropy`), for
which a uniform quantizer is within 0.25 bits of the best there is at any rate (Gish and Pierce,
1968; ECSQ), and at low rates, with a dead zone, closer; under a dither by their entropy given it
(Ziv, IEEE Trans. Information Theory 1985). Of images, pixels beside each other are
alike, which saves a quarter to a half of the bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpcomp import entropy
from mpcomp.compressors.base import Hosted
from mpcomp.compressors.rounding import Grid, means_of, norms_of, parts_of, restored, rounded
from mpcomp.compressors.tokens import Tokens
from mpcomp.core.context import TensorMeta
from mpcomp.core.randomness import uniform
from mpcomp.core.transfer import to_device, to_host
from mpcomp.core.wire import Parts, Payload

__all__ = ["ECSQ"]

_SCALES = ("token", "tensor")
_ROUNDINGS = ("nearest", "dither")
_PER_OCTAVE = 4  # scales: finer ones would cost bits and change little
# Exponents k: from the rms of the smallest normal numbers of fp32 to that of the largest.
_SMALLEST, _LARGEST = -4 * 126, 4 * 128
_NONE = _SMALLEST - 1  # of tokens that are zero, and stay zero under dither
_MANTISSAS = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)  # 2^(i/4)
_EVERY = np.arange(_SMALLEST, _LARGEST + 1)
# 2^(k/4) of every exponent k: few occur in a tensor, and many times.
_POWERS = np.ldexp(np.array(_MANTISSAS)[_EVERY % _PER_OCTAVE], _EVERY // _PER_OCTAVE)
_LARGEST_UNIT = float(torch.finfo(torch.float32).max) / 4
_SPIKE = 3 * _PER_OCTAVE  # a token this far above the median one stands out
_FRACTIONS = 4  # of a step, in which means are sent


class _Numbers(NamedTuple):
    """The numbers of a message.

    Attributes:
        exponents: k of each token, or of all: int16 [T] or [1].
        means: m of each channel in fractions of a unit, int16 [C]; None without.
        grid: what those say, on the tensor's device.
        q: of the elements, int16 [T, C], on the tensor's device.
    """

    exponents: NDArray[np.int16]
    means: NDArray[np.int16] | None
    grid: Grid
    q: Tensor


@dataclass(frozen=True)
class ECSQ(Hosted):
    """Uniform quantization with a given step, entropy coded. Spec ``step:0.5``.

    Of x in units u of step times the scale, q = sign(x) floor(|x| / u + 1 - dead_zone) is sent, and
    x^ = u q. Its messages are as long as what they say: about log2(4.13 rms / step) bits an element
    of a Gaussian, next to nothing for a tensor that rounds to zero. The error of an element is at
    most max(1/2, dead_zone) units. Scales go as whole numbers, four an octave, so that both ends
    and all devices have the same units.

    In error feedback and memories the step is relative to the tensor itself, not to what is left
    of it: what has not changed costs next to nothing (`compress_against`). So an
    estimate keeps an error of a fixed size: ``aqsgd:first=step/0.4+step:0.4``.

    * Source: Gish & Pierce, IEEE Trans. Inf. Theory 1968, for the entropy-coded uniform step;
      Roberts, 1962, and Schuchman, 1964, for the dither; Weinberger, Seroussi & Sapiro, IEEE Trans.
      Image Processing 2000 (LOCO-I), for what pixels of images let expect of the next. Scales,
      means and spikes are this project's own.
    * Theory: with nearest rounding and no means no element's error is larger than the element: a
      contraction, biased. With dither unbiased, of an error that does not depend on x, and no
      contraction; neither is it with means. Within 0.25 bits an element of the least rate for its
      error.

    Args:
        step: in units of the scale, above 0; 0.25 to 0.5 for activations, 1 to 2 for gradients.
        scale: "token" for the rms of each vector along the channels (dim 1 of images and other
            4-d tensors, else the last), "tensor" for one of all, which spends bits where the
            energy is.
        dead_zone: smallest |y| that is not rounded to zero, 0.5 to 1; above 0.5 fewer bits for a
            larger error.
        centre: subtract the mean of each channel, which goes with the message, from all tokens but
            those that stand out (more than 8 times the median scale): for activations of language
            models, of whose energy means hold half.
        rounding: "nearest", or "dither" (unbiased; for gradients).
        spikes: how many times finer the step is for tokens that stand out, 1 to 64. In many
            language models all tokens of a sequence attend to the first one, whose norm is a
            hundred times that of others, so that its error is everybody's.
        lanes: code many elements in lanes (`docs/develop/lanes.md`), which a CPU codes and decodes
            faster, for up to 0.8 % more bytes. What lies on a GPU whose kernels are on is coded so
            anyway. Every receiver reads both.

    Magnitudes above 32767 steps are clipped.

    Raises:
        ValueError: a setting outside those, a dead zone together with dither, or spikes where all
            tokens have one scale.
    """

    step: float
    scale: str = "token"
    dead_zone: float = 0.5
    centre: bool = False
    rounding: str = "nearest"
    spikes: int = 1
    lanes: bool = False
    spec: ClassVar[str] = "step"
    variable_length: ClassVar[bool] = True  # type: ignore[misc]
    on_host: ClassVar[bool] = True  # type: ignore[misc]
    adaptable = False  # a budget of bytes needs them beforehand
    between_replicas = False  # where lengths must be known beforehand

    def __post_init__(self) -> None:
        if not isinstance(self.step, int | float) or not 1e-3 <= self.step <= 1e3:
            raise ValueError(
                f"step={self.step!r}: a step is from 0.001 to 1000 of the scale; activations of "
                "language models take 0.25 to 0.5"
            )
        if self.scale not in _SCALES:
            raise ValueError(f"scale={self.scale!r}: ECSQ knows {', '.join(_SCALES)}")
        if not 0.5 <= self.dead_zone <= 1:
            raise ValueError(f"dead_zone={self.dead_zone}: 0.5 (rounding to the nearest) to 1 step")
        if self.rounding not in _ROUNDINGS:
            raise ValueError(f"rounding={self.rounding!r}: ECSQ knows {', '.join(_ROUNDINGS)}")
        if self.rounding == "dither" and self.dead_zone != 0.5:
            raise ValueError("rounding='dither' is unbiased, and takes no dead_zone")
        if not isinstance(self.spikes, int) or not 1 <= self.spikes <= 64:
            raise ValueError(f"spikes={self.spikes!r}: a whole number from 1 to 64")
        if self.spikes > 1 and self.scale != "token":
            raise ValueError(
                f"spikes={self.spikes} with scale={self.scale!r}: tokens stand out by their own "
                "scales; use scale='token'"
            )

    @property
    def is_unbiased(self) -> bool:  # type: ignore[override]
        """Whether rounding is dithered."""
        return self.rounding == "dither"

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether rounding is dithered."""
        return self.rounding == "dither"

    @property
    def shares_choice(self) -> bool:  # type: ignore[override]
        """Whether both ends draw the dither."""
        return self.rounding == "dither"

    @property
    def contractive(self) -> bool:  # type: ignore[override]
        """Whether no element's error is larger than the element."""
        return self.rounding == "nearest" and not self.centre

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return self._parts(Tokens.of(meta)).layout

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        return self.compress_against(x, x, generator)

    def compress_against(
        self, x: Tensor, whole: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        tokens = Tokens.of(TensorMeta.of(x))
        dither = self._dither(generator, tokens, x.device)
        return self._payload(self._numbers(tokens, x, whole, dither), tokens, dither)

    def round_trip(
        self,
        x: Tensor,
        whole: Tensor,
        meta: TensorMeta,
        draw: Callable[[], torch.Generator | None],
    ) -> tuple[Payload, Tensor]:
        tokens = Tokens.of(meta)
        dither = self._dither(draw(), tokens, x.device)
        numbers = self._numbers(tokens, x, whole, dither)
        return self._payload(numbers, tokens, dither), self._tensor(numbers, tokens, dither)

    def decompress_to(
        self,
        device: torch.device,
        payload: Payload,
        meta: TensorMeta,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        tokens = Tokens.of(meta)
        coded = self._parts(tokens).parted((to_host(payload[0]),))
        *shapes, _ = self._shapes(tokens)
        *few, elements = (part for (part,) in coded)
        lowest, above, *of_channels = (
            entropy.decode(each.numpy(), *shape) for each, shape in zip(few, shapes, strict=True)
        )
        dither = self._dither(generator, tokens, device)
        q = self.decode_elements(elements, tokens, dither, device)
        exponents = _absolute(lowest, above)
        means = of_channels[0][0] if self.centre else None
        grid = self._grid(exponents, means, device)
        numbers = _Numbers(exponents, means, grid, q)
        return self._tensor(numbers, tokens, dither)

    def encode_elements(self, q: Tensor, tokens: Tokens, dither: Tensor | None) -> Tensor:
        """Whole numbers of the elements in as few bytes as they say: uint8 [n] on the CPU.

        Args:
            q: int16 [T, C], on the tensor's device.
            tokens: what they are of.
            dither: under which they were rounded, fp32 [T, C]; None for none.
        """
        offsets = None if dither is None else parts_of(dither, entropy.PARTS)
        return entropy.encode_tensor(q, tokens.image, offsets, in_lanes=self.lanes)

    def decode_elements(
        self, data: Tensor, tokens: Tokens, dither: Tensor | None, device: torch.device
    ) -> Tensor:
        """The inverse of `encode_elements`, on a device, where the dither is.

        Raises:
            RuntimeError: the data cannot be of such numbers.
        """
        offsets = None if dither is None else parts_of(dither, entropy.PARTS)
        shape = tokens.num, tokens.width
        return entropy.decode_to(device, data, *shape, tokens.image, offsets)

    def _numbers(self, tokens: Tokens, x: Tensor, whole: Tensor, dither: Tensor | None) -> _Numbers:
        """The numbers that a message says."""
        vectors = tokens.vectors(x)
        exponents = self._exponents(vectors if whole is x else tokens.vectors(whole))
        grid, means = self._grid(exponents, None, x.device), None
        if self.centre:
            num_centred = int(_ordinary(exponents).sum()) * tokens.num // max(1, len(exponents))
            fractions = np.rint(_FRACTIONS * means_of(vectors, grid, num_centred))
            means = np.clip(fractions, -entropy.LARGEST, entropy.LARGEST).astype(np.int16)
            grid = grid._replace(means=to_device(_as_sent(means), x.device))
        q = rounded(vectors, grid, dither, self.dead_zone, entropy.LARGEST)
        return _Numbers(exponents, means, grid, q)

    def _payload(self, numbers: _Numbers, tokens: Tokens, dither: Tensor | None) -> Payload:
        few = _relative(numbers.exponents)
        if numbers.means is not None:
            few.append(numbers.means[None])
        coded = [(torch.from_numpy(entropy.encode(each)),) for each in few]
        coded.append((self.encode_elements(numbers.q, tokens, dither),))
        return self._parts(tokens).joined(coded)

    def _tensor(self, numbers: _Numbers, tokens: Tokens, dither: Tensor | None) -> Tensor:
        """x^, from the numbers of a message."""
        dtype = tokens.meta.dtype
        limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        return tokens.join(restored(numbers.q, numbers.grid, dither, limit).to(dtype))

    def _shapes(self, tokens: Tokens) -> tuple[tuple[int, int], ...]:
        """Shapes of what a message holds: exponents, means if there are any, elements."""
        scales = (1, tokens.num if self.scale == "token" else 1)
        means = [(1, tokens.width)] if self.centre else []
        return ((1, 1), scales, *means, (tokens.num, tokens.width))

    def _parts(self, tokens: Tokens) -> Parts:
        """The codes of those shapes."""
        return _coded(self._shapes(tokens))

    def _exponents(self, vectors: Tensor) -> NDArray[np.int16]:
        """k of each token, or of all: the rms in quarters of an octave, int16 [T] or [1]."""
        if self.scale == "tensor":
            vectors = vectors.reshape(1, -1)
        norms = norms_of(vectors)  # sums may round by machine: k is sent
        with np.errstate(divide="ignore"):
            octaves = np.log2(norms / max(1, vectors.shape[1]) ** 0.5)
        exponents = np.clip(np.rint(octaves * _PER_OCTAVE), _SMALLEST, _LARGEST)
        return np.where(norms > 0, exponents, _NONE).astype(np.int16)

    def _grid(
        self,
        exponents: NDArray[np.int16],
        means: NDArray[np.int16] | None,
        device: torch.device,
    ) -> Grid:
        """u and m of each token, or of all."""
        told_apart = self.centre or self.spikes > 1
        ordinary = _ordinary(exponents) if told_apart else np.ones(1, np.bool_)
        places = exponents.astype(np.intp) - _SMALLEST
        units = self.step * _POWERS.take(places, mode="clip")
        units = np.where(ordinary, units, units / self.spikes)
        units = np.where(exponents < _SMALLEST, 0.0, np.minimum(units, _LARGEST_UNIT))
        said = [torch.from_numpy(of_all.astype(np.float32)) for of_all in (units, ordinary)]
        if means is not None:
            said.append(_as_sent(means))
        there = torch.split_with_sizes(to_device(torch.cat(said), device), [*map(len, said)])
        return Grid(there[0][:, None], None if means is None else there[2], there[1][:, None])

    def _dither(
        self, generator: torch.Generator | None, tokens: Tokens, device: torch.device
    ) -> Tensor | None:
        """v of each element [T, C]; None if rounding is to the nearest."""
        if self.rounding != "dither":
            return None
        assert generator is not None, "dither needs the generator both ends share"
        shape = tokens.num, tokens.width
        return uniform(generator, math.prod(shape), device).view(shape).sub_(0.5)


@functools.lru_cache(4096)
def _coded(shapes: tuple[tuple[int, int], ...]) -> Parts:
    """Codes of whole numbers of these shapes, each as long as it turns out."""
    layouts = ((TensorMeta((entropy.max_bytes(*shape),), torch.uint8),) for shape in shapes)
    return Parts(tuple(layouts), (True,) * len(shapes))


def _relative(exponents: NDArray[np.int16]) -> list[NDArray[np.int16]]:
    """The lowest exponent, and how far each is above it, from 1; 0 is for tokens that are zero."""
    there = exponents > _NONE
    lowest = exponents[there].min() if there.any() else np.int16(0)
    above = np.where(there, exponents - lowest + 1, 0).astype(np.int16)
    return [lowest.reshape(1, 1), above[None]]


def _absolute(lowest: NDArray[np.int16], above: NDArray[np.int16]) -> NDArray[np.int16]:
    """The inverse of `_relative`; of a damaged message exponents all the same."""
    exponents = np.where(above[0] > 0, lowest[0].astype(np.int32) + above[0] - 1, _NONE)
    return np.clip(exponents, _NONE, _LARGEST).astype(np.int16)


def _ordinary(exponents: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Whether a token is neither zero nor stands out, by what both ends have: bool [T].

    Tokens that are zero, as padding is, count for nothing: were they in the median, or in means,
    all others would stand out beside enough of them.
    """
    there: NDArray[np.bool_] = exponents > _NONE
    if not there.any():
        return there
    median = int(np.sort(exponents[there])[there.sum() // 2])
    return there & (exponents.astype(np.int32) <= median + _SPIKE)


def _as_sent(means: NDArray[np.int16]) -> Tensor:
    """m of each channel, fp32 [C] on the host."""
    return torch.from_numpy(means).to(torch.float32) / _FRACTIONS
