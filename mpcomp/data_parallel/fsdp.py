"""Compressed collectives for torch's FSDP2; all that is private to it stands in this file.

FSDP2 calls a module's reduce-scatter when the backward of its block is done, and its all-gather
before it runs, one flat tensor for all parameters of the block. What these are, in which order and
how they are padded, it tells nobody, so its parameter groups are asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

import stages as staging
from mpcomp.core.context import TensorMeta
from mpcomp.data_parallel.base import matrix_of
from mpcomp.data_parallel.sharded import ShardedParameter

__all__ = ["Owner", "Shards", "reduce_now"]


class Owner(Protocol):
    """An object that carries out the collectives of FSDP2's modules."""

    def reduce_block(
        self, blocks: Tensor, parts: Sequence[ShardedParameter], out: Tensor, *, mean: bool
    ) -> None:
        """One block's reduce-scatter; see `ShardedExchange.reduce`."""

    def gather_block(self, own: Tensor, parts: Sequence[ShardedParameter], out: Tensor) -> None:
        """One block's all-gather; see `ShardedExchange.gather`."""


class _Allocating:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that FSDP2 will fill, or have filled."""
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatter(_Allocating, ReduceScatter):
    """The callable in place of FSDP2's reduce-scatter, for one of its modules."""

    def __init__(self, group: Any, parts: Sequence[ShardedParameter], owner: Owner) -> None:
        self._group, self._parts, self._owner = group, list(parts), owner

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        blocks = input_tensor.view(group.size(), -1)
        parts = self._with_gradient(blocks.shape[1])
        kinds = {dist.ReduceOp.AVG: True, dist.ReduceOp.SUM: False}
        if op not in kinds:
            raise ValueError(
                f"FSDP2 asks for {op} of gradients: compressed ones can be summed or averaged; "
                "leave set_gradient_divide_factor out"
            )
        with torch.no_grad():
            self._owner.reduce_block(blocks, parts, output_tensor, mean=kinds[op])

    def _with_gradient(self, numel: int) -> list[ShardedParameter]:
        """The parts of a gradient; those that are frozen have none."""
        trained = [
            part
            for part, parameter in zip(self._parts, self._group.fsdp_params, strict=True)
            if parameter.sharded_param.requires_grad
        ]
        found = sum(part.padded.numel for part in trained)
        if found != numel:
            raise RuntimeError(
                f"a block's gradient has {numel} elements for each rank, its trained ones have "
                f"{found}: some of {', '.join(part.name for part in trained)} got no gradient. Use "
                "all of them, freeze the others, or set_reduce_scatter_unused_params(True)"
            )
        return trained


class _AllGather(_Allocating, AllGather):
    """The callable in place of FSDP2's all-gather, for one of its modules."""

    def __init__(self, parts: Sequence[ShardedParameter], owner: Owner) -> None:
        self._parts, self._owner = list(parts), owner

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        expected = sum(part.padded.numel for part in self._parts)
        if input_tensor.numel() != expected:
            raise RuntimeError(
                f"FSDP2 gathers {input_tensor.numel()} elements of each rank where {expected} were "
                "expected: parameters with an all-gather of their own (fp8) cannot be compressed; "
                "leave param_comp out"
            )
        with torch.no_grad():
            self._owner.gather_block(
                input_tensor, self._parts, output_tensor.view(group.size(), -1)
            )


class _WatchedAllGather(DefaultAllGather):
    """FSDP2's own all-gather, in a context that knows what it is when it fails."""

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._waiting = waiting

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        with self._waiting():
            return super().__call__(output_tensor, input_tensor, group, async_op)


