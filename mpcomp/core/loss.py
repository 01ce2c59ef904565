"""The loss of one step: each microbatch's share of it, and their sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "TARGETS",
    "CausalLMLoss",
    "LossFn",
    "StepLoss",
    "is_known",
    "is_sum",
    "num_terms",
    "one_number",
    "pair_of",
    "with_target",
]

#: Names in a batch of transformers of what a loss is computed from.
TARGETS = ("labels", "start_positions", "end_positions")

LossFn = Callable[[Tensor, Any], Tensor]


class CausalLMLoss:
    """The mean cross-entropy of the next token, in nats, over all tokens that have a label.

    As a language model of transformers computes it from ``labels``: position t predicts label
    t + 1, in fp32. Its exponential is the perplexity.
    """

    #: Labels of positions that do not count, such as padding.
    ignore_index = -100

    def num_terms(self, labels: Tensor) -> int:
        """Number of tokens that the mean is over; ``labels`` are [b, s].

        Raises:
            ValueError: they are not.
        """
        _check_labels(labels)
        return int((labels[:, 1:] != self.ignore_index).sum())

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss, 0-d, of logits [b, s, vocabulary] for labels [b, s]; 0 without a label.

        Raises:
            ValueError: the labels are others.
        """
        _check_labels(labels)
        if labels.shape != logits.shape[:2]:
            raise ValueError(
                f"labels are {_described(labels)}, but the logits {list(logits.shape)}: expected "
                "one label for each token, -100 where none counts"
            )
        following = F.pad(labels, (0, 1), value=self.ignore_index)[:, 1:].reshape(-1)
        flat = logits.float().view(-1, logits.shape[-1])
        mean = F.cross_entropy(flat, following, ignore_index=self.ignore_index)
        # A mean over nothing is NaN. Not asked on the host, which would wait for an accelerator.
        return torch.where((following != self.ignore_index).any(), mean, 0.0)


def num_terms(loss_fn: Callable[..., Any], target: Any, rows: int) -> float:
    """Over how many terms ``loss_fn(output, target)`` is the mean, or over which sum of weights.

    Args:
        loss_fn: what its ``num_terms(target)`` says, if it has that; of a cross-entropy the classes
            that are not ignored, or the sum of their weights; else the rows.
        target: of a batch or microbatch.
        rows: of that batch.
    """
    inner, _ = _unwrapped(loss_fn)
    own = getattr(loss_fn, "num_terms", None) or getattr(inner, "num_terms", None)
    if own is not None:
        count = own(target)
        return float(count.item() if isinstance(count, Tensor) else count)
    entropy = _entropy_of(loss_fn)
    if entropy is None or not isinstance(target, Tensor) or target.is_floating_point():
        return rows
    ignored, weights = entropy
    counted = target != ignored
    if weights is None:
        return int(counted.sum())
    return float(weights.detach().to(target.device, torch.float64)[target[counted]].sum())


