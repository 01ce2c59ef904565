"""Data-parallel replicas in one process, on one device: for studies on a machine with one GPU.

Replicas hold the same weights after every step, as they apply the same mean. So one model and one
optimizer do for all of them::

    share 0 ── forward, backward ── gradients 0 ── exchange 0 ─┐
    share 1 ── forward, backward ── gradients 1 ── exchange 1 ─┼─ mean ── optimizer
    share 2 ── forward, backward ── gradients 2 ── exchange 2 ─┘

The shares of a batch are the microbatches of a pipeline of one stage, whose engine keeps their
gradients apart. The exchanges are the library's, in threads (`recipes.lab.together`).

As many processes over gloo give the same bits, if they are two. Of more, only the order differs in
which a ring adds. Share i has the data, the augmentation and the dropout of replica i. BatchNorm
normalises each share by itself. Its running statistics are the first replica's alone: DDP and an
evaluation of several processes take these as well.

Nothing is sent, and replicas take turns, so the seconds of an exchange are the turns of all. GraVAC
weighs such seconds: describe its links (``bandwidth_mbps=``), or messages cost it nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import stages as staging
from mpcomp.api.pipeline import Pipeline
from mpcomp.checkpoint.finding import find
from mpcomp.core.context import Step
from mpcomp.core.loss import StepLoss
from mpcomp.core.sent import Sent
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.replica_sync import ReplicaSync, trained_in
from mpcomp.engines.local import LocalEngine
from mpcomp.engines.stage_runner import frozen_buffers
from mpcomp.engines.updates import Updates
from recipes import wikitext
from recipes.adaptive_log import AdaptiveLog
from recipes.cifar10 import ImageTrainer
from recipes.config import AnyConfig, RunConfig
from recipes.image_config import ImageConfig
from recipes.lab.together import InOneProcess
from recipes.replica_log import ReplicaLog
from recipes.text_config import TextConfig
from recipes.training import Trainer
from recipes.wikitext import TextTrainer

__all__ = ["ReplicaImageTrainer", "ReplicaTextTrainer", "Together"]


class _Shares(ReplicaSync):
    """The gradients of each share, kept apart until all are there.

    Args:
        stage: the whole model.
        engine: runs it.
        together: the exchanges.

    Attributes:
        together: as given.
    """

    counts_on = True

    def __init__(self, stage: nn.Module, engine: LocalEngine, together: InOneProcess) -> None:
        super().__init__([stage], engine.mesh)  # type: ignore[arg-type]  # of one process
        self.exchange = together.first
        self.together = together
        self._parameters = trained_in([stage])
        self._kept: list[dict[str, Tensor]] = [{} for _ in together.exchanges]

    @property
    def sent(self) -> Sent:
        """By all replicas, as they are here."""
        return sum((each.totals.sent for each in self.together.exchanges), Sent())

    def take(self, replica: int) -> None:
        """Adds the gradients that there are to a replica's, and leaves none."""
        kept = self._kept[replica]
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                kept[name] = kept[name] + parameter.grad if name in kept else parameter.grad
            parameter.grad = None

    def reduce(self, step: Step) -> None:
        if not self.enabled:
            return
        own = [
            {
                name: kept[name] if name in kept else torch.zeros_like(parameter)
                for name, parameter in self._parameters.items()
            }
            for kept in self._kept
        ]
        self._forget()
        means = self.together.average(
            own, lr=step.lr, loss_scale=step.loss_scale, compress=step.compress_dp
        )
        for name, parameter in self._parameters.items():
            parameter.grad = means[name]

    def finish_step(self, finite: bool) -> None:
        if not finite:
            self._forget()

    def _forget(self) -> None:
        for kept in self._kept:
            kept.clear()

    def align_buffers(self) -> None:
        pass  # there are no others than the first replica's

    def close(self) -> None:
        self.together.close()


class _Engine(LocalEngine):
    """The engine of one stage whose microbatches are the replicas' shares, in turn."""

    shares: _Shares

    def __init__(self, stage: staging.Stage, device: torch.device, config: RunConfig) -> None:
        super().__init__([stage], (), [device], recompute=config.recompute, seed=config.seed)
        self._stage = stage

    def forward(
        self, microbatches: Sequence[Any], step: Step, same: tuple[Any, ...] | None = ()
    ) -> list[Tensor]:
        if not step.train:
            return super().forward(microbatches, step, same)
        first, *others = enumerate(microbatches)
        outputs = self._run([first], step)  # which alone counts in BatchNorm's statistics
        with frozen_buffers(self._stage):
            return outputs + self._run(others, step)

    def forward_backward(
        self,
        microbatches: Sequence[Any],
        targets: Sequence[Any],
        step: Step,
        loss: StepLoss,
        same: tuple[Any, ...] = (),
        updates: Updates | None = None,
    ) -> None:
        loss.factor = float(len(microbatches))  # so that each share's is the mean over its own rows
        super().forward_backward(microbatches, targets, step, loss, same, updates)
        assert loss.total is not None
        loss.total = loss.total / len(microbatches)
        self.shares.reduce(step)
        self.shares.check_finite(step)

    def _backward(self, output: Tensor, target: Any, i: int, step: Step, loss: StepLoss) -> None:
        super()._backward(output, target, i, step, loss)
        self.shares.take(i)