class Shards:
    """The parameter groups of sharded modules.

    Args:
        models: roots, each of which ``fully_shard`` was called on.

    Attributes:
        group: the ranks that share parameters.
        device: of the shards.
        parts: all parameters.

    Raises:
        ValueError: they are sharded in a way that custom collectives do not reach.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._groups = [found for model in models for found in _groups_of(model)]
        if not self._groups:
            raise ValueError("fully_shard was called on no module with parameters of its own")
        self.group: dist.ProcessGroup = self._groups[0][1].mesh_info.shard_process_group
        if any(g.mesh_info.shard_process_group != self.group for _, g in self._groups):
            raise ValueError("modules are sharded over different ranks: use one mesh for all")
        self.device: torch.device = self._groups[0][1].device
        names = {key: name for model in models for key, name in _names_of(model)}
        size = self.group.size()
        self._parts = [_parts_of(param_group, names, size) for _, param_group in self._groups]
        self.parts = [part for of_block in self._parts for part in of_block]
        self.dtypes = sorted(
            {str(p.sharded_param.dtype) for _, g in self._groups for p in g.fsdp_params}
        )

    def check_dtypes(self) -> None:
        """Raises ValueError for shards of several dtypes."""
        if len(self.dtypes) > 1:
            raise ValueError(
                f"the model's shards are of {', '.join(self.dtypes)}: FSDP2 sends those of a block "
                "as one tensor, so convert the model to one of them before fully_shard"
            )

    def trained(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """By name the shard of each trained parameter, and the whole that has a step's gradient.

        They are there whichever of the two the modules have at the moment. Of one that was not
        gathered yet the shard stands for both.
        """
        return {
            part.name: (
                param.sharded_param,
                getattr(param, "_unsharded_param", param.sharded_param),
            )
            for (_, param_group), of_block in zip(self._groups, self._parts, strict=True)
            for param, part in zip(param_group.fsdp_params, of_block, strict=True)
            if param.sharded_param.requires_grad
        }

    def share(self, shard: nn.Parameter, other: nn.Module, name: str) -> FSDPModule:
        """Gives another root the parameter of one; it is then for both a shard, or whole.

        Args:
            shard: of the parameter.
            other: a root that was sharded without it.
            name: its qualified name there.

        Returns:
            The module that gathers it.
        """
        module, param = next(
            (module, param)
            for module, param_group in self._groups
            for param in param_group.fsdp_params
            if param.sharded_param is shard
        )
        owner, leaf = staging.owner_of(other, name)
        param._module_info.shared_modules.append(owner)
        param._module_info.shared_param_names.append(leaf)
        param._setattr_on_modules(shard)
        return module

    def connect(
        self,
        owner: Owner,
        *,
        gathers: bool,
        waiting: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Lets ``owner`` carry out their reduce-scatters.

        Args:
            owner: does.
            gathers: whether it carries out all-gathers, too.
            waiting: a context for those of FSDP2 itself, if it does not.
        """
        for (module, param_group), of_block in zip(self._groups, self._parts, strict=True):
            module.set_custom_reduce_scatter(_ReduceScatter(param_group, of_block, owner))
            if gathers:
                module.set_custom_all_gather(_AllGather(of_block, owner))
            elif waiting is not None:
                module.set_custom_all_gather(_WatchedAllGather(waiting))


def reduce_now(root: nn.Module) -> None:
    """Exchanges the gradients that a root's backwards have added up, and reshards it.

    As torch's pipeline stage does after the last microbatch.
    """
    assert isinstance(root, FSDPModule)
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    state = root._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for param_group in parameter_groups(each):
            param_group.post_backward()
    if hasattr(state._state_ctx, "manual_backward_finalization_active"):  # from torch 2.15 on
        state._state_ctx.manual_backward_finalization_active = False  # None before any backward
    state._root_post_backward_final_callback()


def parameter_groups(state: Any) -> list[Any]:
    """The parameter groups of a module's state in FSDP2; earlier torch keeps at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _groups_of(model: nn.Module) -> list[tuple[FSDPModule, Any]]:
    """All modules that were sharded, with their parameter groups."""
    found: list[tuple[FSDPModule, Any]] = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        of_module = parameter_groups(module._get_fsdp_state())
        if len(of_module) > 1:
            raise ValueError(
                "a module's parameters are sharded over several meshes: FSDP2 takes one custom "
                "collective a module; shard all over the same mesh"
            )
        found += [(module, param_group) for param_group in of_module]
    for _, param_group in found:
        mesh = param_group.mesh_info
        if isinstance(mesh, HSDPMeshInfo) or not isinstance(mesh, FSDPMeshInfo):
            raise ValueError(
                "the model is sharded and replicated (a mesh of two dimensions): the all-reduce "
                "between replicas would go dense; use a mesh of one dimension"
            )
    return found


def _names_of(model: nn.Module) -> Iterator[tuple[tuple[int, str], str]]:
    """By module and name in it that of each parameter.

    Not by parameter: after an evaluation the root's are gathered, and other tensors than shards.
    """
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            yield (id(module), name), f"{prefix}.{name}" if prefix else name


def _parts_of(
    param_group: Any, names: Mapping[tuple[int, str], str], num_ranks: int
) -> list[ShardedParameter]:
    """The parameters of a group, in the order in which FSDP2 sends them."""
    parts = []
    for param in param_group.fsdp_params:
        shape, dim, policy = param._orig_size, param.fsdp_placement.dim, param.mp_policy
        dtype = policy.reduce_dtype or policy.param_dtype or param.sharded_param.dtype
        padded = TensorMeta(tuple(param.padded_sharded_param_size), dtype)
        each = padded.shape[dim]
        pieces = []
        for rank in range(num_ranks):  # as `torch.chunk` deals out: the last may have less, or none
            size = max(0, min(each, shape[dim] - rank * each))
            pieces.append(matrix_of(TensorMeta((*shape[:dim], size, *shape[dim + 1 :]), dtype)))
        place = param._module_info
        name = names[id(place.module), place.param_name]
        parts.append(ShardedParameter(name, tuple(pieces), matrix_of(padded), len(shape)))
    return parts
