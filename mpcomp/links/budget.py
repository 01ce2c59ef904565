"""A budget of quality: how large the steps of a word's methods may be.

Each word has a curve: rows of the project's studies, from fine steps to coarse ones, with what
they cost. A budget takes the coarsest steps that cost no more. Between two rows steps grow
geometrically with the cost. Where a coarser row happened to cost less than a finer one, it counts
as much as that, so a larger budget never gives finer steps. What lies below the finest row was not
measured, and is refused. Above the coarsest one that one stays.

Costs are means of a study's runs; its page has their intervals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mpcomp.links.auto import AUTO, BEFORE_HEAD, INFERENCE

__all__ = ["CURVES", "LEAST", "MOST", "Curve", "Measured", "percent_of", "scaled", "spelt"]

#: The range of budgets, in %.
LEAST, MOST = 0.1, 5.0


@dataclass(frozen=True)
class Measured:
    """A row of a study.

    Attributes:
        cost: in % of perplexity, or in points of accuracy behind a ReLU.
        act: step of activations.
        grad: step of gradients.
        study: results file, without its ending.
        row: of it.
    """

    cost: float
    act: float
    grad: float
    study: str
    row: str


@dataclass(frozen=True)
class Curve:
    """The cost of a word's methods at several steps.

    Attributes:
        methods: by argument, with ``{act}`` and ``{grad}`` for the steps.
        rows: from fine steps to coarse ones.
    """

    methods: Mapping[str, str]
    rows: Sequence[Measured]

    def at(self, percent: float) -> dict[str, str] | None:
        """The methods for a budget; None if it is below all that was measured."""
        costs: list[float] = []
        for row in self.rows:
            costs.append(max([row.cost, *costs]))
        fitting = [i for i, cost in enumerate(costs) if cost <= percent]
        if not fitting:
            return None
        i = fitting[-1]
        row, coarser = self.rows[i], self.rows[min(i + 1, len(self.rows) - 1)]
        share = 0.0
        if coarser is not row:
            share = (percent - costs[i]) / (costs[i + 1] - costs[i])
        steps = {
            "act": row.act * (coarser.act / row.act) ** share,
            "grad": row.grad * (coarser.grad / row.grad) ** share,
        }
        shown = {name: f"{step:.3g}" for name, step in steps.items()}
        return {argument: spec.format(**shown) for argument, spec in self.methods.items()}


_STEPS: Final = "step:{act}:centre=true:spikes=16"
CURVES: Final[Mapping[str, Curve]] = {
    "auto:scratch": Curve(
        {
            "act_comp": "klt+step:{act}:centre=true",
            "grad_comp": "klt+step:{grad}:rounding=dither",
        },
        [
            # With the tie on one rank, as by default, which costs more than the same steps apart.
            Measured(2.09, 0.1, 0.7, "gpt2_study_together", "klt, step 0.1 / 0.7, dithered"),
            Measured(3.21, 0.2, 0.7, "gpt2_study", "klt, step 0.2 / 0.7, dithered"),
        ],
    ),
    "auto:relu": Curve(
        {
            "act_comp": "step:{act}",
            "grad_comp": "same:where=nonzero+step:{grad}:scale=tensor:rounding=dither",
        },
        [
            Measured(
                0.34,
                0.3,
                0.7,
                "cifar10_study_decayed",
                "step 0.3, dithered gradients of nonzero 0.7",
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
    ),
    # By the divergence from the uncompressed predictions, exp(KL) - 1.
    INFERENCE: Curve(
        {"act_comp": _STEPS, "grad_comp": AUTO["auto"]["grad_comp"]},
        [
            Measured(0.76, 0.15, 0.5, "smollm2_inference", "step:0.15:centre=True:spikes=16"),
            Measured(1.46, 0.2, 0.5, "smollm2_inference_400", "step:0.2:centre=True:spikes=16"),
            Measured(2.28, 0.25, 0.5, "smollm2_inference", "step:0.25:centre=True:spikes=16"),
            Measured(3.4, 0.3, 0.5, "smollm2_inference_400", "step:0.3:centre=True:spikes=16"),
            Measured(4.68, 0.35, 0.5, "smollm2_inference", "step:0.35:centre=True:spikes=16"),
        ],
    ),
}


def scaled(spec: str, factor: float) -> str:
    """The spec with all of its steps times a factor, to three digits."""
    return re.sub(r"(?<=step[:/])[0-9.]+", lambda found: f"{factor * float(found[0]):.3g}", spec)


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
    if percent is None:
        if before_head and word in BEFORE_HEAD:
            return BEFORE_HEAD[word]
        return _AT_INFERENCE if word == INFERENCE else AUTO[word]
    if word not in CURVES:
        measured = [repr(each) for each in CURVES if each in AUTO]
        raise ValueError(
            f"budget of {percent:g} % with {word!r}: no study has measured that at several steps, "
            f"only {', '.join(measured)}, and 'auto' at inference; leave budget out, or name "
            "methods"
        )
    curve = CURVES[word]
    found = curve.at(percent)
    if found is None:
        finest = curve.rows[0]
        raise ValueError(
            f"budget of {percent:g} % with {word!r}: the finest steps that were measured cost "
            f"{finest.cost:g} % (docs/results/{finest.study}.jsonl, {finest.row!r}); allow as "
            "much, or name a method"
        )
    return found


_AT_INFERENCE: Final[Mapping[str, str]] = {
    name: spec.format(act=0.2) for name, spec in CURVES[INFERENCE].methods.items()
}
