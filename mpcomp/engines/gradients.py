"""Whoever acts on a step's gradients: hooks, a loss scaler, updates within the step.

Hooks run when a parameter has its gradient: once a step, when the gradient is whole. An optimizer
that steps in backward (torchtune's, GaLore's by layer) is such a hook, and so is a log of norms. In
a plain step a parameter has its whole gradient after one backward pass. Here it has it after all
microbatches, the exchange of tied weights and the mean over replicas, while torch would run the
hook for each microbatch::

    microbatch        0        1        2        3     ties, replicas
    .grad             g0    g0 + g1     ...      ...         g
    torch            hook     hook     hook     hook
    here                                                    hook

Loss scalers of several ranks skip the same steps, each looking at its own gradients. Updates within
a step change weights before the gradient is whole, so they go with neither. An optimizer has the
gradients of one rank's stages alone, as has torch's clipping: see `OptimizerWatch`.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpcomp.core.dtensor import local
from mpcomp.engines.base import Engine
from mpcomp.engines.updates import Updates, check_stashable
from mpcomp.links.tied_weights import Tie

__all__ = [
    "BY_ALL_GRADIENTS",
    "OptimizerWatch",
    "check_without_gradients",
    "gradients_overflowed",
    "hooks_once",
    "overflow_gradients",
    "updates_within",
]


@contextmanager
def hooks_once(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[None]:
    """Within this context no such hook runs; at its end each does, unless an error ends it.

    Args:
        named_parameters: of this rank; hooks of those without a gradient do not run.

    Raises:
        ValueError: torch itself has put an optimizer into backward, where it cannot be held back.
    """
    hooked = []
    for name, parameter in named_parameters:
        _refuse_optimizers(name, parameter)
        if _has_hooks(parameter):
            hooked.append((parameter, _hooks_of(parameter)))
    for parameter, _ in hooked:
        _set_hooks(parameter, {})  # None would leave torch with those it has
    try:
        yield
    finally:
        for parameter, hooks in hooked:
            _set_hooks(parameter, hooks)
    with torch.no_grad():  # as backward does
        for parameter, hooks in hooked:
            for hook in list(hooks.values()) if parameter.grad is not None else ():
                hook(parameter)


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether something is to run when the parameter has its gradient."""
    return bool(_hooks_of(parameter))


def _refuse_optimizers(name: str, parameter: nn.Parameter) -> None:
    optimizers = getattr(parameter, "_in_backward_optimizers", ())
    if optimizers:
        raise ValueError(
            f"{name} has an optimizer that steps in backward ({type(optimizers[0]).__name__}, by "
            "_apply_optimizer_in_backward): it would step once a microbatch, before the gradient "
            "is whole. Make an optimizer over pipe.parameters() and step after forward_backward. "
            "Or step in a hook of register_post_accumulate_grad_hook: it runs once a step here"
        )


def _hooks_of(parameter: nn.Parameter) -> dict[int, Any]:
    return parameter._post_accumulate_grad_hooks or {}


def _set_hooks(parameter: nn.Parameter, hooks: dict[int, Any]) -> None:
    parameter._post_accumulate_grad_hooks = hooks


# -- loss scalers ----------------------------------------------------------------------------------


