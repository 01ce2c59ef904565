"""The options of a training run on images."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from recipes.config import RunConfig, check_choice, check_rate_chosen

WIDE: Final = "wide_resnet"
MODELS: Final = ("resnet18", "resnet34", "resnet50", "resnet101", "vgg16", WIDE)
#: Sizes that only this one has, and its width, which is multiplied.
WIDE_SIZES: Final = ("depth", "widen")
WIDE_WIDTH: Final = 16
# With fewer, last in memory, oneDNN for AVX2 writes past the end of its own in the gradient of a
# strided 1x1 convolution (uxlfoundation/oneDNN issue 6035, with torch 2.13).
_NARROWEST_CHANNELS_LAST: Final = 8

# 1,257 small images: more, smaller steps, and a cosine that ends with the training.
DIGITS_DEFAULTS: Final[Mapping[str, Any]] = {
    "width": 16,
    "epochs": 10,
    "schedule_epochs": 10,
    "batch_size": 64,
    "lr": 0.05,
    "precision": "auto",
    "crop_padding": 2,
    "flip": False,  # a mirrored digit is another shape
}


@dataclass(frozen=True, kw_only=True)
class ImageConfig(RunConfig):
    """One training run of an image classifier.

    The defaults are those of Rudakov et al. for ResNet-18 on CIFAR-10.

    Their cosine has a half period of 200 epochs and training stops after 100, at half of the first
    learning rate.

    Raises:
        ValueError: an option is out of range; the message names it, what is accepted, and the fix.
    """

    sample: ClassVar[str] = "image"
    data_options: ClassVar[tuple[str, ...]] = ("data", "train_limit", "test_limit")
    at_least_0: ClassVar[tuple[str, ...]] = (*RunConfig.at_least_0, "crop_padding", "aug_seeds")
    at_least_1: ClassVar[tuple[str, ...]] = (
        *(*RunConfig.at_least_1, "width", *WIDE_SIZES, "schedule_epochs", "test_limit"),
    )

    data: str = "uoft-cs/cifar10"  # hub name, folder of parquet files, or "digits"
    model: str = "resnet18"
    width: int = 64
    depth: int | None = None  # of a WideResNet; None is 28
    widen: int | None = None  # its factor of the width; None is 10
    split: str = "paper"
    epochs: int = 100
    schedule_epochs: int = 200  # T_max of the cosine
    batch_size: int = 128
    drop_last: bool = True  # in training; every test image is evaluated
    optimizer: str = "sgd"
    lr: float = 0.01
    weight_decay: float = 5e-4
    precision: str = "fp32"
    channels_last: bool = True  # of models of 8 channels and more; see `memory_format`
    crop_padding: int = 4
    flip: bool = True
    aug_seeds: int = 0  # fixed augmentations of each image; 0 draws a fresh one on each visit
    test_limit: int | None = None  # images, as is train_limit

    def __post_init__(self) -> None:
        check_choice("model", self.model, MODELS)
        for name in WIDE_SIZES:
            if self.model != WIDE and (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name} is {value}, but the model {self.model} has its own; drop --{name}, or "
                    f"pass --model {WIDE}"
                )
        super().__post_init__()
        if self.updates > 1 and not self.drop_last:
            raise ValueError(
                f"updates is {self.updates}, and drop_last is not set; a call has as many images "
                "as the others, so drop --no-drop-last"
            )
        if not self.lr_milestones and self.lr_warmup_epochs >= self.schedule_epochs:
            raise ValueError(
                f"lr_warmup_epochs is {self.lr_warmup_epochs}, schedule_epochs is "
                f"{self.schedule_epochs}; pass fewer epochs of warm-up than of the whole schedule"
            )

    @property
    def memory_format(self) -> torch.memory_format:
        """The order of images and kernels in memory; narrow models' channels never lie last."""
        if self.channels_last and self.width >= _NARROWEST_CHANNELS_LAST:
            return torch.channels_last
        return torch.contiguous_format

    def extended(self, epochs: int) -> ImageConfig:
        """The cosine as well: one that has ended would rise again."""
        config = super().extended(epochs)
        return dataclasses.replace(config, schedule_epochs=max(epochs, self.schedule_epochs))

    @classmethod
    def for_data(cls, data: str, **chosen: Any) -> ImageConfig:
        """The defaults that suit the data set, with `chosen` on top."""
        check_rate_chosen(cls.optimizer, chosen)
        if "lr_milestones" in chosen and "schedule_epochs" in chosen:
            raise ValueError(
                "lr_milestones and schedule_epochs are both given; pass the first for a rate that "
                "falls at milestones, or the second for a cosine"
            )
        defaults = {"width": WIDE_WIDTH} if chosen.get("model") == WIDE else {}
        defaults |= DIGITS_DEFAULTS if data == "digits" else {}
        config = cls(data=data, **{**defaults, **chosen})
        if data == "digits" and "epochs" in chosen and "schedule_epochs" not in chosen:
            config = dataclasses.replace(config, schedule_epochs=config.epochs)
        return config
