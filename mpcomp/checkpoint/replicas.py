"""The exchange between replicas in a checkpoint: state by parameter, counts, decisions.

Each rank writes what it remembers of the parameters of its stages; the same ranks read that again
and go on bit for bit. What a replica remembers is of a parameter, so other ranks per pipeline put
it together by name, as they do with weights. On another number of replicas all of them go on with
the same, and each field says with what (`merge` of `mpcomp.feedback.Field`)::

    residual, momentum, sum      the mean: an update is one too, so nothing is lost or counted twice
    of a piece (two phases)      one for all, so it is added to what is owed by every replica
    anchor, outer velocity       as they are: all replicas have the same
    EF21                         every replica's own estimate becomes their common mean, less what
                                 the second phase still owes: that is what it was
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mpcomp.checkpoint.files import Part, Saved
from mpcomp.checkpoint.run_state import RunState
from mpcomp.data_parallel.plan import split_key

__all__ = [
    "check_replicas",
    "needs_all_replicas",
    "replicas_entry",
    "restored_replicas",
    "whole_of_replicas",
]

_PREFIX = "replicas."

# -- saving ---------------------------------------------------------------------------------------


def replicas_entry(run: RunState, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    """The state of this rank's exchange: tensors into ``tensors``, the rest returned."""
    exchange = run.exchange
    if exchange is None:
        return None
    state = exchange.state_dict()
    tensors.update({_PREFIX + key: value for key, value in state["tensors"].items()})
    network = {"path": exchange.network.path, "per_machine": exchange.network.per_machine}
    held = bool(state["tensors"]) or bool(state["rest"]["controller"] and exchange.step)
    return {**state["rest"], "network": network, "held": held}


def whole_of_replicas(entries: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The common part of all ranks' `replicas_entry`, and what they counted together."""
    known = [entry for entry in entries if entry is not None]
    if not known:
        return None
    totals = {name: sum(e["totals"][name] for e in known) for name in known[0]["totals"]}
    return {
        "method": known[0]["method"],
        "network": known[0]["network"],
        "held": any(entry["held"] for entry in known),
        "totals": {**totals, "steps": known[0]["totals"]["steps"]},
    }


# -- loading --------------------------------------------------------------------------------------


def check_replicas(run: RunState, saved: Saved) -> None:
    """State of an exchange can go to other replicas, but not to another method, or to none.

    Raises:
        ValueError: there is state, and ``run`` has no place for it.
    """
    entry, exchange = saved.replicas, run.exchange
    if entry is None or not entry["held"]:
        return
    here = "none" if exchange is None else str(exchange.method)
    if exchange is None or entry["method"] != here:
        raise ValueError(
            f"{saved.folder} holds state of dp_comp={entry['method']}, this pipeline has {here}: "
            "use the same method, or load the weights alone with weights= of mpcomp.pipeline"
        )


def needs_all_replicas(run: RunState, saved: Saved) -> bool:
    """Whether what each replica remembers depends on more than one of those that were saved."""
    entry, exchange = saved.replicas, run.exchange
    if entry is None or exchange is None or not entry["held"]:
        return False
    network = {"path": exchange.network.path, "per_machine": exchange.network.per_machine}
    return saved.num_replicas != run.mesh.num_replicas or entry["network"] != network


def restored_replicas(
    run: RunState, saved: Saved, parts: Sequence[Sequence[Part]], unchanged: bool
) -> Callable[[], None]:
    """Checks and reads what this rank's exchange goes on with; returns what will put it in place.

    Args:
        run: to be loaded.
        saved: the checkpoint.
        parts: of each replica that is needed, those with parameters of this rank.
        unchanged: every rank has the stages that it had.

    Raises:
        ValueError: state that has no place here.
    """
    exchange, whole = run.exchange, saved.replicas
    if exchange is None:
        return lambda: None
    if whole is None or not (whole["held"] or whole["method"] == str(exchange.method)):
        return exchange.reset
    names = {name for name, p in run.model.named_parameters() if p.requires_grad}
    replicas = [_of_replica(each, names) for each in parts]
    tensors = exchange.merged(replicas) if needs_all_replicas(run, saved) else replicas[0]
    entries = [part.meta["replicas"] for each in parts for part in each]
    totals = entries[0]["totals"]
    if not unchanged:  # what all have counted goes on where the first rank counts
        here = whole["totals"] if run.mesh.rank == 0 else dict.fromkeys(totals, 0)
        totals = {**here, "steps": totals["steps"]}
    rest = {
        "method": whole["method"],
        "step": entries[0]["step"],
        "controller": _united([entry["controller"] for entry in entries]),
        "totals": totals,
    }
    state = {"tensors": tensors, "rest": rest}
    exchange.check_state(state)
    return lambda: exchange.load_state_dict(state)


def _of_replica(parts: Sequence[Part], names: set[str]) -> dict[str, Tensor]:
    """One replica's state of some parameters."""
    found: dict[str, Tensor] = {}
    for part in parts:  # a sharded parameter's pieces have numbers behind its name
        found.update(
            part.read_state(_PREFIX, lambda key: split_key(key)[1].partition("/")[0] in names)
        )
    return found


def _united(states: Sequence[Any]) -> Any:
    """One controller's state from those of several ranks, which differ in whose names they have."""
    if not isinstance(states[0], dict):
        return states[0]
    names = {name: None for state in states for name in state}
    return {name: _united([s[name] for s in states if name in s]) for name in names}
