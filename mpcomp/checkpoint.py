"""Checkpoints: everything a run needs to go on exactly, in formats that need no unpickling.

A folder with three files:

    weights.safetensors   the model under its original names (loads in the plain model)
    state.safetensors     optimizer, links and torch's generators, as tensors
    checkpoint.json       version, step, the cut and its methods, and all plain numbers

The folder is written beside its name and moved into place when it is complete. Loading checks
everything before it changes anything.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from mpcomp.link import Link
    from mpcomp.pipe import Pipeline

__all__ = ["load", "save"]

_FORMAT, _VERSION = "mpcomp checkpoint", 1
_WEIGHTS, _STATE, _META = "weights.safetensors", "state.safetensors", "checkpoint.json"
_KEYS = {"num_steps", "cut", "links", "optimizer", "scheduler", "scaler", "extra"}
_Optimizer = torch.optim.Optimizer
_Scheduler = torch.optim.lr_scheduler.LRScheduler


def save(
    pipe: Pipeline,
    folder: Path,
    *,
    optimizer: _Optimizer | None = None,
    scheduler: _Scheduler | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes weights, optimizer, links' state, generators and step to ``folder``.

    Args:
        pipe: the pipeline.
        folder: made, or replaced if it holds a checkpoint.
        optimizer: its state is stored by parameter name, so that it survives another cut.
        scheduler: a learning-rate scheduler.
        extra: anything JSON can hold; `load` returns it.

    Raises:
        ValueError: ``folder`` exists and is no checkpoint; nothing is written.
        OSError: the folder cannot be written.
    """
    if folder.exists() and any(folder.iterdir()) and _missing(folder):
        raise ValueError(f"{folder} exists and is no checkpoint: choose another folder")
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "num_steps": pipe.num_steps,
        "cut": _cut(pipe),
        "links": {},
        "optimizer": _flat_optimizer(pipe, optimizer, tensors) if optimizer else None,
        "scheduler": scheduler.state_dict() if scheduler else None,
        "scaler": pipe.scaler.state_dict() if pipe.scaler else None,
        "extra": dict(extra or {}),
    }
    for link in pipe.links:
        state = link.state_dict()
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{_link_key(link)}.{key}"] = value
        meta["links"][_link_key(link)] = {
            "method": str(link.method),
            "sample": state.get("sample"),
            "traffic": {p: t.to_state() for p, t in link.meter.phases.items()},
        }
    tensors["generator.cpu"] = torch.get_rng_state()
    for i in range(torch.cuda.device_count()):
        tensors[f"generator.cuda.{i}"] = torch.cuda.get_rng_state(i)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(_on_cpu(pipe.state_dict()), temporary / _WEIGHTS)
        save_file(_on_cpu(tensors), temporary / _STATE)
        (temporary / _META).write_text(json.dumps(meta, indent=1))
        if folder.exists():  # aside first: at no time is there no complete checkpoint
            old = temporary.with_name(temporary.name + "-old")
            folder.replace(old)
            temporary.replace(folder)
            shutil.rmtree(old)
        else:
            temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(
    pipe: Pipeline,
    folder: Path,
    *,
    optimizer: _Optimizer | None = None,
    scheduler: _Scheduler | None = None,
) -> dict[str, Any]:
    """Restores what `save` wrote, and returns its ``extra``.

    A pipeline with the same cut and methods goes on bit for bit. Weights and optimizer also load
    into another cut, when ``folder`` has no links' state to lose.

    Raises:
        ValueError: no checkpoint, a foreign or truncated one, or one of another model, other
            methods, or without the optimizer asked for. Nothing has been changed then.
    """
    meta, weights, tensors = _read(folder)
    own = pipe.state_dict()
    _check_weights(folder, own, weights)
    _check_links(folder, pipe, meta, tensors)
    for what, wanted in (("optimizer", optimizer), ("scheduler", scheduler)):
        if wanted is not None and meta[what] is None:
            raise ValueError(f"{folder} holds no {what}: it was saved without one")
    optimizer_state = None
    if optimizer is not None:
        optimizer_state = _nested_optimizer(folder, pipe, optimizer, meta["optimizer"], tensors)

    pipe.load_state_dict(weights)
    if optimizer is not None and optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    if scheduler is not None:
        scheduler.load_state_dict(meta["scheduler"])
    if pipe.scaler is not None and meta["scaler"] is not None:
        pipe.scaler.load_state_dict(meta["scaler"])
    for link in pipe.links:
        key = _link_key(link)
        state: dict[str, Any] = _below(tensors, key)
        entry = meta["links"].get(key, {})
        if state:
            state["sample"] = entry["sample"]
        roles = ("sender", "receiver")
        devices = {role: pipe.device_of(link.boundary, role, link.direction) for role in roles}
        link.load_state_dict(state, devices)
        for phase, traffic in entry.get("traffic", {}).items():
            link.meter.phases[phase].load_state(traffic)
    pipe.num_steps = meta["num_steps"]
    torch.set_rng_state(tensors["generator.cpu"])
    for i in range(torch.cuda.device_count()):
        if f"generator.cuda.{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"generator.cuda.{i}"], i)
    extra = meta["extra"]
    assert isinstance(extra, dict)
    return extra


