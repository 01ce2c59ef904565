"""The quality that methods cost, as far as the project's studies know.

A prediction of time says nothing of quality, and what a method costs depends on the task. These are
the rows of the studies (`docs/results/`): small models, and a floor that they keep
is a place to start at, not a promise for another model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mpcomp.links.auto import GENERAL

__all__ = ["KNOWN", "TASKS", "UNITS", "Known", "known_of", "methods_of"]

#: Task -> in words.
TASKS: Final = {
    "scratch": "a language model from random weights",
    "finetune": "a released language model, fine-tuned over several epochs",
    "images": "a convolutional net from random weights",
}
#: Task -> what a loss of quality is counted in.
UNITS: Final = {
    "scratch": "% of perplexity",
    "finetune": "% of perplexity",
    "images": "points of accuracy",
}
#: What others are compared with: nothing is lost, or no more than by computing in bf16.
LOSSLESS: Final = (("none", "none"), ("bf16", "bf16"))


@dataclass(frozen=True)
class Known:
    """A row of a study.

    Attributes:
        task: in `TASKS`.
        act: method of activations.
        grad: method of gradients.
        loss: that compression costs, in `UNITS`; with compression on at inference.
        half_width: of its interval of 95 % by Student's t; None of fewer than three runs.
        n: runs.
        study: results file, without its ending.
        row: of it.
    """

    task: str
    act: str
    grad: str
    loss: float
    half_width: float | None
    n: int
    study: str
    row: str


_GPT2_LONG: Final = "gpt2_study_12_epochs"
_GPT2, _SMOLLM2, _CIFAR10 = "gpt2_study", "smollm2_finetune", "cifar10_study"
_DECAYED = "cifar10_study_decayed"
_GROUPS = ("quant:4:scale=128", "quant:8:scale=128")
_RELU = "step 0.4, finer dithered gradients of nonzero"
_KLT_02 = ("klt+step:0.2:centre=true", "klt+step:0.7:rounding=dither")
_SCRATCH = "klt, step 0.1 / 0.7, dithered"
_SMOLLM2_LONG: Final = "finetune_long"
_TOP_10 = ("topk:0.1+fp16", "topk:0.1+fp16")
KNOWN: Final = (
    # Of 1,656 steps, with both uses of the tie on one rank. Of 414 steps: 2.09 ± 1.58.
    Known("scratch", "auto:scratch", "auto:scratch", 0.66, 3.58, 3, _GPT2_LONG, _SCRATCH),
    Known("scratch", *_KLT_02, 3.21, 1.54, 6, _GPT2, "klt, step 0.2 / 0.7, dithered"),
    Known("scratch", *GENERAL, 7.29, 5.84, 3, _GPT2, "step 0.3 / 0.5"),
    Known("scratch", "quant:4", "quant:8", 15.32, 1.34, 3, _GPT2, "fw4-bw8"),
    Known("scratch", *_TOP_10, 1193.99, 2295.58, 3, _GPT2, "top 10 %"),
    # Of 555 steps. Of 27 steps, and of what the word stood for then, the files have 0.41 ± 0.27.
    Known("finetune", "auto:memory", "auto:memory", 0.36, 0.45, 3, _SMOLLM2_LONG, "auto:memory"),
    Known("finetune", *_GROUPS, 33.36, 0.73, 3, _SMOLLM2, " / ".join(_GROUPS)),
    Known("images", "auto:relu", "auto:relu", 0.02, 0.89, 6, _DECAYED, _RELU),
    Known("images", "quant:4", "quant:8", 0.54, 2.22, 3, _CIFAR10, "quant fw4-bw8"),
    Known("images", "topk:0.5", "topk:0.5", 0.12, 5.22, 3, _CIFAR10, "top 50 %"),
    Known("images", "topk:0.1", "topk:0.1", 12.08, 3.78, 3, _CIFAR10, "top 10 %"),
)


def known_of(task: str, act: str, grad: str) -> Known | None:
    """The row of two methods; None where no study has them."""
    if (act, grad) in LOSSLESS:
        return Known(task, act, grad, 0.0, 0.0, 0, "", "")
    return next((one for one in KNOWN if (one.task, one.act, one.grad) == (task, act, grad)), None)


def methods_of(task: str) -> list[tuple[str, str]]:
    """The methods of activations and gradients that are worth a look: uncompressed ones first."""
    return [*LOSSLESS, *((one.act, one.grad) for one in KNOWN if one.task == task)]
