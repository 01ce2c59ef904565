"""From a model to this rank's part of a pipeline, in agreement with all other ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import stages as staging
from mpcomp.api.config import Choices
from mpcomp.api.pipeline import Pipeline
from mpcomp.api.weights import check_weights, let_go, load_weights
from mpcomp.comm.handshake import announcing_failure, exchange, shake_hands
from mpcomp.comm.mesh import World, join
from mpcomp.core.dtensor import on_meta
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.methods import param_comp_of, replica_method_of
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.replicas import trained_in
from mpcomp.data_parallel.selection import check_run
from mpcomp.data_parallel.sharded_average import Sharding
from mpcomp.engines.distributed import DistributedEngine
from mpcomp.engines.schedules import Schedule, schedule_named
from mpcomp.links.boundary import Boundary
from mpcomp.links.build import boundaries_of, method_of
from mpcomp.links.tied_weights import Tie, ties_of
from mpcomp.version import __version__
from stages.split import Where

__all__ = ["distributed_pipeline"]


def distributed_pipeline(model: nn.Module, choices: Choices) -> Pipeline:
    """What `mpcomp.pipeline` returns where there are several processes.

    Nothing is connected, and the model stays whole, until all ranks have agreed.
    """
    schedule = schedule_named(choices.schedule)
    device = _device(choices)
    join(device, choices.timeout)
    world = World(choices.replicas, choices.timeout, device)
    ranks = world.ranks_per_pipeline
    if world.size < 2:
        raise ValueError(
            "1 rank: a pipeline of one rank sends nothing; start more processes, or pass "
            "engine='local'"
        )
    with announcing_failure(world):
        cut = staging.split(model, _where(model, choices, schedule, world))
        schedule.check_stages(len(cut), ranks)
        _check_one_stage(cut, choices)
        _check_parameters(cut, schedule, ranks)
        _check_recompute(choices, schedule)
        boundaries = boundaries_of(
            choices.act_comp,
            choices.grad_comp,
            [stage.block_names[-1] for stage in cut[:-1]],
            seed=choices.seed,
            replica=world.replica,
            warmup_steps=choices.warmup_steps,
        )
        ties = ties_of(
            cut,
            method_of("tie_comp", choices.tie_comp),
            seed=choices.seed,
            replica=world.replica,
            warmup_steps=choices.warmup_steps,
        )
        dp_comp = None if choices.dp_comp is None else replica_method_of(choices.dp_comp)
        if dp_comp is not None:
            network = choices.network or ReplicaNetwork()
            check_run(trained_in(cut), dp_comp, network, choices.replicas)
        param_comp = param_comp_of(choices.param_comp)
        if choices.shard:
            _check_sharding(schedule, ties)
        own = [i for i in range(len(cut)) if schedule.place_of(i, ranks) == world.place]
        check_weights([cut[i] for i in own], choices.weights)
        crossings: list[Boundary | Tie] = [*boundaries, *ties]
        methods = [[str(link.method) for link in each.links] for each in crossings]
    shake_hands(world, _config(cut, methods, dp_comp, schedule, choices, device))
    world.connect()
    for i, stage in enumerate(cut):
        if i not in own:
            let_go(stage)
            continue
        if choices.weights is not None:
            load_weights(stage, choices.weights)
        stage.to(device)
    staging.tie_names(model, cut)  # else its head keeps an embedding that another rank trains
    for parameter in (p for stage in cut if choices.shard for p in stage.parameters()):
        parameter.data = parameter.data.contiguous()  # FSDP2 takes no channels-last weights
    # A stage that is sharded cannot be run on tensors without data any more, but a copy can.
    plain = [on_meta(stage) if choices.shard and i in own else stage for i, stage in enumerate(cut)]
    plain_model = on_meta(model) if choices.shard else None
    engine = DistributedEngine(
        cut,
        boundaries,
        world,
        schedule,
        chunks=choices.chunks,
        recompute=choices.recompute,
        seed=choices.seed,
        in_flight=choices.in_flight,
        in_flight_bytes=choices.in_flight_bytes,
        ties=ties,
        dp_comp=dp_comp,
        network=choices.network,
        plain=plain,
        sharding=Sharding(param_comp) if choices.shard else None,
    )
    engine.plain_model = plain_model
    return Pipeline(
        [cut[i] for i in own],
        plain,
        boundaries,
        engine,
        chunks=choices.chunks,
        loss_fn=choices.loss_for(cut),
        scaler=choices.scaler,
        ties=ties,
        warmup_steps=choices.warmup_steps,
    )


def _device(choices: Choices) -> torch.device:
    """This rank's device."""
    given, local_rank = choices.devices, int(os.environ.get("LOCAL_RANK", "0"))
    if isinstance(given, str | torch.device):
        return torch.device(given)
    if given is not None:
        rank = int(os.environ.get("RANK", "0"))
        if torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
        if not rank < len(given):
            raise ValueError(
                f"{len(given)} devices, but this is rank {rank}: give one for each rank, or one "
                "for all"
            )
        return torch.device(given[rank])
    if local_rank < torch.cuda.device_count():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _where(model: nn.Module, choices: Choices, schedule: Schedule, world: World) -> Where:
    if choices.split not in (None, "time"):
        assert choices.split is not None
        return choices.split
    num_stages = world.ranks_per_pipeline * schedule.default_stages_per_rank
    if choices.split is None:
        return num_stages
    times = exchange(world, "times", staging.seconds(staging.blocks(model), choices.sample))
    places = [schedule.place_of(i, world.ranks_per_pipeline) for i in range(num_stages)]
    # All replicas are cut alike, so the slowest machine at each place counts.
    slowest = [
        [max(of_block) for of_block in zip(*times[place :: world.ranks_per_pipeline], strict=True)]
        for place in places
    ]
    return staging.partition(slowest, num_stages)


