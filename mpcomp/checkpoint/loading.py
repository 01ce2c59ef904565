"""Reading a checkpoint: everything is checked, on all ranks, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpcomp.checkpoint.files import Part, Saved
from mpcomp.checkpoint.generators import set_generators
from mpcomp.checkpoint.links import (
    check_links,
    restored_links,
    sum_of_links,
)
from mpcomp.checkpoint.optimizers import restored_optimizer
from mpcomp.checkpoint.replicas import check_replicas, needs_all_replicas, restored_replicas
from mpcomp.checkpoint.run_state import RunState
from mpcomp.comm.agreement import SharedOutcome

__all__ = ["load"]

_Optimizer = torch.optim.Optimizer
_Scheduler = torch.optim.lr_scheduler.LRScheduler


def load(
    run: RunState,
    folder: Path,
    *,
    optimizer: _Optimizer | None = None,
    scheduler: _Scheduler | None = None,
) -> dict[str, Any]:
    """Restores what `save` wrote, and returns its ``extra``.

    A pipeline with the same cut and methods goes on bit for bit. Weights and optimizer also load
    into another cut, when ``folder`` has no links' state to lose. What replicas remember of their
    gradients goes with the parameters, into other ranks and another number of replicas
    (`mpcomp.checkpoint.replicas`); without any in ``folder``, replicas begin as at their first
    step.

    Several processes with the stages they had read their own parts alone. Others, and one process,
    put together the parts of a replica, which must all be in ``folder``; and several read theirs
    from a checkpoint of one.

    Raises:
        ValueError: no checkpoint, a foreign or truncated one, or one of another model, other
            methods, or without the optimizer asked for; on every rank, if on one. Nothing has been
            changed then, on any.
        PeerError: another rank has gone.
    """
    mesh = run.mesh
    with SharedOutcome(mesh) as opening:
        saved = Saved.of(folder)
        own = [saved.token, saved.num_steps, len(saved.parts)]
        opening.value = [own, list(run.here)]
    _check_one_save(folder, [of_rank for of_rank, _ in opening.values])
    placement = [stages for _, stages in opening.values[: mesh.num_in_pipeline]]
    unchanged = (
        saved.placement == placement
        and saved.num_replicas == mesh.num_replicas
        and saved.cut["stages"] == run.cut_entry()["stages"]
    )
    with SharedOutcome(mesh):
        restore = _prepared(run, saved, unchanged, optimizer, scheduler)
    with SharedOutcome(mesh):
        extra = restore()
    return extra


def _check_one_save(folder: Path, saves: Sequence[Sequence[Any]]) -> None:
    """On every rank alike: separate disks may hold different saves."""
    for rank, of_rank in enumerate(saves):
        if of_rank != saves[0]:
            raise ValueError(
                f"{folder} is not of the same save on all ranks: step {of_rank[1]} on rank {rank}, "
                f"step {saves[0][1]} on rank 0. If a save was interrupted, the former or the new "
                f"checkpoint is beside it, under a name that begins with .{folder.name}-"
            )


def _prepared(
    run: RunState,
    saved: Saved,
    unchanged: bool,
    optimizer: _Optimizer | None,
    scheduler: _Scheduler | None,
) -> Callable[[], dict[str, Any]]:
    """Checks and reads all that this rank needs; returns what will put it in place.

    Args:
        run: to be loaded.
        saved: the checkpoint.
        unchanged: every rank has the stages that it had.
        optimizer: to be loaded.
        scheduler: to be loaded.
    """
    folder, mesh = saved.folder, run.mesh
    parts = [saved.part(rank) for rank in _ranks_to_read(run, saved, unchanged)]
    check_replicas(run, saved)
    own: dict[str, Tensor] = run.model.state_dict()
    whole = {k: v for stage in run.cut for k, v in stage.state_dict().items()}
    _check_weights(folder, own if unchanged else whole, parts)
    links = saved.links
    if links is None:
        links = sum_of_links(part.meta["links"] for part in parts)
    check_links(run, saved, links)
    place = mesh.rank % mesh.num_in_pipeline
    nearest = parts[0] if unchanged or place >= len(parts) else parts[place]
    plain: dict[str, Any] = {
        what: next((p.meta[what] for p in (nearest, *parts) if p.meta[what] is not None), None)
        for what in ("optimizer", "scheduler", "scaler")
    }
    for what, wanted in (("optimizer", optimizer), ("scheduler", scheduler)):
        if wanted is not None and plain[what] is None:
            raise ValueError(f"{folder} holds no {what}: it was saved without one")
    state_of_optimizer = (
        restored_optimizer(folder, run, optimizer, parts) if optimizer is not None else None
    )
    weights: dict[str, Tensor] = {}
    for part in parts:
        weights.update(part.read_weights(own.keys() - weights.keys()))
    of_links = restored_links(run, parts, None if unchanged else links)
    of_replicas = restored_replicas(run, saved, _by_replica(run, saved, parts), unchanged)
    generators = nearest.read_state("generator.")

    def restore() -> dict[str, Any]:
        run.model.load_state_dict(weights)
        if optimizer is not None and state_of_optimizer is not None:
            optimizer.load_state_dict(state_of_optimizer)
        if scheduler is not None:
            scheduler.load_state_dict(plain["scheduler"])
        if run.scaler is not None and plain["scaler"] is not None:
            run.scaler.load_state_dict(plain["scaler"])
        for link, state, traffic in of_links:
            ends = (("sender", link.sender_stage), ("receiver", link.receiver_stage))
            devices = {role: run.device_of(stage) for role, stage in ends}
            link.load_state_dict(state, devices)
            for phase, counts in traffic.items():
                link.meter.phases[phase].load_state(counts)
        of_replicas()
        run.num_steps = saved.num_steps
        set_generators(mesh, generators)
        extra: dict[str, Any] = nearest.meta["extra"]
        return extra

    return restore


def _ranks_to_read(run: RunState, saved: Saved, unchanged: bool) -> list[int]:
    """Numbers of the parts that this rank is restored from.

    Raises:
        ValueError: not all of them are in the folder.
    """
    mesh = run.mesh
    if unchanged:
        ranks = [mesh.rank]
    else:  # of the same replica; those that are new go on from the first
        per_replica = len(saved.placement)
        replica = mesh.replica if mesh.replica < saved.num_replicas else 0
        ranks = [replica * per_replica + place for place in range(per_replica)]
    needed = range(len(saved.parts)) if needs_all_replicas(run, saved) else ranks
    missing = [saved.parts[rank].name for rank in needed if not saved.parts[rank].is_dir()]
    if missing:
        if saved.links is not None:  # if the parts would not help, that is the error
            check_links(run, saved, saved.links)
            check_replicas(run, saved)
        raise ValueError(
            f"{saved.folder} lacks {', '.join(missing)}: each part lies where its rank ran. Copy "
            "them into this folder"
            + (
                ""
                if unchanged
                else f", or start the {len(saved.parts)} ranks that it was saved by, with the same "
                "split and schedule, where they ran"
            )
        )
    return ranks


def _by_replica(run: RunState, saved: Saved, own: Sequence[Part]) -> list[Sequence[Part]]:
    """The parts that this rank's exchange is restored from, of each replica that it needs."""
    if not needs_all_replicas(run, saved):
        return [own]
    count = len(saved.placement)
    return [
        [saved.part(rank) for rank in range(first, first + count)]
        for first in range(0, len(saved.parts), count)
    ]


def _check_weights(folder: Path, own: Mapping[str, Tensor], parts: Sequence[Part]) -> None:
    shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
    for what, names in (
        ("lacks", sorted(own.keys() - shapes.keys())),
        ("has the unknown", sorted(shapes.keys() - own.keys())),
        (
            "differs in shape in",
            sorted(k for k in own if own[k].shape != shapes.get(k, own[k].shape)),
        ),
    ):
        if names:
            raise ValueError(
                f"{folder} is of another model: it {what} {', '.join(names[:3])}"
                + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            )
