"""`mpcomp.pipeline`: from a model and a few choices to a `Pipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import stages as staging
from mpcomp.boundary import Boundary
from mpcomp.compressors import Compressor, Identity, SameIndices, Selecting
from mpcomp.engines.local import LocalEngine
from mpcomp.feedback import EFMixed, Feedback
from mpcomp.link import ACT, GRAD, Link, Method
from mpcomp.parsing import closest, parse
from mpcomp.pipe import LossFn, Pipeline
from stages.split import Where

__all__ = ["pipeline"]

#: What may be given for one boundary.
MethodLike = Method | str | None
#: What may be given for all: one for all, a list, or a mapping from cuts.
Methods = MethodLike | Sequence[MethodLike] | Mapping[Any, MethodLike]


def pipeline(
    model: nn.Module,
    chunks: int,
    *,
    act_comp: Methods = None,
    grad_comp: Methods = None,
    dp_comp: Any = None,
    split: Where | None = None,
    devices: str | torch.device | Sequence[str | torch.device] | None = None,
    replicas: int = 1,
    schedule: str | None = None,
    loss_fn: LossFn | None = None,
    recompute: bool = False,
    seed: int = 0,
    engine: str | None = None,
    warmup_steps: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> Pipeline:
    """Cuts ``model`` into stages that exchange compressed activations and gradients.

    The stages share the model's parameters and move to their devices.

    Args:
        model: an `nn.Sequential` (such as `stages.resnet18`), or any module that
            `stages.split` can cut by the names of its blocks.
        chunks: microbatches per batch, at least 1.
        act_comp: method for activations: an object, a spec string (`mpcomp.parse`), None for
            none; a list with one for each boundary; or a mapping from a boundary's number, or
            the name of the block it comes after, to one (others: none).
        grad_comp: method for gradients, likewise.
        dp_comp: compression between replicas; needs ``replicas`` above 1.
        split: number of stages, block counts, names of blocks to cut after, or "paper"; by
            default one stage a device.
        devices: one for each stage (they may repeat), or one for all; the CPU by default, or one
            stage per GPU where there are several and ``split`` is not given.
        replicas: copies of the pipeline; the local engine has one.
        schedule: of the engine; None is its own, and the only one the local engine has.
        loss_fn: ``loss_fn(output, target)``, the mean over its rows (or a module with
            ``reduction="sum"``).
        recompute: keep only stage inputs and recompute the rest in backward.
        seed: of all random choices of compressors and of dropout.
        engine: "local", or None to choose.
        warmup_steps: training steps that go uncompressed at first.
        scaler: loss scaler for fp16: losses are scaled by it, and non-finite steps are skipped
            (``pipe.step_skipped``). Call its ``unscale_``, ``step`` and ``update`` as usual.

    Returns:
        A `Pipeline`.

    Raises:
        ValueError: a choice outside what is accepted; the message names it and the fix. The
            model has not been moved then.
        TypeError: a compressor that is none.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks={chunks!r}: expected a whole number of microbatches, 1 or more")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}: expected 0 or more steps")
    if engine not in (None, "local"):
        raise ValueError(f"engine={engine!r}: this version has 'local'")
    if schedule is not None:
        raise ValueError(
            f"schedule={schedule!r}: the local engine has only its own order; leave schedule=None"
        )
    if replicas != 1 or dp_comp is not None:
        raise ValueError(
            f"replicas={replicas}, dp_comp={dp_comp!r}: the local engine has one replica and "
            "nothing to compress between replicas; leave both out"
        )
    cut, where = _stages_and_devices(model, split, devices)
    names = [stage.block_names[-1] for stage in cut[:-1]]
    acts = _methods("act_comp", act_comp, names)
    grads = _methods("grad_comp", grad_comp, names)
    boundaries = []
    for i, (act, grad) in enumerate(zip(acts, grads, strict=True)):
        _check_pair(i, act, grad)
        links = [
            Link(method, boundary=i, direction=way, seed=seed, warmup_steps=warmup_steps)
            for method, way in ((act, ACT), (grad, GRAD))
        ]
        boundaries.append(Boundary(*links))
    for stage, device in zip(cut, where, strict=True):
        stage.to(device)
    runner = LocalEngine(cut, boundaries, where, recompute=recompute, seed=seed)
    return Pipeline(cut, boundaries, runner, chunks=chunks, loss_fn=loss_fn, scaler=scaler)


