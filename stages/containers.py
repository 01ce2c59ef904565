"""Containers of a cut model: stages have what is in them, and do not call them.

A change of one after the cut changes nothing that trains, so it is found and said.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether something was registered to run whenever `module` is called."""
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


class Containers:
    """Modules of a model that no stage calls, as they were when it was cut."""

    def __init__(self) -> None:
        self._then: list[tuple[str, nn.Module, dict[str, nn.Module]]] = []
        self._has_warned = False

    def note(self, model: nn.Module, stages: Iterable[nn.Module]) -> None:
        """Notes the containers of `model`, which was cut into `stages`."""
        called = {id(module) for stage in stages for module in stage.modules()}
        self._then = [
            (name, module, _children(module))
            for name, module in model.named_modules()
            if id(module) not in called
        ]

    def check(self) -> None:
        """Raise ValueError if one has other children than it had; warn once if one has hooks."""
        for name, module, children in self._then:
            now = _children(module)
            if now != children:
                other = next(
                    child
                    for child in (*children, *now)
                    if children.get(child) is not now.get(child)
                )
                path = f"{name}.{other}" if name else other
                before, after = (
                    "nothing" if each is None else type(each).__name__
                    for each in (children.get(other), now.get(other))
                )
                raise ValueError(
                    f"{path} of the model was {before} when it was cut, and is {after} now. The "
                    "pipeline trains and runs what it was cut from: change the model first, and "
                    "call mpcomp.pipeline then"
                )
            if has_hooks(module) and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{name or 'the model'} ({type(module).__name__}) has a hook that was "
                    "registered after the cut. No stage calls this module, so the hook never runs: "
                    "register it on a module inside of it, or before the cut",
                    stacklevel=2,
                )


def _children(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module._modules.items() if child is not None}
