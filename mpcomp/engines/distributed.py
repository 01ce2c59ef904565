"""The engine of many processes: each rank runs its stages, compressed messages cross the network.

A step on every rank::

    gather   hashes of the data and settings: all ranks are about to do the same
    run      torch's schedule over this rank's stages (`torch_stage`), in which messages move
    agree    loss, overflow and byte counts are summed: one decision for all (`Pipeline`)

Evaluation has no backward and so needs no schedule: each stage runs its microbatches in turn.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import stages as staging
from mpcomp.comm.failures import Faults
from mpcomp.comm.mesh import World
from mpcomp.comm.probe import measure_link
from mpcomp.core.loss import StepLoss
from mpcomp.core.step import Step
from mpcomp.data_parallel.average import CompressedAverage
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.replicas import GradientAverage
from mpcomp.data_parallel.sharded_average import ShardedAverage, Sharding
from mpcomp.engines.announced import Announced, check_announced, named
from mpcomp.engines.base import Engine
from mpcomp.engines.in_flight import Depth
from mpcomp.engines.replica_sync import connect_replicas
from mpcomp.engines.schedules import InFlight1F1B, Schedule
from mpcomp.engines.shape_inference import Planner
from mpcomp.engines.stage_runner import Autocast, StageRunner
from mpcomp.engines.torch_stage import CutStage, run_schedule
from mpcomp.engines.wiring import Wiring
from mpcomp.links.boundary import Boundary
from mpcomp.links.tied_weights import Tie, apart, check_alike, trained_and_frozen

__all__ = ["DistributedEngine"]


class DistributedEngine(Engine):
    """This rank's stages, and its connections.

    Args:
        cut: all stages of the pipeline, those of other ranks on "meta".
        boundaries: one fewer.
        world: the connected ranks.
        schedule: places stages and orders microbatches.
        chunks: number of microbatches in training.
        recompute: recompute activations in backward.
        seed: of the run.
        ties: parameters that two of the stages share.
        dp_comp: what compresses gradients between replicas.
        network: how these are connected.
        plain: all stages, with copies on "meta" of those that are sharded; for plans.
        sharding: how replicas share parameters, if they do.
    """

    name = "distributed"

    def __init__(
        self,
        cut: Sequence[staging.Stage],
        boundaries: Sequence[Boundary],
        world: World,
        schedule: Schedule,
        *,
        chunks: int,
        recompute: bool,
        seed: int,
        in_flight: int | str | None = None,
        in_flight_bytes: int | None = None,
        ties: Sequence[Tie] = (),
        dp_comp: ReplicaMethod | None = None,
        network: ReplicaNetwork | None = None,
        plain: Sequence[staging.Stage] | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self.world = world
        self.device = world.device
        self.replica, self.num_replicas = world.replica, world.num_replicas
        self.rank, self.num_ranks = world.rank, world.size
        self.num_in_pipeline = world.ranks_per_pipeline
        self._places = [schedule.place_of(i, world.ranks_per_pipeline) for i in range(len(cut))]
        self.computes_loss = self._places[-1] == world.place
        self._faults = Faults(
            world.store,
            world.rank,
            world.size,
            world.timeout_s,
            world.waits,
            name_of=self._name_of,
            close=self._close,
        )
        self._wiring = Wiring(
            boundaries, world, self._places, lambda: self._faults.where.partition(",")[0]
        )
        crossings = self._wiring.crossings
        self._planner = Planner(plain or cut, self.device)
        self._averages: list[GradientAverage] = []
        self._compresses = dp_comp is not None or sharding is not None
        self._stages = []
        for i, place in enumerate(self._places):
            if place != world.place:
                continue
            runner = StageRunner(cut[i], i, self.device, recompute=recompute, seed=seed)
            stage = CutStage(
                runner,
                len(cut),
                world.pipe_group,
                before=crossings[i - 1] if i > 0 else None,
                after=crossings[i] if i < len(boundaries) else None,
                faults=self._faults,
                replica=self.replica,
                reduce=self._average_over_replicas(cut[i]),
            )
            self._stages.append(stage)
        self._compressed_average: CompressedAverage | ShardedAverage | None = None
        if dp_comp is not None or sharding is not None:
            self._compressed_average = connect_replicas(
                [cut[stage.stage_index] for stage in self._stages],
                dp_comp or replica_method_of(None),
                world,
                self.together,
                device=self.device,
                network=network,
                seed=seed,
                cut=cut,
                ties=ties,
                sharding=sharding,
            )
        self._all_ties = list(ties)
        self._ties = [tie for tie in ties if self._attach(tie, cut)]
        self.schedule = schedule.make(self._stages, chunks, self._loss_of)
        self._loss: StepLoss | None = None
        self._told_rows: list[int] = []
        self._depth: Depth | None = None
        if isinstance(self.schedule, InFlight1F1B):
            self._depth = Depth(
                self.schedule, self._stages, chunks, in_flight, in_flight_bytes, self
            )
        # Groups live until they are destroyed, with a thread and sockets each: not longer than we.
        weakref.finalize(self, world.close).atexit = False
        # No rank goes on, and perhaps ends, while another is still connecting to it.
        self.agree([0.0])

    def _attach(self, tie: Tie, cut: Sequence[staging.Stage]) -> bool:
        """Connects both copies; whether one of them is here. All ranks call this for all ties."""
        channels = self._wiring.channels_of(tie.links)
        here = [stage for stage in self._stages if stage.stage_index in tie.stages]
        for stage in here:
            stage.reduces_last = True
        tie.attach(
            {stage.stage_index: cut[stage.stage_index] for stage in here},
            channels if len(here) == 1 else None,
        )
        return bool(here)

    def _average_over_replicas(self, stage: staging.Stage) -> Callable[[], None]:
        if self.num_replicas == 1 or self._compresses:
            return lambda: None
        average = GradientAverage(stage, self.world.replica_group)
        self._averages.append(average)

        def reduce() -> None:
            with self.world.waits.on(None, "gradients of other replicas"):
                average()

        return reduce

    def _loss_of(self, output: Tensor, numbered: tuple[int, Any]) -> Tensor:
        assert self._loss is not None
        microbatch, target = numbered
        return self._loss(output, target, microbatch)

    # -- running --------------------------------------------------------------------------------

    def forward(
        self, microbatches: Sequence[Any], step: Step, same: tuple[Any, ...]
    ) -> list[Tensor]:
        self._check_same(step, same, 0)
        with self.together(), torch.no_grad():  # a graph would end where this rank does
            parts = self._begin(microbatches, step)
            outputs = []
            for stage in self._stages:
                for i, part in enumerate(parts):
                    output = stage.infer(i, part[stage.stage_index])
                    if stage.is_last:
                        outputs.append(output)
            self._finish()
        return outputs

    def next_tokens(
        self,
        batch: Mapping[str, Any],
        step: Step,
        choose: Callable[[Tensor], Tensor],
        *,
        same: Any = None,
    ) -> list[Tensor]:
        chosen = torch.empty(batch["input_ids"].shape[0], dtype=torch.int64)
        if same is not None:  # what follows is told to all ranks alike
            tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
            self._check_same(step, (tensors,), 0, same)
            with self.together():
                said = self.world.gather([len(chosen)], "rows of all replicas")
            self._told_rows = [rows for (rows,) in said[:: self.num_in_pipeline]]
        with self.together(), torch.no_grad():
            (part,) = self._begin([batch], step)
            for stage in self._stages:
                output = stage.infer(0, part[stage.stage_index])
                if stage.is_last:
                    chosen.copy_(self.choose_finite(output, choose))
            self._finish()
            self._faults.where = "next token"
            told = [torch.empty(rows, dtype=torch.int64) for rows in self._told_rows]
            told[self.replica] = chosen
            for row, tokens in enumerate(told):
                source = row * self.num_in_pipeline + self._places[-1]
                self.world.tell(tokens, source, "next token")
        return told

    def forward_backward(
        self,
        microbatches: Sequence[Any],
        targets: Sequence[Any],
        step: Step,
        loss: StepLoss,
        same: tuple[Any, ...],
    ) -> None:
        all_rows, trained = self._check_same(step, same, loss.terms)
        if trained == len(self._places):
            raise ValueError("nothing to train: no parameter of any stage requires a gradient")
        if self.num_replicas > 1:
            loss.share_with(all_rows, self.num_replicas)
        if self._compressed_average is not None:
            self._compressed_average.check_begin(step)
        self._loss = loss
        waited = self._wiring.waited_s
        with self._depth.choosing() if self._depth else nullcontext(), self.together():
            with apart(self._ties, step):
                parts = self._begin(microbatches, step, trained)
                run_schedule(self.schedule, parts, targets)
                self._finish(train=True)
                self._faults.where = f"step {step.index}, adding up tied gradients"
            for stage in self._stages:
                if stage.reduces_last:
                    stage.reduce()
            if self._compressed_average is not None:
                self._faults.where = f"step {step.index}, exchanging gradients with other replicas"
                self._compressed_average(step)
        self._loss = None
        self.waited_s += self._wiring.waited_s - waited
        if self._compressed_average is not None:
            self._compressed_average.check_finite(step)

    def _check_same(
        self, step: Step, same: tuple[Any, ...], rows: int, everywhere: Any = None
    ) -> tuple[int, int]:
        """Compares what ranks are about to do: ``everywhere`` on all, ``same`` in each replica.

        Returns:
            The rows of all replicas, and the first stage with something to train.

        Raises:
            ValueError: ranks were handed other data, or take another step; on every rank, and
                before anything has been sent.
        """
        self._faults.where = f"step {step.index}, start"
        autocast = Autocast.of_caller(self.device)
        training = [s.stage_index for s in self._stages if s.has_trainable]
        announced = Announced.of(
            step,
            (autocast, everywhere),
            same,
            rows=rows,
            trained=min(training, default=len(self._places)),
            tied=trained_and_frozen(self._all_ties),
        )
        with self.together():
            said = self.world.gather(list(announced), f"start of {named(step)}")
        row = self.num_in_pipeline
        found = [Announced(*line) for line in said]
        check_announced(found, step, row)
        own_row = found[row * self.replica : row * (self.replica + 1)]
        if step.train:
            check_alike(
                self._all_ties,
                reduce(or_, (one.tied_trained for one in own_row)),
                reduce(or_, (one.tied_frozen for one in own_row)),
            )
        return sum(one.rows for one in found[::row]), min(one.trained for one in own_row)

    def _begin(
        self, microbatches: Sequence[Any], step: Step, trained: int = 0
    ) -> list[dict[int, Any]]:
        """Posts receives; returns of each microbatch what each stage here takes, by stage."""
        autocast = Autocast.of_caller(self.device)
        metas = [self._planner.crossing(batch, autocast) for batch in microbatches]
        if isinstance(self._compressed_average, ShardedAverage):
            self._compressed_average.begin(step)
        for stage in self._stages:
            stage.begin(step, metas, autocast, trained)
        return [
            {stage.stage_index: stage.inputs(batch) for stage in self._stages}
            for batch in microbatches
        ]

    def _finish(self, *, train: bool = False) -> None:
        for stage in self._stages:
            stage.finish()
        if isinstance(self._compressed_average, ShardedAverage) and not train:
            self._compressed_average.end()

    @property
    def in_flight(self) -> int | None:  # type: ignore[override]
        """Microbatches that the first stage has under way; None with torch's schedules."""
        return self.schedule.in_flight if isinstance(self.schedule, InFlight1F1B) else None

    def forget_shapes(self) -> None:
        self._planner.forget()

    # -- agreement ------------------------------------------------------------------------------

    def agree(self, figures: Sequence[float]) -> list[float]:
        with self.together("end of a step"):
            return self.world.sum(figures, "end of a step")

    def everywhere(self, output: Tensor | None) -> Tensor:
        last = self._places[-1]
        with self.together():
            for row in range(self.num_replicas):
                source = row * self.num_in_pipeline + last
                shared = self.world.share_tensor(output, source, "output of the last stage")
                if row == self.replica:
                    own = shared
        return own

    def collect(self, value: Any) -> list[Any]:
        with self.together():
            return [
                self.world.share(value, rank, "figures of all ranks")
                for rank in range(self.num_ranks)
            ]

    def share_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        shared: dict[str, Tensor] = {}
        with self.together():
            for rank in range(self.num_in_pipeline):  # of the first replica
                names = self.world.share(list(tensors), rank, "names of weights")
                for name in names:
                    own = tensors[name] if rank == self.rank else None
                    shared[name] = self.world.share_tensor(own, rank, "weights")
        return shared

    def probe(self) -> list[tuple[float, float] | None]:
        own: list[tuple[float, float] | None] = []
        with self.together():
            self._faults.where = "measuring links"
            for i, crossing in enumerate(self._wiring.crossings):
                if crossing is None or not crossing.act.on_wire:
                    own.append(None)
                    continue
                sends = self._places[i] == self.world.place
                own.append(measure_link(crossing.act, crossing.grad, sends=sends))
        slowest: list[tuple[float, float] | None] = []
        for found in zip(*self.collect(own), strict=True):
            known = [(rate, delay) for rate, delay in filter(None, found)]
            slowest.append(min(known) if known else None)
        return slowest

    def align_replicas(self) -> None:
        if self.num_replicas == 1:
            return
        with self.together(), self.world.waiting("buffers of the first replica"):
            for stage in self._stages:
                for buffer in stage.submod.buffers():
                    dist.broadcast(buffer, src=self.world.place, group=self.world.replica_group)

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        averages: list[GradientAverage | CompressedAverage | ShardedAverage] = [*self._averages]
        if self._compressed_average is not None:
            averages.append(self._compressed_average)
        for average in averages:
            average.enabled = False
        try:
            yield
        finally:
            for average in averages:
                average.enabled = True

    @property
    def exchange(self) -> Exchange | None:
        average = self._compressed_average
        return None if average is None else average.exchange

    def together(self, where: str = "") -> AbstractContextManager[None]:
        self._faults.where = where or self._faults.where
        return self._faults.watch()

    def device_of(self, stage: int) -> torch.device:
        return self.device

    # -- the end --------------------------------------------------------------------------------

    def _name_of(self, rank: int) -> str:
        place = rank % self.num_in_pipeline
        own = [str(i) for i, at in enumerate(self._places) if at == place]
        replica = f" of replica {rank // self.num_in_pipeline}" if self.num_replicas > 1 else ""
        return f"rank {rank} (stage {' and '.join(own)}{replica})"

    def _close(self) -> None:
        """Drops all connections, so that ranks that wait for this one need not wait any longer.

        A socket closes when nothing refers to its group any more, not even a pending receive in
        the frame of a traceback.
        """
        self._wiring.close()
        for stage in self._stages:
            stage.close()
        self._averages.clear()
        if self._compressed_average is not None:
            self._compressed_average.exchange.close()
        self._compressed_average = None
        self.world.close()
        gc.collect()