def _check_parameters(cut: list[staging.Stage], schedule: Schedule, ranks: int) -> None:
    for place in range(ranks):
        held = [s for i, s in enumerate(cut) if schedule.place_of(i, ranks) == place]
        if not any(True for stage in held for _ in stage.parameters()):
            raise ValueError(
                f"{' and '.join(stage.name for stage in held)} would be alone on its rank and has "
                "no parameters: there is nothing to give to an optimizer there; cut the model at "
                "another block"
            )


def _check_one_stage(cut: list[staging.Stage], choices: Choices) -> None:
    """A pipeline of one stage compresses nothing, and must not pass for one that does."""
    given = [choices.act_comp, choices.grad_comp]
    if len(cut) == 1 and any(str(method) not in ("None", "none") for method in given):
        raise ValueError(
            f"act_comp={choices.act_comp}, grad_comp={choices.grad_comp} with one stage: there is "
            "no cut to compress at; leave them out, or start more processes"
        )


def _check_sharding(schedule: Schedule, ties: Sequence[Tie]) -> None:
    if schedule.splits_backward:
        raise ValueError(
            f"shard=True with schedule={schedule.name!r}, which splits backward into two passes: "
            "FSDP2 would free parameters between them; use the engine's own schedule, GPipe, 1F1B, "
            "Interleaved1F1B or LoopedBFS"
        )
    if ties:
        raise ValueError(
            f"shard=True with {ties[0].name}, a tied weight in two stages: their gradients are "
            "added up whole, before replicas would have shared them out; keep both in one stage, "
            "or untie them"
        )


def _check_recompute(choices: Choices, schedule: Schedule) -> None:
    if choices.recompute and schedule.splits_backward:
        raise ValueError(
            f"recompute=True with schedule={schedule.name!r}, which splits backward into two "
            "passes: each would recompute the stage; use another schedule or recompute=False"
        )


def _config(
    cut: list[staging.Stage],
    methods: list[list[str]],
    dp_comp: ReplicaMethod | None,
    schedule: Schedule,
    choices: Choices,
    device: torch.device,
) -> dict[str, Any]:
    """What must be the same on all ranks, as words and numbers."""
    shapes = {
        name: [list(p.shape), str(p.dtype), p.requires_grad]
        for stage in cut
        for name, p in stage.named_parameters()
    }
    return {
        "mpcomp": __version__,
        "torch": torch.__version__.split("+")[0],
        "device type": device.type,
        "stages": [list(stage.block_names) for stage in cut],
        "parameters": shapes,
        "methods": methods,
        "dp_comp": str(dp_comp),
        "network": str(choices.network),
        "schedule": schedule.name,
        "in_flight": choices.in_flight,
        "in_flight_bytes": choices.in_flight_bytes,
        "chunks": choices.chunks,
        "replicas": choices.replicas,
        "shard": choices.shard,
        "param_comp": str(choices.param_comp),
        "recompute": choices.recompute,
        "seed": choices.seed,
        "warmup_steps": choices.warmup_steps,
        "loss": getattr(choices.loss_fn, "__qualname__", type(choices.loss_fn).__name__),
        "loss scaler": choices.scaler is not None and choices.scaler.is_enabled(),
        "timeout": choices.timeout,
    }
