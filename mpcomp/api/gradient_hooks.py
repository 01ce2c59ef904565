"""Hooks that run when a parameter has its gradient: once a step, when the gradient is whole.

An optimizer that steps in backward (torchtune's, GaLore's by layer) is such a hook, and so is a log
of norms. In a plain step a parameter has its whole gradient after one backward pass. Here it has it
after all microbatches, the exchange of tied weights and the mean over replicas, while torch would
run the hook for each microbatch::

    microbatch        0        1        2        3     ties, replicas
    .grad             g0    g0 + g1     ...      ...         g
    torch            hook     hook     hook     hook
    here                                                    hook
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["has_hooks", "hooks_once"]


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
        if has_hooks(parameter):
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


def has_hooks(parameter: nn.Parameter) -> bool:
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