def _stages_and_devices(
    model: nn.Module,
    split: Where | None,
    devices: str | torch.device | Sequence[str | torch.device] | None,
) -> tuple[list[staging.Stage], list[torch.device]]:
    if isinstance(devices, str | torch.device):
        given, one = [torch.device(devices)], True
    else:
        given, one = [torch.device(d) for d in devices or ()], False
        if devices is not None and not given:
            raise ValueError("devices=[]: expected at least one device, or None")
    if split is None:
        if not given and torch.cuda.device_count() > 1:
            given = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        if len(given) < 2:
            raise ValueError(
                "split is required here: a pipeline of one stage compresses nothing. Give a number "
                "of stages (split=4), block counts, names to cut after, or several devices"
            )
        split = len(given)
    cut = staging.split(model, split)
    if len(cut) < 2:
        raise ValueError(
            f"split={split!r} makes one stage, which compresses nothing: "
            "give at least 2 stages, or use the plain model"
        )
    if not given:
        given, one = [torch.device("cpu")], True
    if one:
        given = given * len(cut)
    if len(given) != len(cut):
        raise ValueError(
            f"{len(given)} devices for {len(cut)} stages: give one device for each stage "
            "(they may repeat), or one for all"
        )
    return cut, given


def _methods(argument: str, given: Methods, names: Sequence[str]) -> list[Method]:
    """One method for each boundary; ``names`` are the blocks before the cuts."""
    if isinstance(given, Mapping):
        chosen: list[MethodLike] = [None] * len(names)
        for key, value in given.items():
            chosen[_boundary_of(argument, key, names)] = value
    elif isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != len(names):
            raise ValueError(
                f"{argument} has {len(given)} entries for {len(names)} boundaries: "
                "give one for each, or one for all"
            )
        chosen = list(given)
    else:
        chosen = [given] * len(names)
    return [_method(argument, value) for value in chosen]


def _boundary_of(argument: str, key: Any, names: Sequence[str]) -> int:
    if isinstance(key, int) and 0 <= key < len(names):
        return key
    for i, name in enumerate(names):
        if isinstance(key, str) and (name == key or name.startswith(f"{key}.")):
            return i
    prefixes = {name.rpartition(".")[0] for name in names} - {""}
    hint = closest(key, [*names, *prefixes]) if isinstance(key, str) else ""
    raise ValueError(
        f"{argument} has no boundary {key!r}{hint}: expected 0 to {len(names) - 1} "
        f"or the block before a cut ({', '.join(names)})"
    )


def _method(argument: str, value: MethodLike) -> Method:
    if value is None:
        return Identity()
    if isinstance(value, str):
        value = parse(value)
    if isinstance(value, SameIndices) and argument == "act_comp":
        raise ValueError(
            "act_comp=SameIndices(): it reuses the activation's selection, so it is for grad_comp"
        )
    if not isinstance(value, Compressor | Feedback | SameIndices):
        raise TypeError(
            f"{argument}={value!r}: expected a compressor such as TopK(0.1), a feedback method "
            "round one, a spec string such as 'topk:0.1', or None"
        )
    if argument == "act_comp" and isinstance(value, Feedback) and value.lr_scaled:
        raise ValueError(
            f"act_comp={value}: lr_scaled is for gradients; activations have no learning rate"
        )
    return value


def _check_pair(boundary: int, act: Method, grad: Method) -> None:
    if not isinstance(grad, SameIndices):
        return
    selecting = act.inner if isinstance(act, Feedback) else act
    if not isinstance(selecting, Selecting) or isinstance(act, EFMixed):
        raise ValueError(
            f"grad_comp=SameIndices() at boundary {boundary} with act_comp={act}: there must be "
            "one selection to reuse; use act_comp=TopK(...), RandomK(...) or RandomBlock(...), "
            "also inside ef, ef21 or aqsgd"
        )
