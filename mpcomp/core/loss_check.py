"""Comparison of a loss over a batch with the mean of its losses over microbatches.

Only for some losses are they the same: a mean over rows, or one that says over how many terms it
is. So the two are compared, with the outputs of a step::

    microbatch 0   output, target --+--> loss, gradient  * weight 0 --+--> what is trained by
    microbatch 1   output, target --+--> loss, gradient  * weight 1 --+         =
                                    +--> of all rows together ----------->  the plain model's

A gradient shows a wrong weight even where all rows have like losses, as at the start of a training.

Steps 1, 2, 4, 8, ... are compared, and a step whose targets have an entry below or above all before
it. Padding that comes later has such an entry: a class of -100, a mask of 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mpcomp.core.loss import is_known, is_sum, num_terms
from mpcomp.core.microbatch import is_of_tensors, join, map_tensors
from mpcomp.core.side_effects import reached, undone

__all__ = ["LossCheck"]

#: Elements of outputs that are compared, at most, but for a row of each of two microbatches.
_ELEMENTS = 1 << 22
#: Comparisons because of such entries, at most: numbers of samples in order have one in each step.
_MARKS = 32


class _Part(NamedTuple):
    """Leading rows of a microbatch."""

    output: Tensor
    target: Any
    rows: int

    def turned(self) -> _Part:
        """The same rows in the other order."""
        target = map_tensors(self.target, lambda t: t.flip(0))
        return _Part(_turned(self.output, self.rows), target, self.rows)


class _Value(NamedTuple):
    """A loss, its weighted gradient for the output, and the size of the terms that add up to it.

    A relative change of all outputs by ``e`` changes the loss by ``e * size`` at most.
    """

    loss: float
    gradient: Tensor
    size: float

    def is_near(self, other: _Value, rounding: float) -> bool:
        """Whether they differ by rounding alone, relative to this one."""
        apart = abs(self.loss - other.loss) <= rounding * max(1.0, abs(self.loss), self.size)
        return apart and self.gradient_error(other) <= rounding

    def gradient_error(self, other: _Value) -> float:
        """The length of the difference of the gradients, relative to this one's; NaN for NaN."""
        own = self.gradient.float()
        return float((own - other.gradient).norm()) / max(float(own.norm()), 1e-30)

    def is_same(self, other: _Value) -> bool:
        """Whether they have the same bits."""
        return self.loss == other.loss and torch.equal(self.gradient, other.gradient)

    @property
    def is_finite(self) -> bool:
        """Whether all of it is."""
        return math.isfinite(self.loss) and bool(self.gradient.isfinite().all())