class _Pipeline(Pipeline):
    """A pipeline that finds in its checkpoints what all replicas remember."""

    def load(self, folder: str | Path, **wanted: Any) -> dict[str, Any]:
        extra = super().load(folder, **wanted)
        # The library takes a checkpoint of one process for one without replicas.
        part = find(self.mesh, Path(folder)).part(0)
        assert isinstance(self.replica_sync, _Shares)
        self.replica_sync.together.load_state_dict(
            {"tensors": part.read_state("replicas."), "rest": part.meta["replicas"]}
        )
        return extra


#: Options of a run whose replicas can be in one process.
_REQUIRED: Final[Mapping[str, Any]] = {
    **{"split": "1", "chunks": 1, "updates": 1, "act": ("none",), "grad": ("none",)},
    **{"shard": False, "per_machine": 1},
}


class Together(Trainer[AnyConfig]):
    """A trainer of replicas in this process, with the configuration of several processes.

    A batch holds the shares of all replicas, one after the other.

    Attributes:
        together: the exchanges; `close` ends their threads.
    """

    train_loader: Any
    together: InOneProcess

    def cut(self, model: nn.Module, num_batches: int, **choices: Any) -> None:
        """Makes a pipeline of one stage, which `mpcomp.pipeline` has no use for.

        Raises:
            ValueError: replicas of this configuration cannot be in one process.
        """
        config = self.config
        for name, accepted in _REQUIRED.items():
            if (value := getattr(config, name)) != accepted:
                raise ValueError(f"{name} is {value}; replicas in one process take {accepted}")
        if config.replicas < 2 or self.ranks.size > 1:
            raise ValueError(
                f"replicas is {config.replicas}, processes are {self.ranks.size}; pass 2 or more "
                "replicas, and start one process"
            )
        stages = staging.split(model, 1)
        stage = stages[0].to(self.device)
        engine = _Engine(stage, self.device, config)
        self.together = InOneProcess(
            trained_in(stages),
            replica_method_of(config.dp_comp),
            config.replicas,
            network=config.network(),
            seed=config.seed,
        )
        engine.shares = _Shares(stage, engine, self.together)
        self.num_batches = num_batches
        self.pipe = _Pipeline(
            stages,
            stages,
            (),
            engine,
            chunks=config.replicas,
            loss_fn=choices["loss_fn"],
            scaler=self.scaler,
            warmup_steps=config.warmup_steps * self.accumulate
            or config.warmup_epochs * num_batches,
            replica_sync=engine.shares,
        )
        self.replica_log = ReplicaLog(self.pipe)
        self.adaptive_log = AdaptiveLog(self.pipe)

    def shares(self, epoch: int) -> Iterator[tuple[Any, ...]]:
        """The batches of an epoch, of all replicas."""
        number = self.config.replicas
        loaders = (
            dataclasses.replace(self.train_loader, replica=i, num_replicas=number)
            for i in range(number)
        )
        return zip(*(loader.epoch(epoch) for loader in loaders), strict=True)

    def close(self) -> None:
        """Ends the replicas' threads."""
        self.together.close()

    def placement(self) -> str:
        """Number and place of the replicas, in words."""
        return f"{self.config.replicas} replicas in one process"


class ReplicaImageTrainer(Together[ImageConfig], ImageTrainer):
    """The trainer of an image classifier on replicas in one process."""

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(x, y, ids) of all replicas."""
        for shares in self.shares(epoch):
            x, y, ids = map(torch.cat, zip(*shares, strict=True))
            yield x, y, ids


class ReplicaTextTrainer(Together[TextConfig], TextTrainer):
    """The trainer of a language model on replicas in one process."""

    def batches(self, epoch: int) -> Iterator[wikitext.Batch]:
        """(mapping, ids, None) of all replicas: no cut has buffers to fetch early."""
        for shares in self.shares(epoch):
            arguments, ids, _ = zip(*shares, strict=True)
            whole = {name: torch.cat([each[name] for each in arguments]) for name in arguments[0]}
            yield whole, torch.cat(ids), None
