"""The time and the bytes that methods at a cut take for one microbatch, measured here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from mpcomp.core.step import Step
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.links.build import MethodLike, boundaries_of
from mpcomp.plan.timeline import Messages

__all__ = ["Coding", "measure_coding"]

#: Messages before the clock: the first ones make tables and buffers.
_WARMUPS = 2


class Coding(NamedTuple):
    """Seconds of coding one microbatch at one cut.

    Attributes:
        encode_act_s: at the earlier stage.
        decode_act_s: at the later one.
        encode_grad_s: at the later stage.
        decode_grad_s: at the earlier one.
    """

    encode_act_s: float = 0.0
    decode_act_s: float = 0.0
    encode_grad_s: float = 0.0
    decode_grad_s: float = 0.0

    def times(self, factor: float) -> Coding:
        """The coding of so many times as many elements."""
        return Coding(*(factor * seconds for seconds in self))


def measure_coding(
    act_comp: MethodLike,
    grad_comp: MethodLike,
    activation: Tensor,
    gradient: Tensor,
    *,
    repeats: int = 5,
) -> tuple[Coding, Messages]:
    """Codes one microbatch again and again, as the two ends of a cut do.

    Args:
        act_comp: method of activations, as of `mpcomp.pipeline`.
        grad_comp: method of gradients.
        activation: of a microbatch, [rows, ...]; a real one where there is one, as the bytes of
            many methods depend on it.
        gradient: of the same shape.
        repeats: that are measured.

    Returns:
        Medians, and the messages of the last time.

    Raises:
        ValueError: no such method, or repeats below 1.
        TypeError: a method that is none.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}: pass at least 1")
    (boundary,) = boundaries_of(act_comp, grad_comp, ("cut",), seed=0, replica=0, warmup_steps=0)
    act_meta, grad_meta = TensorMeta.of(activation), TensorMeta.of(gradient)
    ids = tuple((row,) for row in range(len(activation)))
    seconds: list[tuple[float, float, float, float]] = []
    for index in range(_WARMUPS + repeats):
        step = Step(index=index, train=True, sample_ids=(ids,))
        act, encode_act = _timed(boundary.send_activation, activation, step, 0)
        _, decode_act = _timed(boundary.receive_activation, act, act_meta, step, 0)
        grad, encode_grad = _timed(boundary.send_gradient, gradient, step, 0)
        _, decode_grad = _timed(boundary.receive_gradient, grad, grad_meta, step, 0)
        boundary.finish_step(finite=True)
        seconds.append((encode_act, decode_act, encode_grad, decode_grad))
    medians = [statistics.median(times) for times in zip(*seconds[_WARMUPS:], strict=True)]
    return Coding(*medians), Messages(act.numel(), grad.numel())


def _timed(code: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, float]:
    begin = time.perf_counter()
    result = code(*arguments)
    return result, time.perf_counter() - begin
