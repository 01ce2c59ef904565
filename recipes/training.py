"""Trains a compressed pipeline on images: epochs, both evaluations, checkpoints, resumption."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

import mpcomp
import stages
from recipes import data, plots
from recipes.config import Config
from recipes.loader import loaders_of
from recipes.placement import check_ranks, common_dtype, devices_of, parse_split
from recipes.ranks import Ranks
from recipes.run_folder import RunFolder, write_json
from recipes.summary import History, Summary, label


def run(config: Config, *, dataset: data.Dataset | None = None, progress: bool = True) -> Summary:
    """One training run that leaves no files; `Trainer` is for runs with a folder.

    Args:
        dataset: the images, where they are loaded already.

    Raises:
        ValueError: an option does not fit the data, the model or the machine.
    """
    return Trainer(config, dataset or load_data(config)).fit(progress=progress)


def load_data(config: Config) -> data.Dataset:
    """The images that a configuration names."""
    return data.load(config.data, train_limit=config.train_limit, test_limit=config.test_limit)


class Trainer:
    """A pipeline with its optimizer, schedule and data; `history` has an entry for each epoch.

    Under torchrun there is one on every rank, and all are told the same.
    """

    def __init__(self, config: Config, dataset: data.Dataset, ranks: Ranks | None = None) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        self.ranks = ranks = ranks or Ranks()
        devices = ranks.together(lambda: devices_of(config, ranks))
        self.device = devices[0]
        self.dtype = common_dtype(config.precision, self.device, ranks)
        train_loader, test_loader = loaders_of(config, dataset, self.device)
        model = _model(config, dataset.num_classes)
        check_ranks(config, model, ranks.size)
        # Only fp16 has so small a range that gradients underflow without a loss scale.
        self.scaler = (
            torch.amp.GradScaler(self.device.type) if self.dtype is torch.float16 else None
        )
        self.loss = LossWithAccuracy()
        self.pipe = mpcomp.pipeline(
            model,
            chunks=config.chunks,
            split=parse_split(config.split),
            act_comp=_one_or_each(config.act),
            grad_comp=_one_or_each(config.grad),
            loss_fn=self.loss,
            warmup_steps=config.warmup_steps or config.warmup_epochs * len(train_loader),
            recompute=config.recompute,
            seed=config.seed,
            devices=devices if len(devices) > 1 else devices[0],
            replicas=config.replicas,
            schedule=config.schedule,
            in_flight=config.in_flight,
            timeout=config.timeout,
            scaler=self.scaler,
        )
        self.train_loader, self.test_loader = train_loader.of(self.pipe), test_loader.of(self.pipe)
        self.optimizer = torch.optim.SGD(
            self.pipe.parameters(),
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        self.pipe.follow_lr(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, T_max=config.schedule_epochs
        )
        self.history: History = []

    def placement(self) -> str:
        """How many stages there are, and where, in words."""
        text = f"{len(self.pipe.cut_stages)} stages"
        if self.pipe.num_replicas > 1:
            text += f" x {self.pipe.num_replicas} replicas"
        return text + (f" on {self.ranks.size} processes" if self.ranks.size > 1 else "")

    def fit(
        self,
        folder: RunFolder | None = None,
        *,
        resume: bool = False,
        stop_after: int | None = None,
        progress: bool = True,
    ) -> Summary:
        """Trains to the last epoch.

        Args:
            folder: takes metrics, checkpoint, summary and curves; None keeps nothing.
            resume: go on from the folder's checkpoint, if it has one.
            stop_after: end after this many epochs in total, to be resumed later.
            progress: show a progress bar.
        """
        if resume and folder is not None and any(self.pipe.collect(folder.checkpoint.exists())):
            self.load(folder)
        last_epoch = min(self.config.epochs, stop_after or self.config.epochs)
        with tqdm(
            total=last_epoch * len(self.train_loader),
            initial=len(self.history) * len(self.train_loader),
            disable=not (progress and self.ranks.speaks),
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 10,
        ) as bar:
            while len(self.history) < last_epoch:
                self.train_epoch(bar, evaluate_after=len(self.history) + 1 == last_epoch)
                if folder is not None:
                    self.save(folder)
        summary = Summary.of(self.config, self.history)
        if folder is not None and self.ranks.writes:
            folder.write_metrics(self.history)
            if summary.epochs == self.config.epochs:
                write_json(folder.summary, summary.to_json())
        if folder is not None and self.ranks.speaks:
            plots.plot_curves({label(self.config): summary.history}, folder.curves)
        return summary

    def train_epoch(self, bar: tqdm[Any], *, evaluate_after: bool) -> None:
        """The next epoch, and both evaluations where they are due."""
        start, epoch = time.perf_counter(), len(self.history)
        previous = self.history[-1] if self.history else {}
        # Counted since the first epoch, also where the meters begin anew after a resumption.
        wire_before = previous.get("wire_bytes", 0) - self.pipe.wire_bytes
        dense_before = previous.get("dense_bytes", 0) - self.pipe.dense_bytes
        lr, skipped_steps = self.scheduler.get_last_lr()[0], 0
        loss_sum = torch.zeros((), device=self.device)
        self.loss.reset()
        self.pipe.train()
        bar.set_description(f"epoch {epoch + 1}/{self.config.epochs}")
        for step, (x, y, ids) in enumerate(self.train_loader.epoch(epoch), start=1):
            loss_sum += self._step(x, y, ids).to(self.device)
            skipped_steps += self.pipe.step_skipped
            bar.update()
            if step % 10 == 0 or step == len(self.train_loader):  # reading a loss waits for a GPU
                shown = {
                    "loss": f"{loss_sum.item() / step:.3f}",
                    "MB": f"{(wire_before + self.pipe.wire_bytes) / 1e6:.1f}",
                }
                if self.loss.num_seen:  # on the rank with the last stage
                    shown["accuracy"] = f"{self.loss.num_right / self.loss.num_seen:.3f}"
                bar.set_postfix(shown, refresh=False)
        self.scheduler.step()
        compressed: float | None = None
        uncompressed: float | None = None
        if evaluate_after or (epoch + 1) % self.config.eval_every == 0:
            compressed, uncompressed = self.evaluate()
        counts = int(self.loss.num_right), self.loss.num_seen, time.perf_counter() - start
        right, seen, seconds = zip(*self.pipe.collect(counts), strict=True)
        self.history.append(
            {
                "epoch": epoch + 1,
                "lr": lr,
                "loss": loss_sum.item() / len(self.train_loader),
                "train_accuracy": sum(right) / sum(seen),
                "accuracy_compressed": compressed,
                "accuracy_uncompressed": uncompressed,
                "wire_bytes": wire_before + self.pipe.wire_bytes,
                "dense_bytes": dense_before + self.pipe.dense_bytes,
                "skipped_steps": skipped_steps,
                "seconds": previous.get("seconds", 0.0) + seconds[0],
            }
        )

    def evaluate(self) -> tuple[float, float]:
        """Accuracy on all test images with compression on, and off."""
        with self._autocast():
            compressed = self.pipe.evaluate(self.test_loader, accuracy)
            if set(self.config.act) == {"none"}:
                return compressed, compressed  # nothing to turn off
            with self.pipe.uncompressed():
                uncompressed = self.pipe.evaluate(self.test_loader, accuracy)
        return compressed, uncompressed

    def save(self, folder: RunFolder) -> None:
        """Everything that a later `load` needs to go on as if never stopped."""
        self.pipe.save(
            folder.checkpoint,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            extra={"history": self.history},
        )
        if self.ranks.writes:
            folder.write_metrics(self.history)

    def load(self, folder: RunFolder) -> None:
        """The state that `save` left."""
        extra = self.pipe.load(
            folder.checkpoint, optimizer=self.optimizer, scheduler=self.scheduler
        )
        self.history = extra["history"]

    def _step(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        with self._autocast():
            loss: Tensor = self.pipe.forward_backward(x, y, sample_ids=ids)
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
        return loss

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


class LossWithAccuracy:
    """Cross-entropy that also counts how many of the training images were right."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts the count anew."""
        self.num_right: Tensor | int = 0
        self.num_seen = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """[b, classes] and [b] to the mean loss."""
        self.num_right = self.num_right + (output.detach().argmax(1) == target).sum()
        self.num_seen += len(target)
        return F.cross_entropy(output, target)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The fraction of a batch that is right; [b, classes] and [b]."""
    return (output.argmax(1) == target).double().mean()


def _model(config: Config, num_classes: int) -> torch.nn.Module:
    """The freshly initialised model, a function of the seed alone."""
    make: Callable[..., torch.nn.Module] = getattr(stages, config.model)
    with torch.random.fork_rng(devices=[]):  # leave the caller's random state alone
        torch.manual_seed(config.seed)
        model = make(num_classes=num_classes, width=config.width)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _one_or_each(specs: tuple[str, ...]) -> str | list[str]:
    return specs[0] if len(specs) == 1 else list(specs)
