"""Trainings at full size, in order of worth: what each is to show, its rows, and its settings.

`recipes.lab.gpu_studies` runs them on a GPU, one process a run. On a CPU each can be made at a toy
size, which shows that it runs and no more.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mpcomp.links.auto import GENERAL
from recipes.image_config import ImageConfig
from recipes.lab import cifar10_study, conef_study, replica_study
from recipes.lab.cut_grid import Row
from recipes.metric import ACCURACY, PERPLEXITY, Metric
from recipes.text_config import LSTM, TextConfig

__all__ = ["STUDIES", "Config", "Study"]

Config = ImageConfig | TextConfig


@dataclass(frozen=True, kw_only=True)
class Study:
    """The runs that answer one question.

    Attributes:
        question: in a sentence.
        metric: by which runs are judged.
        reference: the row that others are compared with.
        rows: methods, by the names that tables have.
        settings: of every run at full size.
        toy: what differs at a toy size.
        toy_rows: rows that are run at that size.
        data: the command's option that names the data; `--smollm2` names a model.
        on_replicas: whether gradients go between replicas, which share the process.
        samples: training samples of an epoch, nearly: images, or blocks of WikiText-2.
        carried_mb: megabytes of data and models that a machine without a network is brought.
        tflops: floating-point operations a second that such a training reaches on an H100, in
            10^12, for estimates.
    """

    question: str
    metric: Metric
    reference: str
    rows: Mapping[str, Row]
    settings: Mapping[str, Any]
    toy: Mapping[str, Any]
    toy_rows: tuple[str, ...]
    data: str
    on_replicas: bool = False
    samples: int
    carried_mb: float
    tflops: float

    @property
    def kind(self) -> type[Config]:
        """Class of its configurations."""
        return ImageConfig if self.metric is ACCURACY else TextConfig

    def missing(self, options: argparse.Namespace) -> str | None:
        """The option without which it cannot run; None if all are given."""
        return None if getattr(options, self.data) is not None else f"--{self.data}"

    def configuration(self, options: argparse.Namespace, row: str, seed: int) -> Config:
        """The run of one row and seed.

        Args:
            options: of the command; `dry_run` for the toy size.
            row: one of `rows`.
            seed: of weights and order.
        """
        chosen: dict[str, Any] = {**self.settings, **(self.toy if options.dry_run else {})}
        methods = self.rows[row]
        chosen |= {"act": (methods.act,), "grad": (methods.grad,), "seed": seed}
        if not methods.warmup:
            chosen.pop("warmup_epochs", None)
        chosen |= methods.also
        chosen["device"] = options.device
        if self.kind is ImageConfig:
            chosen.setdefault("data", options.images)
            return ImageConfig(**chosen)
        chosen.setdefault("data", options.text)
        if chosen["model"] == _RELEASED:
            chosen["model"] = options.smollm2
        if chosen["model"] == "gpt2":
            chosen["tokenizer"] = options.tokenizer
        return TextConfig.for_model(**chosen)


_RELEASED: Final = "a released model"
_FOUR: Final[Mapping[str, tuple[str, str]]] = {
    "bf16": ("bf16", "bf16"),
    "auto:scratch": ("auto:scratch", "auto:scratch"),
    "tiles of 64, 4 bits": ("quant:4:scale=64", "quant:4:scale=64:rounding=stochastic"),
    "top 10 %": ("topk:0.1+fp16", "topk:0.1+fp16"),
}
_TOY_TEXT: Final[Mapping[str, Any]] = {
    **{"data": "python-docs", "train_limit": 1, "vocab_size": 300, "seq_len": 32, "epochs": 2},
    **{"batch_size": 8, "eval_limit": 8, "precision": "fp32", "lr_warmup_steps": 2},
}
_TOY_IMAGES: Final[Mapping[str, Any]] = {
    **{"data": "digits", "width": 4, "epochs": 2, "schedule_epochs": 2, "batch_size": 16},
    **{"train_limit": 64, "test_limit": 32, "crop_padding": 2, "flip": False},
    **{"precision": "fp32"},
}


def _scratch(*, untie: bool) -> dict[str, Row]:
    also = {"untie": True} if untie else {}
    return {name: Row(*both, also=also) for name, both in _FOUR.items()}


def _of(rows: Mapping[str, Row], *names: str) -> dict[str, Row]:
    return {name: rows[name] for name in names}


def _between(specs: Mapping[str, Mapping[str, Any]]) -> dict[str, Row]:
    """Rows of replicas, which have no cuts."""
    return {name: Row("none", "none", also=also) for name, also in specs.items()}


def _scratch_study(*, untie: bool) -> Study:
    weights = "weights of its own" if untie else "the embedding's weights"
    return Study(
        question=f"GPT-2 124M from scratch in four stages, the output layer with {weights}: loss "
        "against tokens",
        metric=PERPLEXITY,
        reference="bf16",
        rows=_scratch(untie=untie),
        settings={
            **{"model": "gpt2", "seq_len": 1024, "epochs": 4, "batch_size": 16, "chunks": 2},
            **{"lr": 6e-4, "lr_warmup_steps": 60, "weight_decay": 0.1, "precision": "bf16"},
            **{"eval_limit": 64},
        },
        toy={**_TOY_TEXT, "model": "tiny", "chunks": 2},
        toy_rows=() if untie else ("auto:scratch",),
        data="text",
        samples=2_366,
        carried_mb=5.2,
        tflops=250,
    )


_MEMORY: Final = "top 10 %, "
# Replicas of one process have no links: what it weighs factors by is described.
_GRAVAC: Final = "gravac:cf=10-1000:eps=0.1:window=20:smoothing=0.2:bandwidth_mbps=1000+topk:1"
_IMAGES: Final[Mapping[str, Any]] = {
    **{"width": 64, "lr": 0.05, "precision": "bf16", "batch_size": 128},
}

#: By name, in order of worth.
STUDIES: Final[Mapping[str, Study]] = {
    "gpt2-tied": _scratch_study(untie=False),
    "gpt2": _scratch_study(untie=True),
    "smollm2": Study(
        question="SmolLM2-135M fine-tuned in three stages over three epochs of 500 steps: does a "
        "memory hold at the length of real use",
        metric=PERPLEXITY,
        reference="bf16",
        rows={
            "bf16": Row("bf16", "bf16"),
            "auto:memory": Row("auto:memory", "auto:memory"),
            "auto": Row(*GENERAL),
        },
        settings={
            **{"model": _RELEASED, "split": "10,10,10", "seq_len": 256, "epochs": 3},
            **{"batch_size": 4, "chunks": 1, "lr": 2e-5, "optimizer": "adamw"},
            **{"precision": "bf16", "train_limit": 127, "eval_limit": 64},
        },
        toy={**_TOY_TEXT, "model": "tiny", "split": "2", "chunks": 1},
        toy_rows=("auto:memory",),
        data="smollm2",
        samples=2_000,
        carried_mb=102.1,
        tflops=100,
    ),
    "cifar10": Study(
        question="ResNet-18 at full width on all of CIFAR-10, four stages, to convergence: the "
        "table of Rudakov et al. at its own size",
        metric=ACCURACY,
        reference="bf16",
        rows={
            "bf16": Row("bf16", "bf16"),
            "auto:relu": Row("auto:relu", "auto:relu"),
            **_of(cifar10_study.ROWS, "quant fw4-bw8", "top 10 %", "top 10 %, after warm-up"),
            **_of(cifar10_study.ROWS, f"{_MEMORY}EF", f"{_MEMORY}EF21"),
            # A table of all images at both ends: 47 GB in fp16, which the host has.
            f"{_MEMORY}AQ-SGD": Row(
                "aqsgd:storage=fp16:location=cpu+topk:0.1", "topk:0.1", warmup=True
            ),
        },
        settings={
            **_IMAGES,
            **{"chunks": 1, "epochs": 20, "schedule_epochs": 20, "eval_every": 20},
            **{"warmup_epochs": 2},
        },
        toy={**_TOY_IMAGES, "eval_every": 2, "warmup_epochs": 1},
        toy_rows=(f"{_MEMORY}AQ-SGD",),
        data="images",
        samples=50_000,
        carried_mb=55.6,
        tflops=60,
    ),
    "replicas": Study(
        question="gradients between four replicas, ResNet-18 on all of CIFAR-10, a full training "
        "with its learning-rate steps",
        metric=ACCURACY,
        reference="dense",
        rows=_between(
            {
                "dense": {"dp_comp": "none"},
                "GraVAC over Top-k": {"dp_comp": _GRAVAC},
                **{
                    name: {"dp_comp": row.dp_comp, **row.also}
                    for name, row in replica_study.ROWS.items()
                    if name in ("DGC 0.1 %", "PowerSGD rank 2", "Accordion over Top-k")
                },
                "ConEF 90 %": {"dp_comp": conef_study.METHODS["ConEF 90 %"]},
            }
        ),
        settings={
            **_IMAGES,
            **{"split": "1", "chunks": 1, "replicas": 4, "batch_size": 1024, "lr": 0.4},
            **{"epochs": 16, "eval_every": 16, "lr_warmup_epochs": 2},
            **{"lr_milestones": (8, 12, 14), "lr_factor": 0.1},
        },
        toy={**_TOY_IMAGES, "lr_warmup_epochs": 0, "lr_milestones": (1,), "eval_every": 2},
        toy_rows=("DGC 0.1 %",),
        data="images",
        on_replicas=True,
        samples=50_000,
        carried_mb=55.6,
        tflops=60,
    ),
    "replicas-lstm": Study(
        question="gradients between four replicas, an LSTM on text, the authors' width",
        metric=PERPLEXITY,
        reference="dense",
        rows=_between(
            {
                "dense": {"dp_comp": "none"},
                "GraVAC over Top-k": {"dp_comp": _GRAVAC},
                "PowerSGD rank 2": {"dp_comp": "powersgd:2"},
                "EF": {"dp_comp": conef_study.METHODS[conef_study.EF]},
                "ConEF 90 %": {"dp_comp": conef_study.METHODS["ConEF 90 %"]},
            }
        ),
        settings={
            **conef_study.GROUPS["lstm"].settings,
            **{"hidden": 672, "split": "1", "chunks": 1, "replicas": 4, "batch_size": 160},
            **{"epochs": 4, "lr_milestones": (1, 2, 3), "eval_every": 4, "eval_limit": 1_000},
        },
        toy={
            **_TOY_TEXT,
            **{"model": LSTM, "hidden": 16, "batch_size": 16, "lr_milestones": (1,)},
            **{"lr_warmup_steps": 0, "eval_every": 2},
        },
        toy_rows=("ConEF 90 %",),
        data="text",
        on_replicas=True,
        samples=100_558,
        carried_mb=3.8,
        tflops=30,
    ),
}
