"""Launching a pipeline: where its stages live, and how ranks come to agree before they connect.

`mpcomp.api.build.build` asks for the same things in the same order, in one process and in many::

    cut, check       what the model is cut into; refused alike on all ranks, before any is connected
    connect          ranks compare what they were given, and connect
    prepare          this rank's stages have their weights and devices now
    engine           what will run them
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import stages as staging
from mpcomp.api.config import PipelineConfig
from mpcomp.comm.devices import device_of_rank
from mpcomp.comm.handshake import (
    announcing_failure,
    exchange,
    fingerprint,
    shake_hands,
    show_secret,
)
from mpcomp.comm.joining import join
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.comm.probe import transport_for
from mpcomp.core.dtensor import on_meta
from mpcomp.data_parallel.base import ReplicaMethod, check_run
from mpcomp.data_parallel.connect import connect_replicas
from mpcomp.data_parallel.methods import param_comp_of, replica_method_of
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.replica_sync import ReplicaSync, trained_in
from mpcomp.data_parallel.sharded_average import Sharding
from mpcomp.engines.base import Engine
from mpcomp.engines.distributed import DistributedEngine
from mpcomp.engines.local import LocalEngine
from mpcomp.engines.schedules import schedule_named
from mpcomp.entropy import KINDS
from mpcomp.links.boundary import Boundary
from mpcomp.links.tied_weights import Tie, TiedWeights
from mpcomp.version import __version__
from stages.split import Where

__all__ = ["DistributedLaunch", "Launch", "LocalLaunch", "Plain"]


@dataclass(frozen=True)
class Plain:
    """The model as it can be run without data.

    Attributes:
        cut: all stages; where they are sharded, copies on "meta".
        model: the whole model, where stages are sharded and it has no parameters of its own.
    """

    cut: list[staging.Stage]
    model: nn.Module | None = None


class Launch(ABC):
    """The ranks that a pipeline is built on.

    Args:
        config: of the pipeline.

    Attributes:
        replica: which pipeline this rank is in.
        local_ranks: processes of the run on this machine, once they are connected.
        weights: of each rank of a pipeline, once they are connected: a number for a stage's
            weights as that rank has built them, by the stage's name; None where it has not.

    Raises:
        ValueError: this engine cannot do what the configuration asks for.
    """

    replica = 0
    local_ranks = 1
    weights: Sequence[Mapping[str, int | None]] = ()

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config

    def abort_all_on_error(self) -> AbstractContextManager[None]:
        """A context for all that may be refused; then the other ranks need not wait."""
        return nullcontext()

    @abstractmethod
    def cut(self, model: nn.Module) -> list[staging.Stage]:
        """All stages.

        Raises:
            ValueError: the model cannot be cut in this way.
        """

    def check(self, cut: Sequence[staging.Stage], ties: Sequence[Tie]) -> None:  # noqa: B027
        """Raises ValueError for what cannot go together."""

    def own_stages(self, cut: Sequence[staging.Stage]) -> list[int]:
        """Numbers of the stages of this rank."""
        return list(range(len(cut)))

    def connect(self, cut: Sequence[staging.Stage], plan: Mapping[str, Any]) -> None:  # noqa: B027
        """Connects the ranks, once they have found that they want the same.

        Args:
            cut: all stages.
            plan: what all ranks must mean to send, by name: methods and formats of links.

        Raises:
            ValueError: they do not; on every rank.
            PeerError: a rank failed or did not come.
        """

    @abstractmethod
    def device_of(self, stage: int) -> torch.device:
        """The device of a stage of this rank."""

    def prepare(self, model: nn.Module, cut: Sequence[staging.Stage], own: Sequence[int]) -> Plain:
        """Takes note of the model before it is sharded; called when weights are in place."""
        return Plain(list(cut))

    @abstractmethod
    def engine(
        self,
        cut: Sequence[staging.Stage],
        boundaries: Sequence[Boundary],
        ties: Sequence[Tie],
        plain: Plain,
    ) -> tuple[Engine, ReplicaSync | None]:
        """The engine, and what keeps replicas of its stages alike."""


class LocalLaunch(Launch):
    """All stages in this process."""

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        for name in ("schedule", "in_flight", "in_flight_bytes"):
            if getattr(config, name) is not None:
                raise ValueError(
                    f"{name}={getattr(config, name)!r}: the local engine has only its own order; "
                    f"leave {name} out, or start several processes with torchrun"
                )
        if config.replicas != 1:
            raise ValueError(
                f"replicas={config.replicas}: one process holds one replica; start "
                f"{config.replicas} times as many processes as stages with torchrun"
            )
        self._devices: list[torch.device] = []

    def cut(self, model: nn.Module) -> list[staging.Stage]:
        config = self.config
        split, devices = config.split, config.devices
        if isinstance(devices, str | torch.device):
            given, one = [torch.device(devices)], True
        else:
            given, one = [torch.device(d) for d in devices or ()], False
            if devices is not None and not given:
                raise ValueError("devices=[]: expected at least one device, or None")
        for device in given:
            _check_there(device)
        if split is None or split == "time":
            if not given and torch.cuda.device_count() > 1:
                given = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
            if len(given) < 2:
                raise ValueError(
                    "split is required here: a pipeline of one stage compresses nothing. Give a "
                    "number of stages (split=4), block counts, names to cut after, or several "
                    "devices"
                )
            if split == "time":
                times = _unit_seconds(model, config)
                split = staging.partition(times, len(given))
            else:
                split = len(given)
        cut = split_as_asked(model, split, config)
        if len(cut) < 2:
            raise ValueError(
                f"split={split!r} makes one stage, which compresses nothing: "
                "give at least 2 stages, or use the plain model"
            )
        if not given:
            given, one = [torch.device("cpu")], True
        num_places = len(cut) - cut[0].together
        if one:
            given = given * num_places
        if len(given) != num_places:
            raise ValueError(
                f"{len(given)} devices for {num_places} stages: give one device for each stage "
                "(they may repeat), or one for all"
            )
        self._devices = given + given[:1] * cut[0].together
        return cut

    def device_of(self, stage: int) -> torch.device:
        return self._devices[stage]

    def engine(
        self,
        cut: Sequence[staging.Stage],
        boundaries: Sequence[Boundary],
        ties: Sequence[Tie],
        plain: Plain,
    ) -> tuple[Engine, ReplicaSync | None]:
        config = self.config
        engine = LocalEngine(
            cut,
            boundaries,
            self._devices,
            recompute=config.recompute,
            seed=config.seed,
            ties=ties,
        )
        return engine, None


class DistributedLaunch(Launch):
    """One process for each rank; nothing is connected until all of them agree."""

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self._schedule = schedule_named(config.schedule)
        device = device_of_rank(config.devices)
        join(device, config.timeout, shares=config.devices is not None)
        self.mesh = ProcessMesh(config.replicas, config.timeout, device)
        show_secret(self.mesh)
        self.replica = self.mesh.replica
        if self.mesh.num_ranks < 2:
            raise ValueError(
                "1 rank: a pipeline of one rank sends nothing; start more processes, or pass "
                "engine='local'"
            )
        self._dp_comp: ReplicaMethod | None = None
        self._sharding: Sharding | None = None

    def abort_all_on_error(self) -> AbstractContextManager[None]:
        return announcing_failure(self.mesh)

    def place_of(self, stage: int) -> int:
        """The rank of a pipeline that has a stage."""
        return self._schedule.place_of(stage, self.mesh.pp_size)

    def cut(self, model: nn.Module) -> list[staging.Stage]:
        _check_there(self.mesh.device)  # here, where a failure is told to the other ranks
        cut = split_as_asked(model, self._where(model), self.config)
        self._schedule.check_stages(len(cut) - cut[0].together, self.mesh.pp_size)
        self._check_one_stage(cut)
        self._check_parameters(cut)
        self._check_recompute()
        return cut

    def _where(self, model: nn.Module) -> Where:
        split, mesh = self.config.split, self.mesh
        if split not in (None, "time"):
            assert split is not None
            return split
        num_stages = mesh.pp_size * self._schedule.default_stages_per_rank
        if split is None:
            return num_stages
        config = self.config
        seconds = _unit_seconds(model, config)
        times = exchange(mesh, "times", seconds)
        _check_times(times)
        # All replicas are cut alike, so the slowest machine at each place counts.
        slowest = [
            [
                max(of_block)
                for of_block in zip(*times[self.place_of(stage) :: mesh.pp_size], strict=True)
            ]
            for stage in range(num_stages)
        ]
        return staging.partition(slowest, num_stages)

    def check(self, cut: Sequence[staging.Stage], ties: Sequence[Tie]) -> None:
        config = self.config
        if config.dp_comp is not None:
            self._dp_comp = replica_method_of(config.dp_comp)
            network = config.network or ReplicaNetwork()
            check_run(trained_in(cut), self._dp_comp, network, config.replicas)
        param_comp = param_comp_of(config.param_comp)
        if config.shard:
            self._check_sharding(cut, ties)
            self._sharding = Sharding(param_comp)

    def own_stages(self, cut: Sequence[staging.Stage]) -> list[int]:
        return [i for i in range(len(cut)) if self.place_of(i) == self.mesh.place]

    def connect(self, cut: Sequence[staging.Stage], plan: Mapping[str, Any]) -> None:
        shapes = {
            name: [list(p.shape), str(p.dtype), p.requires_grad]
            for stage in cut
            for name, p in stage.named_parameters()
        }
        what_it_comes_to = {
            "mpcomp": __version__,
            "torch": torch.__version__.split("+")[0],
            "kinds of coded integers": list(KINDS),
            "device type": self.mesh.device.type,
            "stages": [list(stage.block_names) for stage in cut],
            "parameters": shapes,
            **plan,
        }
        shake_hands(self.mesh, {**what_it_comes_to, **self.config.compared()})
        machine = platform.node()
        weights = {stage.name: _sample_of(stage) for stage in cut}
        said = exchange(self.mesh, "machine and weights", [machine, weights])
        self.local_ranks = [each[0] for each in said].count(machine)
        # Other replicas take the weights of the first one, so its ranks alone count.
        self.weights = [each[1] for each in said[: self.mesh.pp_size]]
        self.mesh.connect(self._rank_names(len(cut)))

    def _rank_names(self, num_stages: int) -> list[str]:
        mesh = self.mesh
        names = []
        for rank in range(mesh.num_ranks):
            replica, place = divmod(rank, mesh.pp_size)
            there = [str(i) for i in range(num_stages) if self.place_of(i) == place]
            of_replica = f" of replica {replica}" if mesh.num_replicas > 1 else ""
            names.append(f"rank {rank} (stage {' and '.join(there)}{of_replica})")
        return names

    def device_of(self, stage: int) -> torch.device:
        return self.mesh.device

    def prepare(self, model: nn.Module, cut: Sequence[staging.Stage], own: Sequence[int]) -> Plain:
        staging.tie_names(model, cut)  # else its head keeps an embedding that another rank trains
        if self._sharding is None:
            return Plain(list(cut))
        for parameter in (p for stage in cut for p in stage.parameters()):
            parameter.data = parameter.data.contiguous()  # FSDP2 takes no channels-last weights
        # A stage that is sharded cannot be run on tensors without data any more, but a copy can.
        copies = [on_meta(stage) if i in own else stage for i, stage in enumerate(cut)]
        return Plain(copies, on_meta(model))

    def engine(
        self,
        cut: Sequence[staging.Stage],
        boundaries: Sequence[Boundary],
        ties: Sequence[Tie],
        plain: Plain,
    ) -> tuple[Engine, ReplicaSync | None]:
        config, mesh = self.config, self.mesh
        replica_sync = None
        if mesh.num_replicas > 1:
            replica_sync = connect_replicas(
                [cut[i] for i in self.own_stages(cut)],
                self._dp_comp,
                mesh,
                network=config.network,
                seed=config.seed,
                cut=cut,
                tied_alias={
                    name: tie.name
                    for tie in ties
                    if isinstance(tie, TiedWeights)
                    for _, name in tie.copies
                },
                sharding=self._sharding,
            )
        engine = DistributedEngine(
            cut,
            boundaries,
            transport_for(mesh, config.connections),
            self._schedule,
            chunks=config.chunks,
            recompute=config.recompute,
            seed=config.seed,
            in_flight=config.in_flight,
            in_flight_bytes=config.in_flight_bytes,
            ties=ties,
            plain=plain.cut,
            replica_sync=replica_sync,
        )
        return engine, replica_sync

    # -- checks ----------------------------------------------------------------------------------

    def _check_parameters(self, cut: Sequence[staging.Stage]) -> None:
        for place in range(self.mesh.pp_size):
            held = [s for i, s in enumerate(cut) if self.place_of(i) == place]
            if not any(True for stage in held for _ in stage.parameters()):
                raise ValueError(
                    f"{' and '.join(stage.name for stage in held)} would be alone on its rank and "
                    "has no parameters: there is nothing to give to an optimizer there; cut the "
                    "model at another block"
                )

    def _check_one_stage(self, cut: Sequence[staging.Stage]) -> None:
        """A pipeline of one stage compresses nothing, and must not pass for one that does."""
        config = self.config
        given = [config.act_comp, config.grad_comp]
        if len(cut) == 1 and any(str(method) not in ("None", "none") for method in given):
            raise ValueError(
                f"act_comp={config.act_comp}, grad_comp={config.grad_comp} with one stage: there "
                "is no cut to compress at; leave them out, or start more processes"
            )

    def _check_sharding(self, cut: Sequence[staging.Stage], ties: Sequence[Tie]) -> None:
        if self._schedule.splits_backward:
            raise ValueError(
                f"shard=True with schedule={self._schedule.name!r}, which splits backward into two "
                "passes: FSDP2 would free parameters between them; use the engine's own schedule, "
                "GPipe, 1F1B, Interleaved1F1B or LoopedBFS"
            )
        copied = [tie for tie in ties if isinstance(tie, TiedWeights)]
        if copied:
            config = self.config
            apart = {"ties": config.ties, "tie_comp": config.tie_comp, "schedule": config.schedule}
            given = ", ".join(f"{name}={value!r}" for name, value in apart.items() if value)
            cure = f"leave {given} out, and both uses are on one rank"
            if config.together:
                cure = f"{cut[0].why_apart}; untie them, or leave shard out"
            raise ValueError(
                f"shard=True with {' and '.join(name for _, name in copied[0].copies)}, one weight "
                "that two ranks have copies of: replicas would round the pieces of each by "
                f"themselves, and the copies would come apart; {cure}"
            )

    def _check_recompute(self) -> None:
        if self.config.recompute and self._schedule.splits_backward:
            raise ValueError(
                f"recompute=True with schedule={self._schedule.name!r}, which splits backward into "
                "two passes: each would recompute the stage; use another schedule or "
                "recompute=False"
            )


def split_as_asked(model: nn.Module, where: Where, config: PipelineConfig) -> list[staging.Stage]:
    """All stages, the last of them together with the first if the configuration wants that.

    Raises:
        ValueError: it must be, and cannot; or there is no such cut.
    """
    cut = staging.split(model, where, together=config.together, ends_first=config.ends_first)
    if config.ties == "together" and not cut[0].together:
        why = cut[0].why_apart or "no weight of the first stage is used in the last one again"
        raise ValueError(f"ties='together', but {why}; leave ties out")
    return cut


def _unit_seconds(model: nn.Module, config: PipelineConfig) -> list[float]:
    return staging.unit_seconds(
        model, config.sample, together=config.together, ends_first=config.ends_first
    )


def _check_times(of_ranks: Sequence[Any]) -> None:
    """Raises ValueError unless every rank says how long each block takes."""
    num_blocks = len(of_ranks[0]) if isinstance(of_ranks[0], list) else 0
    for rank, times in enumerate(of_ranks):
        known = isinstance(times, list) and len(times) == num_blocks > 0
        if not (known and all(isinstance(s, float) and 0 <= s < float("inf") for s in times)):
            raise ValueError(
                f"rank {rank} says {times!r:.80} in place of the seconds that each of "
                f"{num_blocks} blocks takes: run the same script on every rank"
            )


def _sample_of(stage: staging.Stage) -> int | None:
    """A number for some elements of each parameter; None where there is one without values."""
    parameters = [p.detach().flatten() for p in stage.parameters()]
    if any(p.is_meta for p in parameters):
        return None
    return fingerprint(*(p[:: max(1, p.numel() // 64)] for p in parameters))


def _check_there(device: torch.device) -> None:
    """Raises ValueError if a device is none that is computed on, or is not there."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"devices: {str(device)!r}: stages and messages are on 'cpu' or 'cuda' (which is what "
            "torch calls AMD's GPUs, too); nothing has been tried on others"
        )
    if device.type == "cpu":
        return
    count = torch.cuda.device_count()
    if (device.index or 0) < count:
        return
    if torch.version.cuda is None:
        there = f"torch {torch.__version__} is built without CUDA"
    else:
        there = f"torch finds {count} CUDA devices on this machine"
    raise ValueError(
        f"devices: {str(device)!r} is not there, {there}. Leave devices out, pass 'cpu', or name "
        "devices that are there"
    )
