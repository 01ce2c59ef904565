"""A budget of quality: how large the steps of a word's methods may be.

Each word has a curve: rows of the project's studies, from fine steps to coarse ones, with what
they cost. A budget takes the coarsest steps that cost no more. Between two rows steps grow
geometrically with the cost. Where a coarser row happened to cost less than a finer one, it counts
as much as that, so a larger budget never gives finer steps. What lies below the finest row was not
measured, and is refused. Above the coarsest one that one stays.

Costs are means of a study's runs; its page has their intervals.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mpcomp.links.auto import AUTO, BEFORE_HEAD, INFERENCE

__all__ = ["CURVES", "LEAST", "MOST", "Measured", "percent_of", "scaled", "spelt"]

#: The range of budgets, in %.
LEAST, MOST = 0.1, 5.0


@dataclass(frozen=True)
class Measured:
    """A row of a study.

    Attributes:
        cost: in % of perplexity, or in points of accuracy behind a ReLU.
        act: step of activations, after a memory's first visit.
        grad: step of gradients, likewise.
        study: results file, without its ending.
        row: of it.
    """

    cost: float
    act: float
    grad: float
    study: str
    row: str


#: Rows of each word, from fine steps to coarse ones. All steps of a method go by one factor.
CURVES: Final[Mapping[str, Sequence[Measured]]] = {
    "auto:scratch": [
        # With the tie on one rank, as by default, which costs more than the same steps apart.
        Measured(2.09, 0.1, 0.7, "gpt2_study_together", "klt, step 0.1 / 0.7, dithered"),
        Measured(3.21, 0.2, 0.7, "gpt2_study", "klt, step 0.2 / 0.7, dithered"),
    ],
    "auto:relu": [
        Measured(
            0.34, 0.3, 0.7, "cifar10_study_decayed", "step 0.3, dithered gradients of nonzero 0.7"
        ),
        Measured(
            0.02,
            0.4,
            1.0,
            "cifar10_study_decayed",
            "step 0.4, finer dithered gradients of nonzero",
        ),
        Measured(1.52, 0.5, 1.5, "cifar10_study", "step 0.5, dithered gradients of nonzero"),
    ],
    # Before a head its own steps, times the same factor. The coarse row has one run.
    "auto:memory": [
        Measured(0.36, 0.4, 1.0, "finetune_long", "auto:memory"),
        Measured(1.67, 0.64, 1.6, "finetune_long", "training steps times 1.6"),
    ],
    # By the divergence from the uncompressed predictions, exp(KL) - 1.
    INFERENCE: [
        Measured(0.76, 0.15, 0.5, "smollm2_inference", "step:0.15:centre=True:spikes=16"),
        Measured(1.46, 0.2, 0.5, "smollm2_inference_400", "step:0.2:centre=True:spikes=16"),
        Measured(2.28, 0.25, 0.5, "smollm2_inference", "step:0.25:centre=True:spikes=16"),
        Measured(3.4, 0.3, 0.5, "smollm2_inference_400", "step:0.3:centre=True:spikes=16"),
        Measured(4.68, 0.35, 0.5, "smollm2_inference", "step:0.35:centre=True:spikes=16"),
    ],
}
#: The step of activations at inference without a budget.
_AT_INFERENCE: Final = 0.2
#: Steps in a spec, but not evaluation's.
_STEP: Final = re.compile(r"(?<!eval=step/)(?<=step[:/])[0-9.]+")


def scaled(spec: str, factor: float) -> str:
    """The spec with all steps of training times a factor, to three digits."""
    return _STEP.sub(lambda found: f"{factor * float(found[0]):.3g}", spec)


def percent_of(budget: str | float) -> float:
    """A budget in %: "1 %" and 0.01 are 1.

    Raises:
        ValueError: it is none, or out of range.
        TypeError: neither a string nor a number.
    """
    if isinstance(budget, bool) or not isinstance(budget, str | int | float):
        raise TypeError(f"budget={budget!r}: expected a string such as '1 %', or 0.01")
    if isinstance(budget, str):
        number, sign, rest = budget.partition("%")
        try:
            percent = float(number) if sign and not rest.strip() else math.nan
        except ValueError:
            percent = math.nan
    else:
        percent = 100.0 * budget
    if not LEAST <= percent <= MOST:
        raise ValueError(
            f"budget={budget!r}: expected '{LEAST:g} %' to '{MOST:g} %', or {LEAST / 100:g} to "
            f"{MOST / 100:g}"
        )
    return percent


def spelt(word: str, percent: float | None, *, before_head: bool = False) -> Mapping[str, str]:
    """The methods that a word stands for, by argument.

    Args:
        word: one of `AUTO`, or `INFERENCE`.
        percent: budget; None for the steps that the word has by itself.
        before_head: whether it is at the cut before a head with a stage of its own.

    Raises:
        ValueError: no study has measured what keeps that budget.
    """
    own = AUTO["auto" if word == INFERENCE else word]
    steps = {argument: float(_STEP.findall(spec)[-1]) for argument, spec in own.items()}
    if percent is not None:
        wanted = _steps_for(word, percent)
    elif word == INFERENCE:
        wanted = {**steps, "act_comp": _AT_INFERENCE}
    else:
        wanted = steps
    there = BEFORE_HEAD.get(word, own) if before_head else own
    return {
        argument: scaled(spec, wanted[argument] / steps[argument])
        for argument, spec in there.items()
    }


def _steps_for(word: str, percent: float) -> dict[str, float]:
    """The steps for a budget, by argument; refuses what was not measured."""
    if word not in CURVES:
        raise ValueError(
            f"budget of {percent:g} % with {_named(word)}: no study has measured that at several "
            f"steps, only {', '.join(map(_named, CURVES))}; leave budget out, or name methods"
        )
    rows = CURVES[word]
    costs = list(itertools.accumulate((row.cost for row in rows), max))
    if costs[0] > percent:
        finest = rows[0]
        raise ValueError(
            f"budget of {percent:g} % with {_named(word)}: the finest steps that were measured "
            f"cost {finest.cost:g} % (docs/results/{finest.study}.jsonl, {finest.row!r}); allow as "
            "much, or name a method"
        )
    i = max(i for i, cost in enumerate(costs) if cost <= percent)
    row, coarser = rows[i], rows[min(i + 1, len(rows) - 1)]
    share = 0.0 if coarser is row else (percent - costs[i]) / (costs[i + 1] - costs[i])
    return {
        "act_comp": row.act * (coarser.act / row.act) ** share,
        "grad_comp": row.grad * (coarser.grad / row.grad) ** share,
    }


def _named(word: str) -> str:
    return "'auto' at inference" if word == INFERENCE else repr(word)
