"""Links in a checkpoint: the state of their ends, by role, and their traffic.

And of adaptive links what they have come to, which is the same on all ranks, as plain JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from mpcomp.checkpoint.files import Part, Saved
from mpcomp.checkpoint.run_state import RunState
from mpcomp.core.spec import SpecValue, parse
from mpcomp.core.traffic import Meter, Traffic
from mpcomp.links.auto import AUTO
from mpcomp.links.link import Link
from mpcomp.links.state import restored as restored_link

__all__ = [
    "check_links",
    "links_entries",
    "restored_links",
    "sum_of_links",
]


# -- saving ---------------------------------------------------------------------------------------


def links_entries(run: RunState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """All links by key: stored rows into ``tensors``, the rest returned."""
    entries = {}
    for link in run.links:
        state = link.endpoint.state_dict()
        held = {k: value for k, value in state.items() if isinstance(value, Tensor)}
        tensors.update({f"{_key(link)}.{k}": value for k, value in held.items()})
        entries[_key(link)] = {
            "method": str(link.method),
            "chosen": link.chosen,
            "sample": state.get("sample"),
            "adaptive": state.get("adaptive"),
            "traffic": {phase: t.to_state() for phase, t in link.meter.phases.items()},
        }
    return entries


def sum_of_links(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The links of all ranks together, from the `links_entries` of each.

    Returns:
        By link: its method, the word that it was chosen by, whether an end of it has state, whether
        it is adaptive, and the traffic of all ranks.
    """
    total: dict[str, Any] = {}
    for of_rank in entries:
        for key, entry in of_rank.items():
            if key not in total:
                total[key] = {"method": entry["method"], "held": False, "traffic": {}}
                total[key]["chosen"] = entry.get("chosen", "")
                total[key]["adaptive"] = entry.get("adaptive") is not None
            total[key]["held"] |= entry["sample"] is not None
            for phase, traffic in entry["traffic"].items():
                total[key]["traffic"].setdefault(phase, []).append(traffic)
    for entry in total.values():
        entry["traffic"] = {
            phase: Traffic.merged(states).to_state() for phase, states in entry["traffic"].items()
        }
    return total


# -- loading --------------------------------------------------------------------------------------


def check_links(run: RunState, saved: Saved, links: Mapping[str, Any]) -> None:
    """Links' state belongs to a cut, its methods and its replica: it cannot be carried to others.

    Args:
        run: to be loaded.
        saved: the checkpoint.
        links: all of its links, as `sum_of_links` gives them.

    Raises:
        ValueError: there is state, and ``run`` has no place for it.
    """
    ends = sorted(key for key, entry in links.items() if entry["held"])
    held = sorted({*ends, *(key for key, entry in links.items() if entry.get("adaptive"))})
    if not held:
        return
    if saved.cut != run.cut_entry():
        raise ValueError(
            f"{saved.folder} holds state of links for the cut {saved.cut}, this pipeline has "
            f"{run.cut_entry()}: use the same split and ties"
        )
    kept = methods_that_go_on(run, links)
    own = {
        _key(link): str(going_on[0] if (going_on := kept.get(_key(link))) else link.method)
        for link in run.links
    }
    for key in held:
        if key not in own:
            raise ValueError(f"{saved.folder} is damaged: it has state of {key}, and no such cut")
        if own[key] != links[key]["method"]:
            raise ValueError(
                f"{saved.folder} holds state of {links[key]['method']} for {key}, this pipeline "
                f"has {own[key]} there: use the same compressors"
            )
    if ends and run.mesh.replica >= saved.num_replicas:  # what is adapted all replicas share
        raise ValueError(
            f"{saved.folder} holds state of links of {saved.num_replicas} replicas, and none for "
            f"replica {run.mesh.replica} (counted from 0) of this pipeline: use replicas="
            f"{saved.num_replicas}"
        )


def methods_that_go_on(run: RunState, links: Mapping[str, Any]) -> dict[str, tuple[SpecValue, str]]:
    """Of links where ``auto`` chooses, what the checkpoint's run had chosen: method and word.

    Args:
        run: to be loaded.
        links: of the checkpoint, as `sum_of_links` gives them.

    Raises:
        ValueError: a method that is none.
    """
    entries = {_key(link): links.get(_key(link), {}) for link in run.links if link.chosen}
    return {
        key: (parse(entry["method"]), entry["chosen"])
        for key, entry in entries.items()
        if entry.get("chosen", "") in AUTO
    }


def restored_links(
    run: RunState,
    parts: Sequence[Part],
    links: Mapping[str, Any],
    total: Mapping[str, Any] | None,
) -> Callable[[], None]:
    """Reads the links' states and traffic into new ends; gives what puts them in place.

    Args:
        run: to be loaded.
        parts: those that have the state of ends that live here.
        links: all of the checkpoint, as `sum_of_links` gives them.
        total: links with the traffic of all ranks: they go on where they are sent from, in the
            first replica. None to go on with the traffic of the parts.
    """
    restored: list[Callable[[], None]] = []
    kept = methods_that_go_on(run, links)
    fresh = {phase: traffic.to_state() for phase, traffic in Meter().phases.items()}
    for link in run.links:
        key, roles = _key(link), _roles_here(run, link)
        state: dict[str, Any] = {}
        traffic: dict[str, Any] = {}
        for part in parts:
            entry = part.meta["links"].get(key)
            if entry is None:
                continue
            if entry.get("adaptive") is not None:
                state["adaptive"] = entry["adaptive"]
            for role in roles:
                for name, rows in part.read_state(f"{key}.{role}.").items():
                    state[f"{role}.{name}"] = rows
                    state["sample"] = entry["sample"]
            traffic = entry["traffic"]
        if total is not None:
            counts_here = "sender" in roles and run.mesh.replica == 0
            traffic = total[key]["traffic"] if counts_here and key in total else {}
        ends = (("sender", link.sender_stage), ("receiver", link.receiver_stage))
        devices = {role: run.device_of(stage) for role, stage in ends}
        restored.append(restored_link(link, state, devices, kept.get(key)))
        restored.append(partial(_count_on, link, {**fresh, **traffic}))

    def put() -> None:
        for each in restored:
            each()

    return put


def _count_on(link: Link, traffic: Mapping[str, Any]) -> None:
    for phase, counts in traffic.items():
        link.meter.phases[phase].load_state(counts)


def _key(link: Link) -> str:
    return f"link.{link.boundary}.{link.direction}"


def _roles_here(run: RunState, link: Link) -> list[str]:
    """The ends of a link that live on this rank."""
    ends = (("sender", link.sender_stage), ("receiver", link.receiver_stage))
    return [role for role, at in ends if at in run.here]
