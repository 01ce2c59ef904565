"""Trains a ResNet or VGG cut into compressed stages; evaluates it with compression on and off.

    python -m recipes.cifar10 --data digits --compare       # a minute, no download
    python -m recipes.cifar10 --act topk:0.1 --grad ef21+topk:0.1 --device cuda
    python -m recipes.cifar10 --resume runs/<folder>
    torchrun --nproc-per-node 4 -m recipes.cifar10 --data digits --compare   # a stage a process

The WideResNet-28-10 of ConEF's authors, 16 replicas with 16 images each:

    torchrun --nproc-per-node 16 -m recipes.cifar10 --model wide_resnet --split 1 --replicas 16 \\
        --batch-size 256 --chunks 1 --epochs 150 --lr 0.1 --lr-milestones 80 120 --nesterov \\
        --dp-comp conef:0.4:beta=0.9+randomblock:0.1

Defaults are those of Rudakov et al. for CIFAR-10 (`ImageConfig`), with smaller ones for
`--data digits`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import stages
from recipes import data
from recipes.command import DATA, MODEL, OPTIMIZER, Parser, Recipe, run_recipe
from recipes.data import Dataset, loaders_of
from recipes.image_config import MODELS, WIDE_SIZES, ImageConfig
from recipes.metric import ACCURACY
from recipes.optimizers import make_optimizer, milestone_rate, warm_up
from recipes.ranks import Ranks
from recipes.summary import Summary
from recipes.training import Trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the recipe; a mistake in the input ends it with one line."""
    recipe = Recipe(
        parser=_parser(),
        config=ImageConfig,
        configure=_configure,
        load=load_data,
        trainer=ImageTrainer,
        describe=_describe,
    )
    run_recipe(recipe, argv)


def _parser() -> Parser:
    parser = Parser(
        "cifar10",
        "Train a ResNet or VGG cut into compressed stages; evaluate with and without them.",
    )
    add = parser.group(MODEL)
    add("--model", choices=MODELS)
    add("--width", type=int, help="channels of the first layers (64 is the papers', wide 16)")
    add("--depth", type=int, help="of a wide_resnet: 10, 16, 22, 28 (default), ...")
    add("--widen", type=int, help="of a wide_resnet, its factor (default 10)")
    add(
        "--channels-last",
        action=argparse.BooleanOptionalAction,
        help="order in memory (default: last, of widths from 8 on)",
    )
    add = parser.group(DATA)
    add("--data", help="hub name (default uoft-cs/cifar10), folder of parquet files, or digits")
    add("--drop-last", action=argparse.BooleanOptionalAction, help="in training only")
    add("--crop-padding", type=int, help="pixels of the random crop; 0 crops nothing")
    add("--flip", action=argparse.BooleanOptionalAction, help="random horizontal flip")
    add("--aug-seeds", type=int, help="fixed augmentations of each image; 0: always a fresh one")
    add("--train-limit", type=int, metavar="IMAGES")
    add("--test-limit", type=int, metavar="IMAGES")
    add = parser.group(OPTIMIZER)
    add("--schedule-epochs", type=int, help="half a period of the cosine schedule")
    parser.add_common()
    return parser


def _configure(chosen: Mapping[str, Any]) -> ImageConfig:
    return ImageConfig.for_data(**{"data": ImageConfig.data, **chosen})


def _describe(dataset: Dataset) -> str:
    return f"{len(dataset.train)} training images, {len(dataset.test)} test images"


def run(
    config: ImageConfig, *, dataset: data.Dataset | None = None, progress: bool = True
) -> Summary:
    """One training run that leaves no files; `ImageTrainer` is for runs with a folder.

    Args:
        dataset: the images, where they are loaded already.

    Raises:
        ValueError: an option does not fit the data, the model or the machine.
    """
    return ImageTrainer(config, dataset or load_data(config)).fit(progress=progress)


def load_data(config: ImageConfig) -> data.Dataset:
    """The images that a configuration names."""
    return data.load(config.data, train_limit=config.train_limit, test_limit=config.test_limit)


