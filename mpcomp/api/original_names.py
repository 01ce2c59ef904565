"""Stages as one module that speaks the original model's names.

So an optimizer, a checkpoint or a scheduler sees the model, not how it was cut.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

import stages as staging
from mpcomp.api.porting import WRAPPED
from mpcomp.checkpoint.weights import remove_partial_guard
from mpcomp.comm.mesh import Mesh
from mpcomp.core.dtensor import distribute_like
from mpcomp.data_parallel.replica_sync import ReplicaSync
from mpcomp.engines.base import Engine

__all__ = ["OriginalModel", "OriginalNames"]


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
            # Of a weight that two stages use the first one's is what counts.
            firsts = {again: uses[0][1] for uses in staging.ties([stage]) for _, again in uses[1:]}
            for name, x in own.items():
                if name in stage.second_uses:
                    state[prefix + name] = state[prefix + firsts[name]]
                    continue
                whole = x if keep_vars else self.mesh.whole(x, "parameters of other replicas")
                state[prefix + name] = whole
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


class OriginalModel(OriginalNames):
    """The original model, as tools for plain models ask a `mpcomp.Pipeline` for it.

    Args:
        stages: of this rank.
        cut: all stages.
        engine: runs them.
        replica_sync: keeps replicas of this rank's stages alike; None for one replica.
        plain_model: the model that was cut, where it cannot be put together of stages.
    """

    def __init__(
        self,
        stages: Sequence[staging.Stage],
        cut: Sequence[staging.Stage],
        engine: Engine,
        replica_sync: ReplicaSync | None,
        plain_model: nn.Module | None,
    ) -> None:
        # Where stages are sharded, plans are made with copies of them, which must follow too.
        elsewhere = [s for s in cut if all(s is not o for o in stages)]
        super().__init__(stages, engine.mesh, elsewhere)
        self.engine = engine
        self.replica_sync = replica_sync
        self.cut_stages = list(cut)
        self._here = [stage.index for stage in stages]
        self.training = all(stage.training for stage in cut)
        # In tuples, so that torch does not register them.
        self._with_loss_too = (OriginalNames(stages, engine.mesh, elsewhere, with_loss=True),)
        self._plain_model = (plain_model,)
        self._has_warned_of_part = False

    @property
    def with_loss(self) -> OriginalNames:
        """This rank's parameters and state, and beside the model's those that the loss has.

        They are named ``loss_fn.*``, and on the rank with the last stage.
        """
        return self._with_loss_too[0]

    @property
    def config(self) -> Any:
        """The configuration of a model of transformers.

        Raises:
            AttributeError: the model has none.
        """
        return self.cut_stages[0].original.config

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        # DistributedDataParallel asks for this before anything else. It would compare the
        # parameters of stages as if they were copies, and say that their number differs.
        raise TypeError(WRAPPED)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state under the original model's names: with several processes that of this rank.

        It then says so, once: a file that every rank writes would end with the part of one.
        """
        mesh = self.mesh
        if mesh.num_ranks > 1 and not self._has_warned_of_part:
            self._has_warned_of_part = True
            warnings.warn(
                f"pipe.state_dict() on rank {mesh.rank} of {mesh.num_ranks} is the part of this "
                "rank's stages, and a file that all ranks write would hold one of the parts: take "
                "pipe.merge().state_dict(), on every rank, for the whole, or pipe.save(folder) for "
                "a checkpoint, in which each rank writes its own",
                stacklevel=2,
            )
        return super().state_dict(*args, **kwargs)

    def merge(self) -> nn.Module:
        """The original model, with the trained weights, on the first stage's device.

        With several processes a copy of it with all weights, on the CPU of every rank.
        """
        model = self._plain_model[0] or staging.merge(self.cut_stages)
        if self.mesh.num_ranks == 1:
            return model.to(self.engine.device_of(0))
        self._align_replicas()
        whole = copy.deepcopy(model)
        remove_partial_guard(whole)
        own = {name: x.detach().cpu() for name, x in super().state_dict().items()}
        whole.load_state_dict(self.mesh.all_gather_tensors(own, "weights"), assign=True)
        staging.tie_names(whole, self.cut_stages)
        return whole.cpu()

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Writes a model of transformers as its own ``save_pretrained`` does; every rank calls it.

        The folder is written by the first rank.

        Args:
            folder: to be made.
            options: for the model's ``save_pretrained``.

        Raises:
            TypeError: the model has no ``save_pretrained``.
        """
        original: Any = self.cut_stages[0].original
        if not hasattr(original, "save_pretrained"):
            raise TypeError(
                f"save_pretrained: {type(original).__name__} is no model of transformers; use "
                "pipe.merge() and torch.save, or pipe.save"
            )
        model: Any = self.merge()
        with self.mesh.abort_all_on_error("saving the model"):
            if self.mesh.rank == 0:
                model.save_pretrained(folder, **options)
        self.mesh.all_gather_object(None)  # none goes on to read what is not there yet

    def _align_replicas(self) -> None:
        """Gives all replicas the buffers (BatchNorm's statistics) of the first."""
        if self.replica_sync is not None:
            self.replica_sync.align_buffers()


def _same_device(one: torch.device, asked: torch.device) -> bool:
    """Whether ``asked`` names ``one``; without a number it is the current one of its type."""
    if one.type != asked.type or one.index is None:
        return one.type == asked.type
    if asked.index is None and asked.type == "cuda":
        return one.index == torch.cuda.current_device()
    return asked.index is None or asked.index == one.index
