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
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.command import Parser, Recipe, run_recipe
from recipes.data import Dataset
from recipes.image_config import MODELS, ImageConfig
from recipes.image_training import ImageTrainer, load_data


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
    add = parser.add_argument
    add("--data", help="hub name (default uoft-cs/cifar10), folder of parquet files, or digits")
    add("--model", choices=MODELS)
    add("--width", type=int, help="channels of the first layers (64 is the papers', wide 16)")
    add("--depth", type=int, help="of a wide_resnet: 10, 16, 22, 28 (default), ...")
    add("--widen", type=int, help="of a wide_resnet, its factor (default 10)")
    add("--schedule-epochs", type=int, help="half a period of the cosine schedule")
    add("--drop-last", action=argparse.BooleanOptionalAction, help="in training only")
    add("--channels-last", action=argparse.BooleanOptionalAction)
    add("--crop-padding", type=int, help="pixels of the random crop; 0 crops nothing")
    add("--flip", action=argparse.BooleanOptionalAction, help="random horizontal flip")
    add("--aug-seeds", type=int, help="fixed augmentations of each image; 0: always a fresh one")
    add("--train-limit", type=int, metavar="IMAGES")
    add("--test-limit", type=int, metavar="IMAGES")
    parser.add_common()
    return parser


def _configure(chosen: Mapping[str, Any]) -> ImageConfig:
    return ImageConfig.for_data(**{"data": ImageConfig.data, **chosen})


def _describe(dataset: Dataset) -> str:
    return f"{len(dataset.train)} training images, {len(dataset.test)} test images"


if __name__ == "__main__":
    main()
