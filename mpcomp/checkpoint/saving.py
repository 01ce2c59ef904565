"""Writing a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpcomp.checkpoint.files import is_checkpoint, part_name, write_part
from mpcomp.checkpoint.generators import generator_states
from mpcomp.checkpoint.links import cut_of, links_entries, stages_here, sum_of_links
from mpcomp.checkpoint.optimizers import optimizer_entry
from mpcomp.checkpoint.replacing import Replacement, new_token
from mpcomp.checkpoint.replicas import replicas_entry, whole_of_replicas
from mpcomp.comm.agreement import Together
from mpcomp.comm.failures import PeerError

if TYPE_CHECKING:
    from mpcomp.api.pipeline import Pipeline

__all__ = ["save"]


def save(
    pipe: Pipeline,
    folder: Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes weights, optimizer, links' and replicas' state, generators and step to ``folder``.

    With several processes all ranks call this, and each writes its part to its own file system;
    see `mpcomp.checkpoint`. If one cannot, nothing has changed on any.

    Args:
        pipe: the pipeline.
        folder: made, or replaced if it holds a checkpoint.
        optimizer: its state is stored by parameter name, so that it survives another cut.
        scheduler: a learning-rate scheduler.
        extra: anything JSON can hold; `load` returns it.

    Raises:
        ValueError: ``folder`` exists and is no checkpoint; nothing is written.
        OSError: the folder cannot be written.
        TypeError: ``extra`` has what JSON cannot hold.
        PeerError: another rank has gone. Where the new folder is in place by then, the former one
            stays beside it, under a name that begins with a full stop and ends in "-old".
    """
    engine = pipe.engine
    several = engine.num_ranks > 1
    with Together(engine) as start:
        _check_replaceable(folder)
        start.value = [new_token(), stages_here(pipe)]
    token = start.values[0][0]
    common = {"token": token, "num_steps": pipe.num_steps, "cut": cut_of(pipe)}
    replacement = Replacement(folder, token)
    try:
        with Together(engine) as writing:
            states = generator_states(engine)
            tensors = {f"generator.{name}": state for name, state in states.items()}
            entries = links_entries(pipe, tensors)
            meta = {
                **common,
                "links": entries,
                "replicas": replicas_entry(pipe, tensors),
                "optimizer": optimizer_entry(pipe, optimizer, tensors) if optimizer else None,
                "scheduler": scheduler.state_dict() if scheduler else None,
                "scaler": pipe.scaler.state_dict() if pipe.scaler else None,
                "extra": dict(extra or {}),
            }
            part = part_name(engine.rank, engine.num_ranks) if several else ""
            write_part(replacement.make(part), meta, pipe.state_dict(), tensors)
            writing.value = [entries, _said(meta["replicas"])] if several else None
        with Together(engine):
            if several:
                placement = [stages for _, stages in start.values[: engine.num_in_pipeline]]
                whole = {
                    "placement": placement,
                    "num_replicas": engine.num_replicas,
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
    with Together(engine):  # nothing is being deleted any more when `save` returns
        replacement.finish()


def _said(entry: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the other ranks need of a `replicas_entry`: not what a controller has decided."""
    return None if entry is None else {k: v for k, v in entry.items() if k != "controller"}


def _check_replaceable(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()) and not is_checkpoint(folder):
        raise ValueError(f"{folder} exists and is no checkpoint: choose another folder")
