"""Stages as one module that speaks the original model's names.

So an optimizer, a checkpoint or a scheduler sees the model, not how it was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

import stages as staging
from mpcomp.comm.mesh import Mesh
from mpcomp.core.dtensor import distribute_like

__all__ = ["OriginalNames"]


class OriginalNames(nn.Module):
    """Holds stages; parameters, buffers and state have the names of the uncut model.

    Args:
        stages: modules whose own names are already those of the model.
        mesh: the ranks.
        elsewhere: the stages that other ranks have. Their tensors are not this module's, but their
            mode and dtypes follow it, since what crosses the cuts depends on them.
        with_loss: has what the last stage holds of the loss, too, named ``loss_fn.*``. An
            optimizer is given that by the loss's own ``parameters()``, as beside a plain model.
    """

    def __init__(
        self,
        stages: Iterable[staging.Stage],
        mesh: Mesh,
        elsewhere: Iterable[staging.Stage] = (),
        *,
        with_loss: bool = False,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.mesh = mesh
        self._with_loss = with_loss
        self._elsewhere = tuple(elsewhere)  # a tuple, so that torch does not register them

    def train(self, mode: bool = True) -> OriginalNames:
        """Training or evaluation mode, of all stages."""
        for stage in self._elsewhere:
            stage.train(mode)
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OriginalNames:
        def same_dtype(x: Tensor) -> Tensor:
            return x.to(fn(torch.empty(0, dtype=x.dtype)).dtype)

        for stage in self._elsewhere:
            stage._apply(same_dtype, recurse)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The original model's ``state_dict``; sharded parameters are gathered, by all replicas."""
        state = {} if destination is None else destination
        for stage in self._all_stages():
            own = self._state_of(stage, keep_vars)
            for name, x in own.items():
                whole = x if keep_vars else self.mesh.whole(x, "parameters of other replicas")
                state[prefix + name] = whole
            if stage.together:  # of a weight that two stages use the first one's is what counts
                for (_, name), (_, again) in staging.ties([stage]):
                    if again in own:
                        state[prefix + again] = state[prefix + name]
        return state

    def _all_stages(self) -> Iterator[staging.Stage]:
        for stage in self.stages:
            assert isinstance(stage, staging.Stage)
            yield stage

    def _has(self, stage: staging.Stage, name: str) -> bool:
        return self._with_loss or not stage.is_of_loss(name)

    def _state_of(self, stage: staging.Stage, keep_vars: bool = False) -> dict[str, Tensor]:
        state = stage.state_dict(keep_vars=keep_vars)
        return {name: x for name, x in state.items() if self._has(stage, name)}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the original model's ``state_dict``."""
        here = {key: None for stage in self._all_stages() for key in self._state_of(stage)}
        missing = [key for key in here if key not in state_dict]
        elsewhere = {key for stage in self._elsewhere for key in self._state_of(stage)}
        unexpected = [key for key in state_dict if key not in here and key not in elsewhere]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"state_dict does not fit the model: missing {missing}, unexpected {unexpected}"
            )
        for stage in self._all_stages():
            own = self._state_of(stage)
            part = {k: distribute_like(state_dict[k], x) for k, x in own.items() if k in state_dict}
            stage.load_state_dict(part, strict=False, assign=assign)
        return _IncompatibleKeys(missing, unexpected)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of all stages under the original model's names."""
        for stage in self._all_stages():
            for name, parameter in stage.named_parameters("", recurse, remove_duplicate):
                if self._has(stage, name):
                    yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers of all stages under the original model's names."""
        for stage in self._all_stages():
            for name, buffer in stage.named_buffers("", recurse, remove_duplicate):
                if self._has(stage, name):
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def to(self, *args: Any, **kwargs: Any) -> OriginalNames:
        """Changes the dtype. Devices are the pipeline's: ``pipeline(..., devices=...)``.

        A device is accepted where all is there already, as tools move every model that they get.

        Raises:
            TypeError: a device on which not all stages of this rank are.
        """
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is None:
            return super().to(*args, **kwargs)
        elsewhere = {str(t.device) for t in (*self.parameters(), *self.buffers())}
        elsewhere = {name for name in elsewhere if not _same_device(torch.device(name), device)}
        if elsewhere:
            raise TypeError(
                f"to({str(device)!r}), but stages are on {', '.join(sorted(elsewhere))}: they live "
                "on the devices given to mpcomp.pipeline(..., devices=...), and only the dtype can "
                "be changed here"
            )
        if dtype is not None:
            super().to(dtype)
        if memory_format is not None:
            super().to(memory_format=memory_format)  # type: ignore[call-overload]
        return self


def _same_device(one: torch.device, asked: torch.device) -> bool:
    """Whether ``asked`` names ``one``; without a number it is the current one of its type."""
    if one.type != asked.type or one.index is None:
        return one.type == asked.type
    if asked.index is None and asked.type == "cuda":
        return one.index == torch.cuda.current_device()
    return asked.index is None or asked.index == one.index
