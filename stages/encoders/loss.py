"""The loss of a head of transformers, as the model computes it from its labels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.language_models.line import evaluation

_IGNORED = -100
#: Of a head that answers questions: where the answer begins, and where it ends.
_SPAN = ("start_positions", "end_positions")


class HeadLoss:
    """The loss of a masked language model, a classifier of tokens, rows or images, or an answer.

    Args:
        config: of the model, whose ``problem_type`` counts as in transformers.
    """

    def __init__(self, config: Any) -> None:
        self._problem: str | None = getattr(config, "problem_type", None)

    @staticmethod
    def names(model: nn.Module) -> tuple[str, ...] | None:
        """Names in a batch of what a model computes its loss from; None if it computes none."""
        parameters = inspect.signature(model.forward).parameters
        if "labels" in parameters:
            return ("labels",)
        return _SPAN if set(_SPAN) <= parameters.keys() else None

    def num_terms(self, target: Any) -> int:
        """Over how many terms the loss is the mean: labels that count, or else rows."""
        if isinstance(target, Mapping):
            return len(target[_SPAN[0]])
        if target.is_floating_point() or self._problem == "regression":
            return len(target)
        return int((target != _IGNORED).sum())

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        """The loss, 0-d.

        Args:
            output: logits [b, n], [b, s, n], or [b, s, 2] of an answer.
            target: classes [b] or [b, s], of which -100 does not count; numbers [b] or [b, n]; or
                a mapping with ``start_positions`` and ``end_positions``, [b] each.

        Raises:
            ValueError: an answer lies outside its text.
        """
        if isinstance(target, Mapping):
            return self._of_answers(output, *(target[name] for name in _SPAN))
        if output.dim() == 2:
            problem = self._problem or _problem_of(output, target)
            if problem == "regression":
                numbers = output.reshape(target.shape)
                return F.mse_loss(numbers, target.to(numbers.dtype))
            if problem == "multi_label_classification":
                return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))
        classes = output.float().reshape(-1, output.shape[-1])
        return F.cross_entropy(classes, target.reshape(-1), ignore_index=_IGNORED)

    def _of_answers(self, output: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        length = output.shape[1]
        if bool(((starts >= length) | (ends >= length)).any()):
            raise ValueError(
                f"an answer lies outside its text of {length} tokens: the mean over the others "
                "is none over rows. Let both positions be 0, the first token, where there is none"
            )
        begin, end = output.unbind(-1)
        return (F.cross_entropy(begin, starts) + F.cross_entropy(end, ends)) / 2

    def check(self, model: Any, batch: Mapping[str, Tensor], output: Tensor) -> None:
        """Raise ValueError if the loss of a model is another than this.

        Args:
            model: of transformers.
            batch: a few inputs.
            output: of the model for these.
        """
        target, problem = self._labels(model, output), getattr(model.config, "problem_type", None)
        given = target if isinstance(target, Mapping) else {"labels": target}
        try:
            with evaluation(model):
                own = model(**batch, **given, return_dict=True).loss
        finally:
            if hasattr(model.config, "problem_type"):
                model.config.problem_type = problem  # which the first labels decide on
        ours = self(output, target)
        if own is None or not torch.allclose(own.to(ours), ours, rtol=1e-2 * _coarse(output)):
            raise ValueError(
                f"the loss of {type(model).__name__} is {own if own is None else float(own):.6g} "
                f"for a few labels, and {float(ours):.6g} computed from its output and them; pass "
                "loss_fn=f, a function f(output, labels) that computes it"
            )

    def _labels(self, model: Any, output: Tensor) -> Any:
        """Targets of a few rows that the model's own loss can be computed from."""
        rows, device = len(output), output.device
        if self.names(model) == _SPAN:
            return {name: torch.arange(rows, device=device) for name in _SPAN}
        if output.dim() == 3:
            labels = torch.arange(output[..., 0].numel(), device=device) % output.shape[-1]
            labels[0] = _IGNORED
            return labels.reshape(output.shape[:2])
        numbers = torch.linspace(0, 1, output.numel(), device=device, dtype=output.dtype)
        problem = self._problem or ("regression" if output.shape[-1] == 1 else None)
        if problem == "regression":
            return numbers.reshape(output.shape) if output.shape[-1] > 1 else numbers
        if problem == "multi_label_classification":
            return numbers.reshape(output.shape)
        return torch.arange(rows, device=device) % output.shape[-1]


def _problem_of(output: Tensor, target: Tensor) -> str:
    """Kind of these labels, as transformers decides from the first of them."""
    if output.shape[-1] == 1:
        return "regression"
    return "multi_label_classification" if target.is_floating_point() else "single_label"


def _coarse(output: Tensor) -> float:
    return 1.0 if output.dtype in (torch.bfloat16, torch.float16) else 1e-3
