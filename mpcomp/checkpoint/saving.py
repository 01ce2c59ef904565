"""Writing a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpcomp.checkpoint.files import Saved, has_remains, is_checkpoint, part_name, write_part
from mpcomp.checkpoint.forms import plain_value
from mpcomp.checkpoint.generators import generator_states
from mpcomp.checkpoint.links import links_entries, sum_of_links
from mpcomp.checkpoint.locking import FolderLock
from mpcomp.checkpoint.optimizers import optimizer_entry
from mpcomp.checkpoint.replacing import Replacement, new_token
from mpcomp.checkpoint.replicas import replicas_entry, whole_of_replicas
from mpcomp.checkpoint.run_state import RunState
from mpcomp.comm.agreement import SharedOutcome
from mpcomp.comm.failures import PeerError

__all__ = ["save"]


def save(
    run: RunState,
    folder: Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> None:
    """Writes weights, optimizer, links' and replicas' state, generators and step to ``folder``.

    With several processes all ranks call this, and each writes its part to its own file system;
    see `mpcomp.checkpoint`. If one cannot, nothing has changed on any.

    Args:
        run: the state of the run.
        folder: made, or replaced if it holds a checkpoint; files that no save has written stay in
            it. As long as the pipeline lives no other run can write it.
        optimizer: its state is stored by parameter name, so that it survives another cut.
        scheduler: a learning-rate scheduler.
        extra: anything JSON can hold; `load` returns it.
        keep: number of checkpoints to be left: what is replaced becomes ``folder-step-00000120``.
            None keeps none.

    Raises:
        ValueError: ``folder`` exists and is no checkpoint, or a damaged one, or another run is
            writing it; nothing is written.
        FloatingPointError: a weight that is trained is not finite; nothing is written.
        OSError: the folder cannot be written.
        TypeError: ``extra`` has what JSON cannot hold.
        PeerError: another rank has gone. Where the new folder is in place by then, the former one
            stays beside it, in a hidden folder, and `load` takes the one that all ranks have.
    """
    mesh = run.mesh
    with SharedOutcome(mesh) as start:
        _check_replaceable(folder)
        start.value = [new_token(), list(run.here)]
    token = start.values[0][0]
    lock = FolderLock(folder, token)
    try:
        with SharedOutcome(mesh):
            lock.take()
        with SharedOutcome(mesh):
            lock.check()
        replacement = _written(run, folder, start.values, optimizer, scheduler, extra)
        with SharedOutcome(mesh):  # nothing is being deleted any more when `save` returns
            replacement.finish(keep)
        lock.keep_for(mesh)
    finally:
        lock.release()


def _written(
    run: RunState,
    folder: Path,
    starts: Sequence[Sequence[Any]],
    optimizer: torch.optim.Optimizer | None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    extra: Mapping[str, Any] | None,
) -> Replacement:
    """Writes the checkpoint and puts it in place, on all ranks, or changes nothing on any.

    Args:
        run: the state of the run.
        folder: to be replaced.
        starts: token and stages of each rank.
        optimizer: as of `save`, like the others.
        scheduler: likewise.
        extra: likewise.
    """
    mesh, token = run.mesh, starts[0][0]
    several = mesh.num_ranks > 1
    common = {"token": token, "num_steps": run.num_steps, "cut": run.cut_entry()}
    replacement = Replacement(folder, token)
    try:
        with SharedOutcome(mesh) as writing:
            states = generator_states(mesh)
            tensors = {f"generator.{name}": state for name, state in states.items()}
            entries = links_entries(run, tensors)
            of_scheduler = None
            if scheduler is not None:
                of_scheduler = plain_value(scheduler.state_dict(), "the scheduler")
            meta = {
                **common,
                "links": entries,
                "replicas": replicas_entry(run, tensors),
                "optimizer": optimizer_entry(run, optimizer, tensors) if optimizer else None,
                "scheduler": of_scheduler,
                "scaler": run.scaler.state_dict() if run.scaler else None,
                "dial": run.dial,
                "extra": dict(extra or {}),
            }
            part = part_name(mesh.rank, mesh.num_ranks) if several else ""
            weights = run.model.state_dict()
            _check_finite(run, weights, folder)
            write_part(replacement.make(part), meta, weights, tensors)
            writing.value = [entries, _for_others(meta["replicas"])] if several else None
        with SharedOutcome(mesh):
            if several:
                placement = [stages for _, stages in starts[: mesh.pp_size]]
                whole = {
                    "placement": placement,
                    "num_replicas": mesh.num_replicas,
                    "links": sum_of_links(links for links, _ in writing.values),
                    "replicas": whole_of_replicas(replicas for _, replicas in writing.values),
                }
                replacement.move({**common, **whole})
            else:
                replacement.move()
    except PeerError:
        replacement.leave()
        raise
    except BaseException:
        replacement.undo()
        raise
    return replacement


def _for_others(entry: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The part of a `replicas_entry` that other ranks need: not what a controller has decided."""
    return None if entry is None else {k: v for k, v in entry.items() if k != "controller"}


def _check_replaceable(folder: Path) -> None:
    if folder.resolve() == Path.cwd():
        raise ValueError(f"{folder} is the working directory: name a folder in it")
    if not folder.exists() or not any(folder.iterdir()) or is_checkpoint(folder):
        return
    if has_remains(folder):
        try:
            Saved.of(folder)
        except ValueError as error:
            raise ValueError(
                f"{error}. Its other files may be whole, so no save replaces them: move {folder} "
                "away, or choose another folder"
            ) from error
    raise ValueError(f"{folder} exists and is no checkpoint: choose another folder")


def _check_finite(run: RunState, weights: Mapping[str, Tensor], folder: Path) -> None:
    for name, parameter in run.model.named_parameters():
        if parameter.requires_grad and name in weights and not weights[name].isfinite().all():
            raise FloatingPointError(
                f"{name} is not finite after step {run.num_steps}, so {folder} stays as it was: "
                "load it and train on with a lower learning rate or with clipping"
            )