class LossCheck:
    """The comparisons for one loss.

    Args:
        loss_fn: a loss, or a metric, of whose values those with a gradient are compared.
        name: for errors.
    """

    def __init__(self, loss_fn: Callable[..., Any], name: str = "loss_fn") -> None:
        self._loss_fn = loss_fn
        self._name = name
        self._parts: list[_Part] = []
        self._to_come = 0
        self._batches = 0
        self._bounds: list[tuple[float, float]] = []  # of each tensor of all targets
        self._marks = _MARKS
        self._undecided = False  # the last comparison said nothing, and the next batch may
        self._over = is_known(loss_fn)

    def is_of(self, loss_fn: Callable[..., Any]) -> bool:
        """Whether it is about this loss."""
        return self._loss_fn is loss_fn

    def begin(self, microbatches: int, target: Any) -> Callable[[Tensor, Any], None] | None:
        """A function to call with each microbatch's output and target, before its loss.

        Its last call compares. It raises ValueError where the step would not train by the loss of
        its batch.

        Args:
            microbatches: of the batch.
            target: of the batch.

        Returns:
            The function; None where nothing is to be compared.
        """
        if self._over or microbatches < 2:
            return None
        self._parts, self._to_come = [], microbatches
        self._batches += 1
        marks = self._widened(target) and self._marks > 0
        if not self._batches & (self._batches - 1) or self._undecided:
            return self._take
        self._marks -= marks
        return self._take if marks else None

    def _widened(self, target: Any) -> bool:
        """Whether targets have an entry below or above all before them, which are then noted."""
        tensors: list[Tensor] = []
        map_tensors(target, lambda t: tensors.append(t) if t.numel() else None)
        before = self._bounds
        if len(before) != len(tensors):
            before = [(math.inf, -math.inf)] * len(tensors)
        self._bounds = []
        for (low, high), each in zip(before, tensors, strict=True):
            least, most = torch.aminmax(torch.view_as_real(each) if each.is_complex() else each)
            self._bounds.append((min(low, float(least)), max(high, float(most))))
        return self._bounds != before

    def _take(self, output: Tensor, target: Any) -> None:
        self._to_come -= 1
        tensors: list[Tensor] = []
        map_tensors(target, tensors.append)
        sizes = {len(t) if t.dim() else 0 for t in tensors}
        rows = max(sizes, default=0)
        joined = is_of_tensors(target)
        if not joined or len(sizes) != 1 or not rows or not output.dim() or len(output) % rows:
            self._over = True  # rows are not dim 0, so that nothing can be put together
        if self._over:
            return
        left = _ELEMENTS - sum(part.output.numel() for part in self._parts)
        kept = min(rows, max(left * rows // max(output.numel(), 1), len(self._parts) < 2))
        if kept > 0:
            with torch.inference_mode(False):
                of_output = output.detach()[: kept * (len(output) // rows)].clone()
                of_target = map_tensors(target, lambda t: t[:kept].clone())
            self._parts.append(_Part(of_output, of_target, kept))
        if not self._to_come:
            parts, self._parts = self._parts, []
            self._compare(parts)

    def _compare(self, parts: Sequence[_Part]) -> None:
        if any(isinstance(each, _BatchNorm) and each.training for each in reached(self._loss_fn)):
            self._over = True  # it sees microbatches, as in a model
            return
        with undone(self._loss_fn, parts[0].output.device):
            try:
                unequal = self._unequal(parts)
            except Exception as error:  # of a function of the user's, whatever it does
                self._over = True
                warnings.warn(
                    f"{self._name} takes a microbatch, but failed for rows of {len(parts)} of them "
                    f"together ({type(error).__name__}: {error}), so that nobody knows whether the "
                    "mean over microbatches is its value for the batch",
                    stacklevel=2,
                )
                return
        if unequal is not None:
            raise ValueError(unequal)

    def _unequal(self, parts: Sequence[_Part]) -> str | None:
        """The message, if the loss of all parts is another than the mean that a step has of them.

        A loss that draws or remembers has another value when it is called again, and one that goes
        by the order of its rows has another in the other order: of these nothing is said.
        """
        summed = is_sum(self._loss_fn)
        weights = [1.0 if summed else self._weight(part) for part in parts]
        total = 1.0 if summed else sum(weights)
        if not total:
            return None
        rows = sum(part.rows for part in parts)
        target = join([part.target for part in parts])
        whole = _Part(torch.cat([part.output for part in parts]), target, rows)
        together = self._values(whole, total)
        apart = [
            self._values(part, weight) if weight else {}
            for part, weight in zip(parts, weights, strict=True)
        ]
        self._undecided = not all(value.is_finite for value in together.values())
        if self._undecided:
            return None  # overflowed, or nothing counts: the next batch may tell
        rounding = _rounding(whole.output)
        for name, value in together.items():
            nothing = [_Value(0.0, torch.zeros_like(part.output), 0.0) for part in parts]
            values = [found.get(name, zero) for found, zero in zip(apart, nothing, strict=True)]
            mean = _Value(
                sum(each.loss * w for each, w in zip(values, weights, strict=True)) / total,
                torch.cat([each.gradient for each in values]),
                value.size,
            )
            if value.is_near(mean, rounding):
                continue
            again = self._values(whole, total).get(name)
            turned = self._values(whole.turned(), total).get(name)
            if again is None or turned is None or not value.is_same(again):
                continue
            turned = turned._replace(gradient=_turned(turned.gradient, rows))
            if value.is_near(turned, rounding):
                return self._message(name, value, mean, rows, len(parts), summed)
        return None

    def _weight(self, part: _Part) -> float:
        return num_terms(self._loss_fn, part.target, part.rows)

    def _values(self, part: _Part, weight: float) -> dict[str, _Value]:
        """Values of the function that have a gradient, by name."""
        found: dict[str, _Value] = {}
        if not part.output.is_floating_point():
            return found
        with torch.inference_mode(False), torch.enable_grad():
            leaf = part.output.clone().requires_grad_()
            result = self._loss_fn(leaf.clone(), map_tensors(part.target, Tensor.clone))
            values = result if isinstance(result, Mapping) else {"": result}
            for name, value in values.items():
                if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                    continue
                # Weighted before it is differentiated, as fp16 could not hold its parts.
                (gradient,) = torch.autograd.grad(
                    value.reshape(()) * weight,
                    leaf,
                    retain_graph=len(values) > 1,
                    allow_unused=True,
                    materialize_grads=True,
                )
                size = float((gradient.float() * part.output).abs().sum()) / weight
                found[name] = _Value(float(value.detach()), gradient, size)
        return found

    def _message(
        self, name: str, value: _Value, mean: _Value, rows: int, microbatches: int, summed: bool
    ) -> str:
        fn = self._name
        what = f"{fn}'s {name!r}" if name else fn
        found = "sum" if summed else "mean"
        return (
            f"{what} is {value.loss:.6g} for {rows} rows of {microbatches} microbatches together, "
            f"but the {found} over microbatches is {mean.loss:.6g}, and their gradients differ by "
            f"{value.gradient_error(mean):.1%}: the plain model would train otherwise. Say over "
            f"how many terms {fn} is the mean, by {fn}.num_terms = lambda target: ..., such as "
            "int((target != -100).sum()), or the sum of weights (rows by default), or "
            f"{fn}.reduction = 'sum' of a sum. A loss that holds rows against each other needs "
            "chunks=1. In place of a loss that the model computes give loss_fn="
        )


def _turned(x: Tensor, rows: int) -> Tensor:
    """``x`` with its rows in the other order; each may be several along dim 0."""
    return x.reshape(rows, -1).flip(0).reshape(x.shape)


def _rounding(output: Tensor) -> float:
    """The relative difference that is taken for rounding, by the bits that a loss computes with."""
    kind = output.device.type
    dtypes = [output.dtype]
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    if kind != "cpu":
        eps = max(eps, 2.0**-10)  # of TF32
    return max(1e-4, 8.0 * eps)
