"""What a training run is: one frozen value, checked when made, written into every run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import mpcomp
from mpcomp.engines.schedules import schedule_named

MODELS: Final = ("resnet18", "resnet34", "resnet50", "resnet101")
PRECISIONS: Final = ("fp32", "bf16", "fp16", "auto")

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
class Config:
    """One training run. The defaults are those of Rudakov et al. on CIFAR-10.

    Their cosine has a half period of 200 epochs and training stops after 100, at half of the first
    learning rate.

    Raises:
        ValueError: an option is out of range; the message names it, what is accepted, and the fix.
    """

    data: str = "uoft-cs/cifar10"  # hub name, folder of parquet files, or "digits"
    model: str = "resnet18"
    width: int = 64
    split: str = "paper"  # "paper", a number of stages, block counts "3,2,2,3", or block names
    chunks: int = 4  # microbatches of one batch
    act: tuple[str, ...] = ("topk:0.1",)  # one spec for all boundaries, or one for each
    grad: tuple[str, ...] = ("topk:0.1",)
    warmup_steps: int = 0  # steps without compression; excludes warmup_epochs
    warmup_epochs: int = 0
    epochs: int = 100
    schedule_epochs: int = 200  # T_max of the cosine
    eval_every: int = 1  # epochs; the last epoch is always evaluated
    batch_size: int = 128  # of all replicas together
    drop_last: bool = True  # in training; every test image is evaluated
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip: float | None = None  # largest global gradient norm
    precision: str = "fp32"  # "auto": bf16 where the device computes in it
    channels_last: bool = True
    recompute: bool = False
    device: str = "auto"  # one for all stages, or one for each: "cuda:0,cuda:1"
    threads: int | None = None  # of torch on CPU; None leaves them
    crop_padding: int = 4
    flip: bool = True
    aug_seeds: int = 0  # fixed augmentations of each image; 0 draws a fresh one on each visit
    train_limit: int | None = None  # images
    test_limit: int | None = None
    seed: int = 0
    # Of several processes, under torchrun:
    replicas: int = 1  # copies of the pipeline, each with its part of every batch
    schedule: str | None = None  # one of torch's; None is the engine's own
    in_flight: int | str | None = None  # depth of the engine's own, or "auto"
    timeout: float = 300.0  # seconds that a rank waits for another

    def __post_init__(self) -> None:
        _check_choice("model", self.model, MODELS)
        _check_choice("precision", self.precision, PRECISIONS)
        for name in (
            "width", "chunks", "epochs", "schedule_epochs", "eval_every", "batch_size",
            "threads", "train_limit", "test_limit", "replicas",
        ):  # fmt: skip
            _check_at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "warmup_epochs", "crop_padding", "aug_seeds", "seed"):
            _check_at_least(name, getattr(self, name), 0)
        for name in ("momentum", "weight_decay"):
            _check_at_least(name, getattr(self, name), 0.0)
        for name in ("lr", "clip", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; pass a number above 0")
        if self.warmup_steps and self.warmup_epochs:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and warmup_epochs is {self.warmup_epochs}; "
                "pass one of the two"
            )
        share, rest = divmod(self.batch_size, self.replicas)
        if rest:
            raise ValueError(
                f"batch_size is {self.batch_size}, replicas is {self.replicas}; each replica gets "
                f"an equal part of a batch, so pass a multiple of {self.replicas}"
            )
        if self.chunks > share:
            whose = "" if self.replicas == 1 else f", {share} for each of {self.replicas} replicas"
            raise ValueError(
                f"chunks is {self.chunks}, batch_size is {self.batch_size}{whose}; a microbatch "
                "holds at least one image, so pass at most as many chunks as the batch has images"
            )
        schedule_named(self.schedule)
        if isinstance(self.in_flight, str) and self.in_flight != "auto":
            raise ValueError(
                f"in_flight is {self.in_flight!r}; pass a number of microbatches, or auto"
            )
        if isinstance(self.in_flight, int):
            _check_at_least("in_flight", self.in_flight, 1)
        if not self.act or not self.grad:
            raise ValueError(
                "act and grad need at least one spec each; pass none for no compression"
            )
        for spec in (*self.act, *self.grad):
            mpcomp.parse(spec)  # fails here, before any work, with the nearest name

    def uncompressed(self) -> Config:
        """The same training without compression, to compare with."""
        return dataclasses.replace(
            self, act=("none",), grad=("none",), warmup_steps=0, warmup_epochs=0
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Config:
        """A configuration as it was written by `to_json`."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"the configuration has unknown options {unknown}; known are {sorted(known)}; "
                "it was written by another version, start the run anew"
            )
        lists = {key: tuple(values[key]) for key in ("act", "grad") if key in values}
        return cls(**{**values, **lists})

    @classmethod
    def for_data(cls, data: str, **chosen: Any) -> Config:
        """The defaults that suit the data set, with `chosen` on top."""
        defaults = DIGITS_DEFAULTS if data == "digits" else {}
        config = cls(data=data, **{**defaults, **chosen})
        if data == "digits" and "epochs" in chosen and "schedule_epochs" not in chosen:
            config = dataclasses.replace(config, schedule_epochs=config.epochs)
        return config


def _check_choice(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} is {value!r}; pass one of {', '.join(accepted)}")


def _check_at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise ValueError(f"{name} is {value}; pass at least {least}")