class ImageTrainer(Trainer[ImageConfig]):
    """The trainer of an image classifier."""

    metric = ACCURACY
    samples = "images"

    def __init__(
        self, config: ImageConfig, dataset: data.Dataset, ranks: Ranks | None = None
    ) -> None:
        super().__init__(config, ranks)
        train_loader, test_loader = loaders_of(config, dataset, self.device)
        self.loss = LossWithAccuracy()
        self.cut(_model(config, dataset.num_classes), len(train_loader), loss_fn=self.loss)
        self.train_loader, self.test_loader = train_loader.of(self.pipe), test_loader.of(self.pipe)
        self.optimizer = make_optimizer(
            config, self.pipe, outputs=dataset.num_classes, decay_all=True
        )
        self.pipe.follow(self.optimizer)
        schedules = torch.optim.lr_scheduler
        self.scheduler = (
            schedules.LambdaLR(self.optimizer, self._rate)
            if self._by_steps
            else schedules.CosineAnnealingLR(self.optimizer, T_max=config.schedule_epochs)
        )

    def start_epoch(self) -> None:
        """Accuracy is counted anew."""
        self.loss.reset()

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(x, y, ids)."""
        return self.train_loader.epoch(epoch)

    def forward_backward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The mean loss over the images."""
        x, y, ids = batch
        return self.pipe.forward_backward(
            x, y, sample_ids=ids, update=self.update, updates=self.config.updates
        )

    def num_samples(self, batch: tuple[Tensor, Tensor, Tensor]) -> int:
        """Images."""
        return len(batch[1])

    def resume_schedule(self) -> None:
        """The cosine of a run that goes on for longer is another one, from here on."""
        super().resume_schedule()
        scheduler = self.scheduler
        if isinstance(scheduler, torch.optim.lr_scheduler.CosineAnnealingLR):
            period = self.config.schedule_epochs
            if scheduler.T_max != period:
                scheduler.T_max = period
                part = (1.0 + math.cos(math.pi * scheduler.last_epoch / period)) / 2.0
                self.set_rates([float(base * part) for base in scheduler.base_lrs])

    def end_step(self) -> None:
        """A schedule with a warm-up or milestones goes by steps of the optimizer."""
        if self._by_steps:
            self.scheduler.step()

    def judge(self) -> float:
        """Accuracy on all test images."""
        mean: float = self.pipe.evaluate(self.test_loader, accuracy)
        return mean

    def end_epoch(self) -> dict[str, Any]:
        """The cosine alone goes by epochs."""
        if not self._by_steps:
            self.scheduler.step()
        counted = self.counted()
        return {"train_accuracy": counted["right"] / counted["seen"]}

    def counted(self) -> dict[str, Any]:
        """Images of the epoch so far, and how many were right."""
        counts = self.pipe.collect((int(self.loss.num_right), self.loss.num_seen))
        right, seen = zip(*counts, strict=True)
        return {"right": sum(right), "seen": sum(seen)}

    def go_on_in_epoch(self, counted: Mapping[str, Any]) -> None:
        """The first rank goes on with what all have counted."""
        if self.ranks.speaks:
            self.loss.num_right, self.loss.num_seen = counted["right"], counted["seen"]

    def shown(self) -> dict[str, str]:
        """Accuracy in training, on the rank with the last stage."""
        if not self.loss.num_seen:
            return {}
        return {"accuracy": f"{self.loss.num_right / self.loss.num_seen:.3f}"}

    @property
    def _by_steps(self) -> bool:
        return bool(self.config.lr_warmup_epochs or self.config.lr_milestones)

    def _rate(self, step: int) -> float:
        """The learning rate of a step (from 0), as a part of the highest.

        After the warm-up it goes by epochs: by the milestones, or by the cosine, which ends when
        it would without one.
        """
        warmup = self.config.lr_warmup_epochs
        if step < warmup * self.steps_per_epoch:
            return warm_up(self.config, step, warmup * self.steps_per_epoch)
        if self.config.lr_milestones:
            return milestone_rate(self.config, step // self.steps_per_epoch)
        part = (step // self.steps_per_epoch - warmup) / (self.config.schedule_epochs - warmup)
        return (1.0 + math.cos(math.pi * part)) / 2.0


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


def _model(config: ImageConfig, num_classes: int) -> torch.nn.Module:
    """The freshly initialised model, a function of the seed alone."""
    make: Callable[..., torch.nn.Module] = getattr(stages, config.model)
    sizes = {name: getattr(config, name) for name in WIDE_SIZES if getattr(config, name)}
    with torch.random.fork_rng(devices=[]):  # leave the caller's random state alone
        torch.manual_seed(config.seed)
        model = make(num_classes=num_classes, width=config.width, **sizes)
    model.to(memory_format=config.memory_format)  # type: ignore[call-overload]
    return model


if __name__ == "__main__":
    main()
