"""Time, bytes and error of methods at a cut for one microbatch, measured here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpcomp.core.context import Step, TensorMeta
from mpcomp.links.build import MethodLike, boundaries_of
from mpcomp.plan.timeline import Messages
from mpcomp.plan.timing import Run, Settle, timed, typical

__all__ = ["Coding", "CutCost", "MeasuredCut", "measure_coding", "measure_cut"]

#: Steps before the clock: the first ones make tables and buffers.
_WARMUPS = 2
#: Seconds of rest, and bytes that are gone through, before each message on the clock. After 1 << 24
#: of them coding still finds in caches what it needs, and takes half to two thirds of the time.
_REST_S = 0.008
_CACHE_BYTES = 9 << 24


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


class CutCost(NamedTuple):
    """Coding and messages of one microbatch at a cut."""

    coding: Coding
    messages: Messages

    def times(self, factor: float) -> CutCost:
        """The cost of so many times as many elements."""
        return CutCost(
            self.coding.times(factor), Messages(*(factor * count for count in self.messages))
        )


class MeasuredCut(NamedTuple):
    """The cost of one microbatch at a cut, and how it arrives.

    Attributes:
        cost: of coding and messages.
        act_error: ||x - y|| / ||x|| of the last activation.
        grad_error: of the last gradient.
    """

    cost: CutCost
    act_error: float
    grad_error: float


def measure_coding(
    act_comp: MethodLike,
    grad_comp: MethodLike,
    activation: Tensor,
    gradient: Tensor,
    *,
    repeats: int = 5,
    changes: tuple[float, float] = (0.0, 0.0),
    num_rows: int | None = None,
    settle: Settle = typical,
) -> CutCost:
    """The cost alone of `measure_cut`, where arguments and errors are described."""
    return measure_cut(
        act_comp,
        grad_comp,
        activation,
        gradient,
        repeats=repeats,
        changes=changes,
        num_rows=num_rows,
        settle=settle,
    ).cost


def measure_cut(
    act_comp: MethodLike,
    grad_comp: MethodLike,
    activation: Tensor,
    gradient: Tensor,
    *,
    repeats: int = 5,
    changes: tuple[float, float] = (0.0, 0.0),
    num_rows: int | None = None,
    settle: Settle = typical,
) -> MeasuredCut:
    """Codes one microbatch again and again, as the two ends of a cut do.

    Before each message the processor rests and goes through other memory, as it does in a step,
    where a stage computes and waits in between. Repeated at once, coding looks faster than it is
    there: that of `auto` by a third, that of a few copies several times.

    Args:
        act_comp: method of activations, as of `mpcomp.pipeline`.
        grad_comp: method of gradients.
        activation: of a microbatch, [rows, ...]; a real one where there is one, as the bytes of
            many methods depend on it.
        gradient: of the same shape.
        repeats: that are measured.
        changes: of the activation's energy and of the gradient's, the share that the same samples'
            have changed by when they come again, which is all that methods with a memory send.
        num_rows: of both, as of `mpcomp.links.link.Link`.
        settle: what repeats of one kind of message stand for; by default their median.

    Returns:
        Times, the messages of the last repeat, and their errors.

    Raises:
        ValueError: no such method, or repeats below 1.
        TypeError: a method that is none.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}: pass at least 1")
    given = tuple(zip((activation, gradient), changes, strict=True))
    (boundary,) = boundaries_of(act_comp, grad_comp, ("cut",), seed=0, replica=0, warmup_steps=0)
    for link in boundary.links:
        link.num_rows = num_rows
    act_meta, grad_meta = TensorMeta.of(activation), TensorMeta.of(gradient)
    rows = len(activation)
    ids = tuple(tuple((row,) for row in range(start, start + rows)) for start in (0, rows))
    runs: list[tuple[Run, ...]] = []
    for index in range(_WARMUPS + repeats):
        step = Step(index=index, train=True, sample_ids=ids)
        activation, gradient = (_visit(x, share, index) for x, share in given)
        run = timed if index < _WARMUPS else _timed_after_rest
        # Methods learn from the first microbatch of a step: all others take what is measured.
        for microbatch in (0, 1) if index < _WARMUPS else (1,):
            act, encode_act = run(boundary.act.encode, activation, step, microbatch)
            _, decode_act = run(boundary.act.decode, act, act_meta, step, microbatch)
            grad, encode_grad = run(boundary.grad.encode, gradient, step, microbatch)
            _, decode_grad = run(boundary.grad.decode, grad, grad_meta, step, microbatch)
        if index == _WARMUPS + repeats - 1:
            boundary.act.compare_sent(activation, act, step, microbatch)
            boundary.grad.compare_sent(gradient, grad, step, microbatch)
        boundary.finish_step(finite=True)
        runs.append((encode_act, decode_act, encode_grad, decode_grad))
    seconds = map(settle, zip(*runs[_WARMUPS:], strict=True))
    return MeasuredCut(
        CutCost(Coding(*seconds), Messages(act.numel(), grad.numel())),
        *(link.meter.train.relative_error for link in boundary.links),
    )


def _visit(x: Tensor, share: float, index: int) -> Tensor:
    """The tensor with noise of its own, so that two visits differ by so much of its energy.

    Never the same again: an estimate that is wrong by what was left out of a change would be right
    as soon as that is taken back.
    """
    if not share:
        return x
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(index))
    scale = (share / 2) ** 0.5 * x.float().norm() / noise.norm()
    changed: Tensor = (x.float() + scale * noise.to(x.device)).to(x.dtype)
    return changed


def _timed_after_rest(code: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, Run]:
    time.sleep(_REST_S)
    # As int64: the sum of as many single bytes takes thirty times as long.
    torch.zeros(_CACHE_BYTES // 8, dtype=torch.int64).sum()
    return timed(code, *arguments)