def is_sum(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss is a sum over its terms, by its ``reduction``, and not a mean."""
    inner, options = _unwrapped(loss_fn)
    reduction = options.get("reduction", getattr(inner, "reduction", "mean"))
    return bool(getattr(loss_fn, "reduction", reduction) == "sum")


def is_known(loss_fn: Callable[..., Any]) -> bool:
    """Whether `num_terms` knows a loss, so that nothing is left to ask about its mean."""
    if hasattr(loss_fn, "num_terms"):
        return type(loss_fn) is CausalLMLoss
    inner, options = _unwrapped(loss_fn)
    known = inner in _ENTROPIES or type(inner) in (nn.CrossEntropyLoss, nn.NLLLoss)
    return known and options.keys() <= {"weight", "ignore_index", "reduction", "label_smoothing"}


_ENTROPIES = (F.cross_entropy, F.nll_loss)


def _unwrapped(loss_fn: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that a `functools.partial` calls, and its options."""
    if isinstance(loss_fn, functools.partial) and not loss_fn.args:
        inner, options = _unwrapped(loss_fn.func)
        return inner, {**options, **loss_fn.keywords}
    return loss_fn, {}


def _entropy_of(loss_fn: Callable[..., Any]) -> tuple[int, Tensor | None] | None:
    """The class that a cross-entropy ignores, and weights of classes; None for another loss."""
    inner, options = _unwrapped(loss_fn)
    ignored, weights = -100, None
    if isinstance(inner, nn.CrossEntropyLoss | nn.NLLLoss):
        ignored, weights = inner.ignore_index, inner.weight
    elif inner not in _ENTROPIES:
        return None
    return options.get("ignore_index", ignored), options.get("weight", weights)


def _check_labels(labels: object) -> None:
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
        raise ValueError(f"labels are {_described(labels)}: expected whole numbers [b, s]")


def _described(labels: object) -> str:
    if isinstance(labels, Tensor):
        return f"{list(labels.shape)} {labels.dtype}"
    return f"a {type(labels).__name__}"


def pair_of(item: object, caller: str = "evaluate") -> tuple[Any, Any]:
    """Batch and target that a loader yielded; no target of a mapping, which has its labels.

    Raises:
        TypeError: it yielded something else; ``caller`` is named.
    """
    if isinstance(item, Mapping):
        return item, None
    if not isinstance(item, Sequence) or isinstance(item, str) or len(item) < 2:
        shape = f" of shape {list(item.shape)}" if isinstance(item, Tensor) else ""
        if isinstance(item, Sequence) and not isinstance(item, str):
            shape = f" of length {len(item)}"
        raise TypeError(
            f"{caller}: the loader yielded a {type(item).__name__}{shape}: expected pairs (batch, "
            "target), or mappings with 'labels'. For one batch pass [(x, y)]; for outputs alone "
            "call pipe(x) under torch.no_grad()"
        )
    return item[0], item[1]


def with_target(batch: Any, target: Any) -> tuple[Any, Any]:
    """Batch and target, where the target may be the batch's ``labels``, as transformers has it.

    Raises:
        ValueError: there is none.
    """
    if target is not None:
        return batch, target
    found = [name for name in TARGETS if name in batch] if isinstance(batch, Mapping) else []
    if not found:
        raise ValueError("there is no target: pass one, or a mapping with 'labels' as the batch")
    rest = {name: value for name, value in batch.items() if name not in found}
    if found == ["labels"]:
        return rest, batch["labels"]
    return rest, {name: batch[name] for name in found}  # of an answer


class StepLoss:
    """Called with a microbatch's output and target, gives what is to be differentiated.

    A mean is weighted by the microbatch's share of the terms that it is over, a sum is not. The
    mean over nothing, which is NaN, counts as 0. Nothing is rescaled after backward.

    Args:
        loss_fn: ``loss_fn(output, target)``.
        terms: of each microbatch, see `num_terms`.
        scaler: loss scaler, if there is one.
        weight: on what is differentiated; not on ``total``.
        updates: of weights within the step: each is by the mean over its own microbatches, which
            are as many for each.
        keeps_outputs: whether outputs are kept.
        watch: called with each output and its target, before its loss.
        check: called with each loss, with its graph, and the node of its output there.

    Attributes:
        total: sum of the weighted losses so far, detached and unscaled.
        outputs: those of microbatches, detached, by number, if they are kept.
        terms: number of terms of this replica, or the sum of their weights.
        factor: on every loss. Replicas average their gradients, so one that has more terms than
            another, or a sum, must weigh more for the average to be right.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        terms: Sequence[float],
        scaler: torch.amp.GradScaler | None,
        *,
        weight: float = 1.0,
        updates: int = 1,
        keeps_outputs: bool = False,
        watch: Callable[[Tensor, Any], None] | None = None,
        check: Callable[[Tensor, Any], None] | None = None,
    ) -> None:
        self._loss_fn = loss_fn
        self._terms = terms
        self._scaler = scaler
        self._weight = weight
        self._keeps_outputs = keeps_outputs
        self._watch = watch
        self._check = check
        self.outputs: dict[int, Tensor] = {}
        self._summed = is_sum(loss_fn)
        self.terms = sum(terms)
        of_each = len(terms) // updates
        sums = [sum(terms[i : i + of_each]) for i in range(0, len(terms), of_each)]
        #: Of the update that a microbatch belongs to.
        self._terms_of_update = [sums[i // of_each] for i in range(len(terms))]
        self.total: Tensor | None = None
        self.factor = 1.0

    def share_with(self, all_terms: float, replicas: int) -> None:
        """Sets the factor for this many terms over all replicas."""
        share = 1.0 if self._summed else self.terms / (all_terms or 1)
        self.factor = float(replicas * share)

    def __call__(self, output: Tensor, target: Any, microbatch: int) -> Tensor:
        """The weighted and scaled loss, 0-d with its graph.

        Raises:
            TypeError: the loss function returns no tensor.
            ValueError: more than one number, or one without a gradient.
        """
        terms = self._terms[microbatch]
        if self._keeps_outputs:
            self.outputs[microbatch] = output.detach()
        made_by = output.grad_fn
        if self._watch is not None:
            self._watch(output, target)
        if self._summed or terms:
            loss = one_number(self._loss_fn(output, target))
            if self._check is not None:
                self._check(loss, made_by)
            if not self._summed:
                loss = loss * (terms / self._terms_of_update[microbatch])
        else:
            loss = _nothing(output)
        if self.factor != 1:
            loss = loss * self.factor
        part = loss.detach()
        if self._watch is not None and self._scaler is None and not part.isfinite():
            loss = _nothing(output)  # the watch may say why, before a link says that it is NaN
        if terms and not self._summed and self._terms_of_update[microbatch] != self.terms:
            part = part * (self._terms_of_update[microbatch] / self.terms)
        self.total = part if self.total is None else self.total + part
        if self._weight != 1:
            loss = loss * self._weight
        return self._scaler.scale(loss) if self._scaler is not None else loss


def _nothing(output: Tensor) -> Tensor:
    """A loss of 0; of the output, as each microbatch goes backward."""
    return (output[:0] * 0).sum()


def one_number(loss: object) -> Tensor:
    """The value of a loss function, 0-d, if a step can be trained by it."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn returned a {type(loss).__name__}: expected a 0-d tensor, the mean over a "
            "microbatch; return that alone, without .item(), and other figures from the metric of "
            "pipe.evaluate"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn returned a tensor of shape {list(loss.shape)}: expected one number, the mean "
            "over a microbatch; leave out reduction='none', or end with .mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient, so nothing would be trained: loss_fn, or the model's last "
            "stage, detaches it (.detach(), .data, torch.no_grad(), argmax) or does not use the "
            "output, or all parameters are frozen; return a loss that is computed from the output"
        )
    return loss.reshape(())