def _missing(folder: Path) -> list[str]:
    """Files of a checkpoint that ``folder`` lacks."""
    return [name for name in (_META, _WEIGHTS, _STATE) if not (folder / name).is_file()]


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    missing = _missing(folder)
    if missing:
        raise ValueError(
            f"{folder} is no complete checkpoint: {', '.join(missing)} missing; expected a folder "
            "that Pipeline.save has written"
        )
    try:
        meta = json.loads((folder / _META).read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / _META} is damaged or foreign: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise ValueError(f"{folder / _META} was not written by Pipeline.save")
    if meta.get("version") != _VERSION:
        raise ValueError(
            f"{folder} has checkpoint version {meta.get('version')}; this mpcomp reads {_VERSION}"
        )
    if lacking := _KEYS - meta.keys():
        raise ValueError(f"{folder / _META} is damaged: it lacks {', '.join(sorted(lacking))}")
    read = []
    for name in (_WEIGHTS, _STATE):
        try:
            read.append(load_file(folder / name))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} is truncated or foreign: {error}") from error
    return meta, read[0], read[1]


def _check_weights(folder: Path, own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for what, names in (
        ("lacks", sorted(own.keys() - weights.keys())),
        ("has the unknown", sorted(weights.keys() - own.keys())),
        (
            "differs in shape in",
            sorted(k for k in own if own[k].shape != weights.get(k, own[k]).shape),
        ),
    ):
        if names:
            raise ValueError(
                f"{folder} is of another model: it {what} {', '.join(names[:3])}"
                + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            )


def _check_links(
    folder: Path, pipe: Pipeline, meta: dict[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Links' state belongs to a cut and its methods: it cannot be carried to others."""
    saved = {key: entry["method"] for key, entry in meta["links"].items()}
    held = {key for key in saved if _below(tensors, key)}
    own = {_link_key(link): str(link.method) for link in pipe.links}
    if not held:
        return
    if meta["cut"] != _cut(pipe):
        raise ValueError(
            f"{folder} holds state of links for the cut {meta['cut']}, this pipeline has "
            f"{_cut(pipe)}: use the same split"
        )
    for key in sorted(held):
        if own[key] != saved[key]:
            raise ValueError(
                f"{folder} holds state of {saved[key]} for {key}, this pipeline has {own[key]} "
                "there: use the same compressors"
            )


def _cut(pipe: Pipeline) -> dict[str, Any]:
    """What links' state depends on."""
    return {
        "chunks": pipe.chunks,
        "stages": [list(stage.block_names) for stage in pipe.cut_stages],
    }


def _link_key(link: Link) -> str:
    return f"link.{link.boundary}.{link.direction}"


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    return {
        key.removeprefix(prefix + "."): value
        for key, value in tensors.items()
        if key.startswith(prefix + ".")
    }


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies that share no storage, which safetensors would refuse."""
    return {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}


def _flat_optimizer(
    pipe: Pipeline, optimizer: _Optimizer, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """The optimizer's state by parameter name: tensors into ``tensors``, the rest returned."""
    names = {id(p): name for name, p in pipe.named_parameters()}
    groups, plain = [], {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": [names[id(p)] for p in group["params"]], "settings": settings})
        for p in group["params"]:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{key}.{names[id(p)]}"] = value
                else:
                    plain[f"{key}.{names[id(p)]}"] = value
    return {"class": type(optimizer).__name__, "groups": groups, "plain": plain}


def _nested_optimizer(
    folder: Path,
    pipe: Pipeline,
    optimizer: _Optimizer,
    saved: dict[str, Any],
    tensors: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The form that ``optimizer.load_state_dict`` takes."""
    if saved["class"] != type(optimizer).__name__:
        raise ValueError(
            f"{folder} holds the state of {saved['class']}, not of {type(optimizer).__name__}"
        )
    names = {id(p): name for name, p in pipe.named_parameters()}
    own = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if [group["params"] for group in saved["groups"]] != own:
        raise ValueError(
            f"{folder}: the optimizer's parameter groups are not those it was saved with"
        )
    index = {name: i for i, name in enumerate(name for group in own for name in group)}
    state: dict[int, dict[str, Any]] = {}
    everything = {**_below(tensors, "optimizer"), **saved["plain"]}
    for compound, value in everything.items():
        key, _, name = compound.partition(".")
        state.setdefault(index[name], {})[key] = value
    groups = [
        {**group["settings"], "params": [index[name] for name in names_of]}
        for group, names_of in zip(saved["groups"], own, strict=True)
    ]
    return {"state": state, "param_groups": groups}
