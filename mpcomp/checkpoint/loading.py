"""Reading a checkpoint: everything is checked, on all ranks, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpcomp.checkpoint.files import Part, Saved
from mpcomp.checkpoint.finding import find
from mpcomp.checkpoint.forms import check_like
from mpcomp.checkpoint.generators import check_generators, set_generators
from mpcomp.checkpoint.links import check_links, restored_links, sum_of_links
from mpcomp.checkpoint.optimizers import restored_optimizer
from mpcomp.checkpoint.replicas import check_replicas, needs_all_replicas, restored_replicas
from mpcomp.checkpoint.run_state import RunState
from mpcomp.comm.agreement import SharedOutcome
from mpcomp.core.spec import parse

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
    saved = find(mesh, folder)
    with SharedOutcome(mesh) as opening:
        opening.value = list(run.here)
    placement = opening.values[: mesh.pp_size]
    unchanged = (
        saved.placement == placement
        and saved.num_replicas == mesh.num_replicas
        and saved.cut["stages"] == run.cut_entry()["stages"]
    )
    with SharedOutcome(mesh), _reading(folder):
        restoration = _prepared(run, saved, unchanged, optimizer, scheduler)
    put_back = restoration.remember()
    try:
        with SharedOutcome(mesh), _reading(folder):
            restoration.put()
    except BaseException:
        put_back()
        raise
    with SharedOutcome(mesh):  # of which nothing can fail any more
        run.model.load_state_dict(restoration.weights)
        set_generators(mesh, restoration.generators)
        run.num_steps = saved.num_steps
        run.dial = restoration.dial
    return restoration.extra


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Within, all that foreign values can lead to is an error about the checkpoint."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder} cannot be loaded: {error}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(
            f"{folder} is damaged, or not of this model and these methods "
            f"({type(error).__name__}: {error})"
        ) from error


@dataclass
class _Restoration:
    """All that a rank goes on with, read and checked.

    Attributes:
        weights: by name.
        generators: states by device.
        extra: for the caller.
        dial: of ``auto``.
        put: puts everything else in place; what it changes is among ``changed``.
        changed: objects whose attributes it binds anew, and ...
        states: those that have a ``state_dict``, for what they change in place.
    """

    weights: dict[str, Tensor]
    generators: dict[str, Tensor]
    extra: dict[str, Any]
    dial: dict[str, Any]
    put: Callable[[], None]
    changed: list[Any]
    states: list[Any]

    def remember(self) -> Callable[[], None]:
        """Makes what will make everything as it is now; no copies but of a few numbers."""
        attributes = [(each, dict(vars(each))) for each in self.changed]
        states = [(each, copy.deepcopy(each.state_dict())) for each in self.states]

        def put_back() -> None:
            for each, before in attributes:
                vars(each).clear()
                vars(each).update(before)
            for each, state in states:
                each.load_state_dict(state)

        return put_back


def _prepared(
    run: RunState,
    saved: Saved,
    unchanged: bool,
    optimizer: _Optimizer | None,
    scheduler: _Scheduler | None,
) -> _Restoration:
    """Checks and reads all that this rank needs.

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
    place = mesh.rank % mesh.pp_size
    nearest = parts[0] if unchanged or place >= len(parts) else parts[place]
    plain: dict[str, Any] = {
        what: next((p.meta[what] for p in (nearest, *parts) if p.meta[what] is not None), None)
        for what in ("optimizer", "scheduler", "scaler")
    }
    for what, wanted in (("optimizer", optimizer), ("scheduler", scheduler)):
        if wanted is not None and plain[what] is None:
            raise ValueError(f"{folder} holds no {what}: it was saved without one")
    weights: dict[str, Tensor] = {}
    for part in parts:
        weights.update(part.read_weights(own.keys() - weights.keys()))
    generators = nearest.read_state("generator.")
    check_generators(folder, generators)
    puts: list[Callable[[], None]] = []
    if optimizer is not None:
        of_optimizer = restored_optimizer(folder, run, optimizer, parts)
        puts.append(partial(optimizer.load_state_dict, of_optimizer))
    plainly = [(scheduler, "scheduler"), (run.scaler, "scaler")]
    for each, what in plainly:
        if each is not None and plain[what] is not None:
            state = check_like(each.state_dict(), plain[what], f"{folder}: the {what}")
            puts.append(partial(each.load_state_dict, state))
    puts.append(restored_links(run, parts, links, None if unchanged else links))
    puts.append(restored_replicas(run, saved, _by_replica(run, saved, parts), unchanged))
    dial = nearest.meta.get("dial", {})
    for way in dial.get("ways", {}).values():
        parse(way["method"])  # which may be taken up later
    meters = [traffic for link in run.links for traffic in link.meter.phases.values()]
    rebound = [optimizer, run.exchange, *run.links, *meters]

    def put() -> None:
        for each in puts:
            each()

    return _Restoration(
        weights,
        generators,
        nearest.meta["extra"],
        dial,
        put,
        [each for each in rebound if each is not None],
        [each for each, _ in plainly if each is not None],
    )


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
    needed = range(saved.num_parts) if needs_all_replicas(run, saved) else ranks
    lacking = (rank for rank in needed if not saved.part_folder(rank).is_dir())
    # Not all: of a damaged number of replicas there are too many.
    missing = [saved.part_folder(rank).name for rank in islice(lacking, 64)]
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
                else f", or start the {saved.num_parts} ranks that it was saved by, with the same "
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
        for first in range(0, saved.num_parts, count)
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
