"""The engine of many processes: each rank runs its stages, compressed messages cross the network.

A step on every rank::

    gather   hashes of the data and settings: all ranks are about to do the same. Meanwhile the
             first rank runs its first microbatch; what that changed is put back if they are not
    run      torch's schedule over this rank's stages (`torch_stage`), in which messages move
    reduce   gradients of tied weights are added up, then those of replicas exchanged
    sum      loss, overflow and byte counts: one decision for all (`mpcomp.api.training_steps`)

Evaluation has no backward and so needs no schedule: each stage runs its microbatches in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

import stages as staging
from mpcomp.comm.handshake import NO_DATA, StepFingerprint, check_step, step_name
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.comm.probe import measure_link
from mpcomp.comm.transport import Transport
from mpcomp.core.context import Step, TensorMeta
from mpcomp.core.loss import StepLoss
from mpcomp.core.threads import codes_beside
from mpcomp.data_parallel.replica_sync import ReplicaSync
from mpcomp.engines.background import Background
from mpcomp.engines.base import Engine, choose_finite
from mpcomp.engines.in_flight import Depth
from mpcomp.engines.schedules import DEFAULT_SCHEDULE, InFlight1F1B, Schedule
from mpcomp.engines.shape_inference import Planner
from mpcomp.engines.stage_runner import Autocast, StageRunner
from mpcomp.engines.torch_stage import CutStage, run_schedule
from mpcomp.engines.updates import Updates
from mpcomp.engines.wiring import Wiring
from mpcomp.links.boundary import Boundary
from mpcomp.links.tied_weights import (
    Tie,
    TiedWeights,
    check_alike,
    separate_gradients,
    trained_and_frozen,
)

__all__ = ["DistributedEngine"]


class DistributedEngine(Engine):
    """This rank's stages, and its connections.

    Args:
        cut: all stages of the pipeline, those of other ranks on "meta".
        boundaries: one fewer.
        transport: between the connected ranks.
        schedule: places stages and orders microbatches.
        chunks: number of microbatches in training.
        recompute: recompute activations in backward.
        seed: of the run.
        in_flight: depth of the engine's own schedule, as `Depth` takes it.
        in_flight_bytes: bound on what a rank keeps for backward.
        ties: parameters that two of the stages share.
        plain: all stages, with copies on "meta" of those that are sharded; for plans.
        replica_sync: the replicas of this rank's stages; None for one replica.

    Attributes:
        places: the rank of a pipeline that has each stage.
    """

    name = "distributed"
    mesh: ProcessMesh

    def __init__(
        self,
        cut: Sequence[staging.Stage],
        boundaries: Sequence[Boundary],
        transport: Transport,
        schedule: Schedule,
        *,
        chunks: int,
        recompute: bool,
        seed: int,
        in_flight: int | str | None = None,
        in_flight_bytes: int | None = None,
        ties: Sequence[Tie] = (),
        plain: Sequence[staging.Stage] | None = None,
        replica_sync: ReplicaSync | None = None,
    ) -> None:
        self.mesh = mesh = transport.mesh
        self.connections = transport.connections
        self.together = cut[0].together
        self._bounded = in_flight_bytes is not None
        self.places = [schedule.place_of(i, mesh.pp_size) for i in range(len(cut))]
        self.output_place = self.places[-1]
        self._replica_sync = replica_sync
        self._stages: list[CutStage] = []
        self._wiring = Wiring(boundaries, transport, self.places)
        mesh.on_close(self._close)
        connected = self._wiring.boundaries
        # The order in which torch's schedules take messages is theirs.
        beside = schedule is DEFAULT_SCHEDULE and codes_beside(self.device, mesh.num_ranks)
        self._background = Background(mesh) if beside else None
        self._planner = Planner(plain or cut, self.device)
        for i, place in enumerate(self.places):
            if place != mesh.place:
                continue
            runner = StageRunner(cut[i], i, self.device, recompute=recompute, seed=seed)
            stage = CutStage(
                runner,
                len(cut),
                mesh,
                before=connected[i - 1] if i > 0 else None,
                after=connected[i] if i < len(boundaries) else None,
                background=self._background,
            )
            self._stages.append(stage)
        self._all_ties = list(ties)
        self._ties = [tie for tie in ties if self._attach(tie, cut)]
        self.schedule = schedule.make(self._stages, chunks, self._loss_of)
        #: Of the step under way.
        self._loss: StepLoss | None = None
        self._traced: Step | None = None
        self._rows_of_replicas: list[int] = []
        #: What waits for the other ranks' records of a step that is announced before its batch.
        self._announced: Callable[[], tuple[float, int]] | None = None
        self._depth: Depth | None = None
        if isinstance(self.schedule, InFlight1F1B):
            self._depth = Depth(
                self.schedule, self._stages, chunks, in_flight, in_flight_bytes, mesh
            )
        # Not longer than we: else a process that makes many pipelines has ever more of them.
        mesh.destroy_with(self)
        # No rank goes on, and perhaps ends, while another is still connecting to it.
        mesh.all_reduce_sum([0.0])

    def _attach(self, tie: Tie, cut: Sequence[staging.Stage]) -> bool:
        """Connects both copies; whether one of them is here. All ranks call this for all ties."""
        indices = [s.stage_index for s in self._stages if s.stage_index in tie.stages]
        here = {index: cut[index] for index in indices}
        if isinstance(tie, TiedWeights):
            channels = self._wiring.channels_of(tie.links)
            tie.attach(here, channels if len(here) == 1 else None)
        else:
            tie.find(here)
        return bool(here)

    def _loss_of(self, output: Tensor, numbered: tuple[int, Any]) -> Tensor:
        assert self._loss is not None
        microbatch, target = numbered
        assert self._traced is not None
        with self._traced.during("loss", len(self.places) - 1, microbatch):
            # torch detaches the output in place between the two passes of a split backward. A loss
            # with parameters keeps what it was given for the second: here an alias of it.
            return self._loss(output.view_as(output), target, microbatch)

    # -- running --------------------------------------------------------------------------------

    def forward(
        self, microbatches: Sequence[Any], step: Step, same: tuple[Any, ...] | None
    ) -> list[Tensor]:
        if same is not None:
            self._check_same(step, same, 0)
        with (
            self.mesh.abort_all_on_error(),
            torch.no_grad(),
        ):  # a graph would end where this rank does
            return self._inferred(microbatches, step)

    def _inferred(self, microbatches: Sequence[Any], step: Step) -> list[Tensor]:
        """Outputs of the last stage; none where it is not."""
        parts = self._begin(microbatches, step)
        self._post()
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
        everywhere: bool = True,
    ) -> list[Tensor]:
        if not everywhere:
            with self.mesh.abort_all_on_error(), torch.no_grad():
                outputs = self._inferred([batch], step)
                return [choose_finite(output, choose).cpu() for output in outputs]
        chosen = torch.empty(batch["input_ids"].shape[0], dtype=torch.int64)
        if same is not None:  # what follows goes to all ranks alike
            tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
            self._check_same(step, (tensors,), 0, same)
            gathered = self.mesh.all_gather([len(chosen)], "rows of all replicas")
            self._rows_of_replicas = [rows for (rows,) in gathered[:: self.mesh.pp_size]]
        with self.mesh.abort_all_on_error(), torch.no_grad():
            for output in self._inferred([batch], step):
                chosen.copy_(choose_finite(output, choose))
            self.mesh.where = "next token"
            of_replicas = [torch.empty(rows, dtype=torch.int64) for rows in self._rows_of_replicas]
            of_replicas[self.mesh.replica] = chosen
            for replica, tokens in enumerate(of_replicas):
                source = replica * self.mesh.pp_size + self.output_place
                self.mesh.broadcast(tokens, source, "next token")
        return of_replicas

    def forward_backward(
        self,
        microbatches: Sequence[Any],
        targets: Sequence[Any],
        step: Step,
        loss: StepLoss,
        same: tuple[Any, ...],
        updates: Updates | None = None,
    ) -> None:
        agreed = self._announce(step, same, loss.terms)
        sync = self._replica_sync
        parts, back = self._run_ahead(microbatches, step, updates)
        try:
            all_terms, trained = agreed()
            if trained == len(self.places):
                raise ValueError("nothing to train: no parameter of any stage requires a gradient")
            if sync is not None:
                sync.check_begin(step)
        except BaseException:
            back()
            raise
        if self.mesh.num_replicas > 1:
            loss.share_with(all_terms, self.mesh.num_replicas)
        self._loss, self._traced = loss, step
        waited = self._wiring.waited_s
        # With updates the depth is given: on it depends by which weights gradients are made.
        searches = self._depth if updates is None else None
        choosing = searches.choosing() if searches else nullcontext()
        with choosing, self.mesh.abort_all_on_error():
            parts = parts or self._begin(microbatches, step, updates)
            with separate_gradients(self._ties, step) as added_up:
                if isinstance(self.schedule, InFlight1F1B):
                    stashed = [one.stashed for one in self._stages if one.stashed is not None]
                    self.schedule.updates = (
                        None if updates is None else updates.completed(stashed, added_up)
                    )
                with self._background.under_way() if self._background else nullcontext():
                    self._post(trained)
                    run_schedule(self.schedule, parts, targets)
                self._finish(train=True)
                self.mesh.where = f"step {step.index}, adding up tied gradients"
            if sync is not None:
                with step.during("exchange"):
                    sync.reduce(step)
        self._loss = self._traced = None
        self.waited_s += self._wiring.waited_s - waited
        if sync is not None:
            sync.check_finite(step)

    def plan(self, microbatches: Sequence[Any]) -> list[list[TensorMeta]]:
        """Of each microbatch what crosses each cut, under the caller's autocast."""
        autocast = Autocast.of_caller(self.device)
        return [self._planner.plan(batch, autocast) for batch in microbatches]

    def announce(
        self, step: Step, same: tuple[Any, ...] = (), settings: Any = None, *, failed: bool = False
    ) -> None:
        """Sends the others what this rank is about to do; `agree` or a step then waits for them.

        Args:
            step: as far as it is known without its batch.
            same: what must be the same on all ranks of a replica.
            settings: what must be the same on all ranks.
            failed: whether this rank has no data for it.
        """
        self._announced = self._announce(step, same, 0, settings, failed=failed)

    def agree(self, step: Step) -> None:
        """Waits for what ranks have announced of a step, and compares it.

        Raises:
            ValueError: ranks do not take the same step, or one has no data; on every rank.
        """
        self._check_same(step, (), 0)

    def check_updates(self) -> None:
        if not isinstance(self.schedule, InFlight1F1B):
            raise ValueError(
                "updates within a step, and a schedule of torch's: leave schedule out, as the "
                "engine's own makes them, or leave update out"
            )
        if self.mesh.num_replicas > 1:
            raise ValueError(
                "updates within a step, and replicas, which average their gradients at the end of "
                "it: train one replica, or leave update out"
            )
        if self._bounded:
            raise ValueError(
                "updates within a step say how many microbatches are under way, which is "
                "in_flight_bytes's to say: leave out one of the two"
            )

    def _check_same(
        self, step: Step, same: tuple[Any, ...], terms: float, settings: Any = None
    ) -> tuple[float, int]:
        """Compares what ranks are about to do: ``settings`` on all, ``same`` in each replica.

        Returns:
            The terms of all replicas, and the first stage with something to train.

        Raises:
            ValueError: ranks were handed other data, or take another step; on every rank, and
                before anything has been sent.
        """
        return self._announce(step, same, terms, settings)()

    def _announce(
        self,
        step: Step,
        same: tuple[Any, ...],
        terms: float,
        settings: Any = None,
        *,
        failed: bool = False,
    ) -> Callable[[], tuple[float, int]]:
        """`_check_same` in two parts: sends, and gives what waits for the other ranks."""
        announced, self._announced = self._announced, None
        if announced is not None:
            return announced
        self.mesh.where = f"step {step.index}, start"
        autocast = Autocast.of_caller(self.device)
        training = [s.stage_index for s in self._stages if s.has_trainable]
        own = StepFingerprint.of(
            step,
            (autocast, settings),
            same,
            terms=terms,
            trained=min(training, default=len(self.places)),
            tied=trained_and_frozen(self._all_ties),
        )
        if failed:
            own = own._replace(data=NO_DATA)
        gathered = self.mesh.announce(own.numbers, f"start of {step_name(step)}")
        return lambda: self._agreed(step, gathered)

    def _agreed(self, step: Step, gathered: Callable[[], list[list[int]]]) -> tuple[float, int]:
        """The second part of `_announce`."""
        self.mesh.where = f"step {step.index}, start"
        row = self.mesh.pp_size
        found = [StepFingerprint.from_numbers(line) for line in gathered()]
        check_step(found, step, row)
        of_replica = found[row * self.mesh.replica : row * (self.mesh.replica + 1)]
        if step.train:
            check_alike(
                self._all_ties,
                reduce(or_, (one.tied_trained for one in of_replica)),
                reduce(or_, (one.tied_frozen for one in of_replica)),
            )
        return sum(one.terms for one in found[::row]), min(one.trained for one in of_replica)

    def _run_ahead(
        self, microbatches: Sequence[Any], step: Step, updates: Updates | None
    ) -> tuple[list[dict[int, Any]] | None, Callable[[], None]]:
        """Runs the first microbatch where that needs no other rank, while ranks agree on a step.

        Their records are two latencies on their way to the first rank, which is done first with a
        step and would only wait for them.

        Returns:
            What `_begin` does, None where nothing ran; and a function that puts back what ran.
        """
        first = self._stages[0]
        sharded = self._replica_sync is not None and self._replica_sync.gathers
        counts_bytes = self._depth is not None and self._depth.counts_bytes
        if not first.is_first or sharded or counts_bytes:
            return None, lambda: None
        with self.mesh.abort_all_on_error():
            try:
                parts = self._begin(microbatches, step, updates)
            except Exception:  # which comes again if ranks agree on the step
                return None, first.finish
            return parts, first.run_ahead(parts[0][0])

    def _begin(
        self, microbatches: Sequence[Any], step: Step, updates: Updates | None = None
    ) -> list[dict[int, Any]]:
        """Returns of each microbatch what each stage here takes, by stage."""
        torch.clear_autocast_cache()  # weights have changed since an earlier step in this context
        autocast, metas = Autocast.of_caller(self.device), self.plan(microbatches)
        if self._replica_sync is not None:
            self._replica_sync.begin(step)
        for tie in self._ties:
            tie.follow()
        for stage in self._stages:
            stage.begin(step, metas, autocast, updates)
        return [
            {stage.stage_index: stage.taken_from(batch) for stage in self._stages}
            for batch in microbatches
        ]

    def _post(self, trained: int = 0) -> None:
        for stage in self._stages:
            stage.post(trained)

    def _finish(self, *, train: bool = False) -> None:
        for stage in self._stages:
            stage.finish()
        if self._replica_sync is not None and not train:
            self._replica_sync.end()

    @property
    def in_flight(self) -> int | None:  # type: ignore[override]
        """Microbatches that the first stage has under way; None with torch's schedules."""
        return self.schedule.in_flight if isinstance(self.schedule, InFlight1F1B) else None

    def forget_shapes(self) -> None:
        self._planner.forget()

    def probe(self) -> list[tuple[float, float] | None]:
        own: list[tuple[float, float] | None] = []
        with self.mesh.abort_all_on_error("measuring links"):
            for i, connected in enumerate(self._wiring.boundaries):
                if connected is None or not connected.act.channel.on_wire:
                    own.append(None)
                    continue
                sends = self.places[i] == self.mesh.place
                own.append(measure_link(connected.act.channel, connected.grad.channel, sends=sends))
        slowest: list[tuple[float, float] | None] = []
        for found in zip(*self.mesh.all_gather_object(own), strict=True):
            known = [(rate, delay) for rate, delay in filter(None, found)]
            slowest.append(min(known) if known else None)
        return slowest

    def stage_shares(self) -> list[float]:
        if len(self._stages) == 1:
            return [1.0]
        # Other steps with several stages on a rank are not simulated.
        seconds = [stage.forward_s for stage in self._stages]
        if not self.together or self.device.type != "cpu" or not sum(seconds):
            return []
        return [each / sum(seconds) for each in seconds]

    def device_of(self, stage: int) -> torch.device:
        return self.device

    def _close(self) -> None:
        """Lets go of all connections."""
        self._announced = None
        self._wiring.close()
        for stage in self._stages:
            stage.close()
        if self._replica_sync is not None:
            self._replica_sync.close()
