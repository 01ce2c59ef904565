"""Trains a compressed pipeline: epochs, both evaluations, checkpoints, resumption, a run folder.

What is trained on, and how a batch of it is taken, is a subclass's: `recipes.cifar10`,
`recipes.wikitext`.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import mpcomp
from mpcomp.comm.paced import slow_links
from mpcomp.compressors.compiling import compile_coder
from mpcomp.core.account import Account
from mpcomp.core.sent import Sent
from recipes import adaptive_log, plots, replica_log
from recipes.adaptive_log import AdaptiveLog
from recipes.config import AnyConfig
from recipes.metric import Metric
from recipes.placement import check_ranks, common_dtype, devices_of, parse_split
from recipes.ranks import Ranks, Stopped
from recipes.replica_log import ReplicaLog
from recipes.run_folder import RunFolder, write_json
from recipes.summary import History, Summary


class Trainer(ABC, Generic[AnyConfig]):
    """A pipeline with its optimizer, schedule and data; `history` has an entry for each epoch.

    Under torchrun there is one on every rank, and all are told the same. A subclass's constructor
    calls `cut`, and sets the optimizer and the scheduler.

    Attributes:
        num_batches: batches of an epoch, of which each is a call of the pipeline.
        accumulate: batches of one step of the optimizer; the last one of an epoch may have fewer.
            With ``updates`` a batch has several steps, and this is 1.
    """

    metric: ClassVar[Metric]
    samples: ClassVar[str]  # whereof a rate is shown, as in "images"
    pipe: mpcomp.Pipeline
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    num_batches: int
    accumulate: int = 1

    def __init__(self, config: AnyConfig, ranks: Ranks | None = None) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        self.ranks = ranks = ranks or Ranks()
        self.devices = ranks.together(lambda: devices_of(config, ranks))
        self.device = self.devices[0]
        self.dtype = common_dtype(config.precision, self.device, ranks)
        # Only fp16 has so small a range that gradients underflow without a loss scale.
        self.scaler = (
            torch.amp.GradScaler(self.device.type) if self.dtype is torch.float16 else None
        )
        self.history: History = []
        #: Of an epoch that is to be gone on with: what was counted in it, and after how many steps.
        self._within: dict[str, Any] | None = None
        self._run_log: mpcomp.RunLog | None = None

    def cut(self, model: nn.Module, num_batches: int, **choices: Any) -> None:
        """Makes the pipeline.

        Args:
            model: on the CPU.
            num_batches: of an epoch.
            **choices: of `mpcomp.pipeline`, beyond what the configuration says.

        Raises:
            ValueError: the model cannot be cut like this, or not for these processes.
        """
        config = self.config
        check_ranks(config, model, self.ranks.size)
        self.num_batches = num_batches
        with slow_links(config.mbps):
            self.pipe = self._pipeline(model, choices)
        if config.updates > 1:
            self.ranks.together(lambda: self.pipe.check_updates(config.updates))
        self.replica_log = ReplicaLog(self.pipe)
        self.adaptive_log = AdaptiveLog(self.pipe)

    def _pipeline(self, model: nn.Module, choices: Mapping[str, Any]) -> mpcomp.Pipeline:
        config, num_batches = self.config, self.num_batches
        warmup_batches = (
            config.warmup_steps * self.accumulate // config.updates
            or config.warmup_epochs * num_batches
        )
        return mpcomp.pipeline(
            model,
            chunks=config.call_chunks,
            split=parse_split(config.split),
            act_comp=self.methods("act_comp", config.act),
            grad_comp=self.methods("grad_comp", config.grad),
            budget=config.budget,
            warmup_steps=warmup_batches,
            recompute=config.recompute,
            seed=config.seed,
            devices=self.devices if len(self.devices) > 1 else self.device,
            replicas=config.replicas,
            **self._between_replicas(),
            schedule=config.schedule,
            in_flight=config.in_flight,
            connections=config.connections,
            timeout=config.timeout,
            scaler=self.scaler,
            **choices,
        )

    def methods(self, argument: str, specs: tuple[str, ...]) -> Any:
        """Methods of the cuts, as an argument of `mpcomp.pipeline` takes them."""
        return specs[0] if len(specs) == 1 else list(specs)

    def _between_replicas(self) -> dict[str, Any]:
        config = self.config
        if config.replicas == 1:
            return {}
        # Also for "none": the exchange counts what goes uncompressed.
        found = {"dp_comp": config.dp_comp, "network": config.network(), "shard": config.shard}
        return {**found, "param_comp": config.param_comp} if config.shard else found

    @property
    def update(self) -> Callable[[], None] | None:
        """The step that a call makes ``updates`` times; None where it makes none itself."""
        return self._update if self.config.updates > 1 else None

    # -- what a subclass adds -----------------------------------------------------------------

    @abstractmethod
    def batches(self, epoch: int) -> Iterator[Any]:
        """The training batches of an epoch, counted from 0."""

    @abstractmethod
    def forward_backward(self, batch: Any) -> Tensor:
        """The loss of a batch, 0-d, whose gradients have been added up."""

    @abstractmethod
    def judge(self) -> float:
        """The metric on all evaluation data, with compression as it is now."""

    @abstractmethod
    def num_samples(self, batch: Any) -> int:
        """Samples of a batch on this replica."""

    def start_epoch(self) -> None:
        """Called before the first batch of an epoch."""

    def end_step(self) -> None:
        """Called after each step of the optimizer; with ``updates`` within a call."""

    def counted(self) -> dict[str, Any]:
        """Numbers that `end_epoch` needs of the epoch so far; the same on all ranks."""
        return {}

    def go_on_in_epoch(self, counted: Mapping[str, Any]) -> None:
        """Called after `start_epoch` in the middle of an epoch, with what `counted` gave."""

    def end_epoch(self) -> dict[str, Any]:
        """Called after the last step of an epoch; what else its entry of the history holds."""
        return {}

    def shown(self) -> dict[str, str]:
        """Further numbers that the progress bar shows."""
        return {}

    def notes(self) -> list[str]:
        """Sentences worth reading before the run, a line each."""
        config, lag = self.config, len(self.pipe.cut_stages) - 1
        notes = []
        if config.mbps is not None:
            notes.append(
                f"links are simulated, {config.mbps:g} Mbit/s each way: a message waits in its "
                "process until its last byte would have arrived, then goes over loopback"
            )
        if config.updates == 1:
            return notes
        suits = "" if config.optimizer == "nadam" else "; --optimizer nadam suits that"
        return [
            *notes,
            f"{config.updates} steps in a call, between which the pipeline does not drain: weights "
            f"of the first stage lack up to {lag} updates{suits}",
        ]

    def finish(self, folder: RunFolder) -> None:
        """Called after the last epoch, on every rank."""

    def close(self) -> None:
        """Lets go of what the trainer holds beside memory: nothing, if it says no more."""

    # -- the run ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Compiles what codes this run's messages: the first step would wait for it."""
        if not any(link.varies for link in self.pipe.links):
            return
        print("compiling what codes messages, once an installation:", end=" ", flush=True)
        begin = time.perf_counter()
        compile_coder()
        print(f"{time.perf_counter() - begin:.1f} s", flush=True)

    def placement(self) -> str:
        """Number and places of stages, in words."""
        text = f"{len(self.pipe.cut_stages)} stages"
        if self.pipe.num_replicas > 1:
            text += f" x {self.pipe.num_replicas} replicas"
        return text + (f" on {self.ranks.size} processes" if self.ranks.size > 1 else "")

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the optimizer in an epoch."""
        return self.iterations_per_epoch * self.config.updates

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations of an epoch: a step of the optimizer each, or all those of a call."""
        return -(-self.num_batches // self.accumulate)

    def fit(
        self,
        folder: RunFolder | None = None,
        *,
        resume: bool = False,
        stop_after: int | None = None,
        trace: int | None = None,
        progress: bool = True,
    ) -> Summary:
        """Trains to the last epoch.

        Args:
            folder: takes metrics, checkpoint, summary and curves; None keeps nothing.
            resume: go on from the folder's checkpoint, if it has one.
            stop_after: end after this many epochs in total, to be resumed later.
            trace: so many steps, not long after the beginning, into the folder.
            progress: show a progress bar.

        Raises:
            Stopped: a signal came; the folder has a checkpoint of the last step.
        """
        with ExitStack() as stack:
            checkpoints = None
            if folder is not None:
                checkpoints = stack.enter_context(self._checkpoints(folder))
                if resume:
                    self._restore(checkpoints.restore())
                self._run_log = self._new_log(folder)
            last_epoch = min(self.config.epochs, stop_after or self.config.epochs)
            if folder is not None and trace is not None:
                stack.enter_context(self._traced(folder, trace, last_epoch))
            self._train(folder, checkpoints, last_epoch, progress=progress)
            if self._run_log is not None:
                self._run_log.close()
        config, steps = self.config, len(self.history) * self.steps_per_epoch
        summary = Summary.of(config, self.metric, self.history, steps=steps)
        finished = summary.epochs == config.epochs
        if folder is not None and finished:
            self.finish(folder)
        if folder is not None and self.ranks.writes:
            folder.write_metrics(self.history)
            if finished:
                write_json(folder.summary, summary.to_json())
        if folder is not None and self.ranks.speaks:
            plots.plot_curves(
                {config.label: summary.history},
                folder.curves,
                self.metric,
                losses={config.label: plots.losses_of_steps(folder, self.iterations_per_epoch)},
            )
        return summary

    def _train(
        self,
        folder: RunFolder | None,
        checkpoints: mpcomp.Checkpoints | None,
        last_epoch: int,
        *,
        progress: bool,
    ) -> None:
        with tqdm(
            total=last_epoch * self.steps_per_epoch,
            initial=self._iterations_done() * self.config.updates,
            disable=not (progress and self.ranks.speaks),
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 10,
        ) as bar:
            while len(self.history) < last_epoch:
                is_last = len(self.history) + 1 == last_epoch
                self.train_epoch(
                    bar, evaluate_after=is_last, folder=folder, checkpoints=checkpoints
                )
                if self._run_log is not None:
                    self._run_log.flush()
                if folder is not None and checkpoints is not None:
                    checkpoints.save(lambda: {"history": self.history})
                    self._write(folder)

    def _iterations_done(self) -> int:
        """Iterations so far."""
        within = 0 if self._within is None else int(self._within["step"])
        return len(self.history) * self.iterations_per_epoch + within

    def _new_log(self, folder: RunFolder) -> mpcomp.RunLog:
        return mpcomp.RunLog(
            self.pipe,
            folder.path,
            total_steps=self.config.epochs * self.iterations_per_epoch,
            samples=self.samples,
            steps_done=self._iterations_done(),
        )

    def _traced(
        self, folder: RunFolder, steps: int, last_epoch: int
    ) -> AbstractContextManager[None]:
        """A context in which steps are traced: the third and those after it, if there are so many.

        The first ones take longer than others.
        """
        iterations = -(-steps // self.config.updates)
        left = last_epoch * self.iterations_per_epoch - self._iterations_done()
        skip = max(0, min(2, left - iterations))
        return self.pipe.trace(
            folder.trace, steps=iterations * self.accumulate, skip=skip * self.accumulate
        )

    def train_epoch(
        self,
        bar: tqdm[Any],
        *,
        evaluate_after: bool,
        folder: RunFolder | None = None,
        checkpoints: mpcomp.Checkpoints | None = None,
    ) -> None:
        """The next epoch, or the rest of one, and both evaluations where they are due."""
        epoch = len(self.history)
        within, self._within = self._within, None
        before = self.history[-1] if self.history else {}
        previous = before if within is None else within
        begun = within["step"] if within is not None else 0
        start = time.perf_counter() - (within["seconds"] if within is not None else 0.0)
        # Counted since the first epoch, also where the meters begin anew after a resumption.
        now = self.pipe.account()
        sent_before = (Sent.from_dict(previous) if previous else Sent()) - now.whole
        account_before = (
            Account.from_dict(previous.get("account")) if previous else Account()
        ) - now

        def sent() -> dict[str, Any]:
            """All bytes since the first epoch, and by what they were for; every rank calls it."""
            now = self.pipe.account()
            parts = (account_before + now).to_dict()["parts"]
            return {**(sent_before + now.whole).to_dict(), "account": parts}

        wire_shown = previous.get("wire_bytes", 0) - self.pipe.wire_bytes
        lr, skipped_steps = self.scheduler.get_last_lr()[0], 0
        loss_sum = torch.zeros((), device=self.device)
        self.start_epoch()
        if within is not None:
            lr, skipped_steps = within["lr"], within["skipped_steps"]
            loss_sum += within["loss_sum"]
            self.go_on_in_epoch(within["counted"])
        self.replica_log.start_epoch()
        self.pipe.train()
        bar.set_description(f"epoch {epoch + 1}/{self.config.epochs}")

        def so_far() -> dict[str, Any]:
            if folder is not None:  # what a resumed run will not do again
                self._write_steps(folder)
            if self._run_log is not None:
                self._run_log.flush()
            return {
                "history": self.history,
                "within": {
                    "step": iteration,
                    "lr": lr,
                    "loss_sum": loss_sum.item(),
                    "skipped_steps": skipped_steps,
                    **sent(),
                    "seconds": self.pipe.collect(time.perf_counter() - start)[0],
                    "counted": self.counted(),
                },
            }

        # What comes before is drawn and left, as each batch is drawn from a seed of its own.
        iterations = enumerate(self._iterations(epoch), start=1)
        for iteration, batches in islice(iterations, begun, None):
            rate = self.optimizer.param_groups[0]["lr"]
            loss = self._iteration(batches).to(self.device)
            loss_sum += loss
            skipped_steps += self.pipe.step_skipped
            if self._run_log is not None:
                num_samples = sum(self.num_samples(batch) for batch in batches)
                self._run_log.step(
                    loss / len(batches),
                    num_samples=num_samples * self.pipe.num_replicas,
                    lr=float(rate),
                )
            for log in (self.replica_log, self.adaptive_log):
                log.note_step()
            bar.update(self.config.updates)
            if checkpoints is not None and checkpoints.step(so_far):
                raise Stopped(checkpoints.stopped, epoch + 1, iteration * self.config.updates)
            # Reading a loss waits for a GPU.
            is_last = iteration == self.iterations_per_epoch
            if self.device.type == "cpu" or iteration % 10 == 0 or is_last:
                seen = min(iteration * self.accumulate, self.num_batches)
                shown = {
                    "loss": f"{loss_sum.item() / seen:.3f}",
                    "MB": f"{(wire_shown + self.pipe.wire_bytes) / 1e6:.1f}",
                }
                bar.set_postfix({**shown, **self.shown()}, refresh=False)
        more = {**self.end_epoch(), **self.replica_log.end_epoch()}
        more |= sent()
        on: float | None = None
        off: float | None = None
        if evaluate_after or (epoch + 1) % self.config.eval_every == 0:
            on, off = self.evaluate()
        seconds = self.pipe.collect(time.perf_counter() - start)[0]
        self.history.append(
            {
                "epoch": epoch + 1,
                "lr": lr,
                "loss": loss_sum.item() / self.num_batches,
                **more,
                self.metric.on: on,
                self.metric.off: off,
                "skipped_steps": skipped_steps,
                "seconds": before.get("seconds", 0.0) + seconds,
            }
        )

    def evaluate(self) -> tuple[float, float]:
        """The metric on all evaluation data with compression on, and off."""
        with self._autocast():
            on = self.judge()
            if set(self.config.act) == {"none"}:
                return on, on  # nothing to turn off
            with self.pipe.uncompressed():
                off = self.judge()
        return on, off

    def _checkpoints(self, folder: RunFolder) -> mpcomp.Checkpoints:
        every, updates = self.config.save_every_steps, self.config.updates
        return mpcomp.Checkpoints(
            self.pipe,
            folder.checkpoint,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            every_steps=None if every is None else every // updates,
            every_minutes=self.config.save_every_minutes,
            keep=self.config.keep,
        )

    def _restore(self, extra: Mapping[str, Any]) -> None:
        """Goes on from what came with a checkpoint, if there was one."""
        self.history = extra.get("history", [])
        self._within = extra.get("within")
        if extra:
            self.resume_schedule()

    def resume_schedule(self) -> None:
        """Sets the learning rate that the schedule has here, as it may be of more epochs now."""
        if isinstance(self.scheduler, torch.optim.lr_scheduler.LambdaLR):
            at = self.scheduler.last_epoch
            schedule = zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
            self.set_rates([float(base * part(at)) for base, part in schedule])

    def set_rates(self, rates: Sequence[float]) -> None:
        """Gives each group of parameters its learning rate."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.scheduler._last_lr = list(rates)

    def _write(self, folder: RunFolder) -> None:
        """The files of a run so far, as they are at the end of an epoch."""
        if self.ranks.writes:
            folder.write_metrics(self.history)
        self._write_steps(folder)
        if self.ranks.speaks and self.replica_log.active:
            steps = replica_log.read_steps(folder.replica_steps)
            replica_log.plot_steps(steps, folder.replica_plot, self.config.dp_comp)
        if self.ranks.speaks and self.adaptive_log.active:
            steps = replica_log.read_steps(folder.adaptive_steps)
            adaptive_log.plot_ratios(steps, folder.adaptive_plot)

    def _write_steps(self, folder: RunFolder) -> None:
        if self.ranks.speaks and self.replica_log.active:
            replica_log.append_steps(folder.replica_steps, self.replica_log.new_steps())
        if self.ranks.speaks and self.adaptive_log.active:
            replica_log.append_steps(folder.adaptive_steps, self.adaptive_log.new_steps())

    def _iterations(self, epoch: int) -> Iterator[list[Any]]:
        """The batches of each iteration."""
        waiting: list[Any] = []
        for batch in self.replica_log.timed(self.batches(epoch)):
            waiting.append(batch)
            if len(waiting) == self.accumulate:
                yield waiting
                waiting = []
        if waiting:
            yield waiting

    def _iteration(self, batches: Sequence[Any]) -> Tensor:
        """One step of the optimizer, or those of a call; gives the sum of the batches' losses."""
        if self.config.updates > 1:
            (batch,) = batches
            with self._autocast():
                return self.forward_backward(batch)
        losses = []
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)  # replicas need to agree only on the sum
            with self._autocast(), nullcontext() if is_last else self.pipe.no_sync():
                losses.append(self.forward_backward(batch))
        if len(batches) > 1:
            for parameter in self.pipe.parameters():
                if parameter.grad is not None:
                    parameter.grad /= len(batches)
        if self.config.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            mpcomp.clip_grad_norm_(self.pipe, self.config.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.end_step()
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _update(self) -> None:
        """A step within a call, in which no stage knows the gradients of another."""
        with torch.autocast(self.device.type, enabled=False):  # the call's is for the model
            if self.config.clip is not None:
                for stage in self.pipe.stages:
                    torch.nn.utils.clip_grad_norm_(stage.parameters(), self.config.clip)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.end_step()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)