def gradients_overflowed(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether one of the gradients here is not finite."""
    grads = [_values(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return False
    largest = torch.nn.utils.get_total_norm(grads, norm_type=math.inf)
    return not bool(largest.isfinite())


def overflow_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Makes this rank's scaler skip the step, as it must where another's gradients overflowed."""
    for parameter in parameters:
        if parameter.grad is not None:
            _values(parameter.grad).fill_(math.inf)


def _values(grad: Tensor) -> Tensor:
    """The numbers of a gradient that are here, which is dense, sparse or sharded."""
    return grad._values() if grad.is_sparse else local(grad)


def check_without_gradients(scaler: torch.amp.GradScaler, *, skipped: bool) -> None:
    """Gives this step's check for Inf and NaN a result where this rank has nothing to train.

    torch's ``step`` and ``update`` raise where an optimizer has no gradients, as that of a rank
    whose stages are all frozen. The check is done in `_unscale_grads_`, which torch's scaler for
    sharded models overrides likewise; what it finds in gradients stays as it is.

    Args:
        scaler: of this rank.
        skipped: whether the other ranks' scalers skip this step.
    """
    scaler._unscale_grads_ = partial(_checked, scaler, skipped)  # type: ignore[method-assign]


def _checked(
    scaler: torch.amp.GradScaler,
    skipped: bool,
    optimizer: torch.optim.Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    unscale: Any = type(scaler)._unscale_grads_
    found: dict[torch.device, Tensor] = unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    return found or {found_inf.device: found_inf.fill_(float(skipped))}


# -- updates within a step -------------------------------------------------------------------------


def updates_within(
    update: Callable[[], object] | None,
    count: int,
    *,
    chunks: int,
    scaler: torch.amp.GradScaler | None,
    ties: Sequence[Tie],
    stages: Sequence[nn.Module],
    engine: Engine,
) -> Updates | None:
    """The updates of a call; None where its gradients are left to the caller.

    Args:
        update: changes the weights of this rank.
        count: how often within a step.
        chunks: microbatches of a step.
        scaler: of the losses, if any.
        ties: parameters that two stages have copies of.
        stages: of this rank.
        engine: that is to make them.

    Raises:
        ValueError: they cannot be made.
    """
    if update is None:
        if count != 1:
            raise ValueError(f"updates={count} without update: pass the function that makes one")
        return None
    if count < 1 or chunks % count:
        raise ValueError(
            f"updates={count} with chunks={chunks}: each update has as many microbatches as the "
            "others; pass a divisor of chunks"
        )
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            "updates within a step, and a loss scaler, which skips steps as a whole: train in "
            "bf16, which needs no scaler, or leave update out"
        )
    tied = [tie.name for tie in ties if tie.trains]
    if tied:
        raise ValueError(
            f"updates within a step, and two stages have copies of {tied[0]}, which exchange their "
            "gradients at the end of it: let one rank have both uses (ties='together', which says "
            "why where it cannot), untie or freeze it, or leave update out"
        )
    hooked = [n for stage in stages for n, p in stage.named_parameters() if _has_hooks(p)]
    if hooked:
        raise ValueError(
            f"updates within a step, and {hooked[0]} has a hook that waits for the step's whole "
            "gradient (register_post_accumulate_grad_hook): do in update what it does, or leave "
            "update out"
        )
    check_stashable(stages)
    engine.check_updates()
    return Updates(update, count, chunks // count)


#: Classes of optimizers whose step goes by a sum over all gradients: of pytorch_optimizer, and of
#: the packages prodigyopt and dadaptation.
BY_ALL_GRADIENTS = {
    *("ASGD", "AdaGC", "AdamS", "Adai", "AliG", "AvaGrad", "Prodigy"),
    *("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"),
    *("BSAM", "FriendlySAM", "GSAM", "LookSAM", "SAM", "WSAM"),
}


class OptimizerWatch:
    """Looks at what optimizers are about to do with the gradients of one rank of several.

    It warns once of gradients that were clipped by this rank's norm. torch's ``clip_grad_norm_``
    multiplies each in place, once, so its version is one more when the optimizer steps than when
    the training step ended. ``unscale_`` of a loss scaler leaves versions alone, and
    ``clip_grad_value_`` takes two operations.

    Args:
        model: has the parameters of this rank.
        pp_size: ranks of a pipeline, two or more.
    """

    def __init__(self, model: nn.Module, pp_size: int) -> None:
        self._model = model
        self._pp_size = pp_size
        self._versions: dict[nn.Parameter, int] = {}
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._warned = False
        watch = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (found := watch()) is not None:
                found._look(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def note(self) -> None:
        """Notes the gradients of this rank as those that an optimizer may have."""
        of = self._model.parameters()
        self._versions = {p: p.grad._version for p in of if p.grad is not None}

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            if not {*parameters}.isdisjoint(self._model.parameters()):
                self._check(optimizer)
        changes = {
            parameter.grad._version - self._versions.pop(parameter)
            for parameter in parameters
            if parameter in self._versions and parameter.grad is not None
        }
        if changes == {1} and not self._warned:
            self._warned = True
            warnings.warn(
                "every gradient of this rank was changed in place between forward_backward and "
                "optimizer.step. torch.nn.utils.clip_grad_norm_ does so, and takes the norm of "
                "this rank's stages alone, so each rank clips by another: use "
                "mpcomp.clip_grad_norm_(pipe, max_norm). A change that is the same on all ranks, "
                "such as a division, does no harm",
                stacklevel=5,
            )

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer that several ranks cannot step by, warns of one that differs."""
        name = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            self._seen.discard(optimizer)
            raise ValueError(
                f"LBFGS on {self._pp_size} ranks: each would search by the gradients of its own "
                "stages alone, and call its closure as often as it likes; train in one process, or "
                "by an optimizer that goes by each gradient, such as Adam"
            )
        clips = optimizer.defaults.get("max_grad_norm") and getattr(optimizer, "pre_norm", True)
        of_torch = type(optimizer).__module__.startswith("torch.")  # whose ASGD is another
        if clips or (name in BY_ALL_GRADIENTS and not of_torch):
            warnings.warn(
                f"{name} on {self._pp_size} ranks: it goes by a sum over all gradients, and each "
                "rank has those of its own stages, so it trains otherwise than in one process. "
                + ("max_grad_norm=0 turns that off" if clips else "AdamW goes by each gradient"),
                stacklevel=6,
            )
