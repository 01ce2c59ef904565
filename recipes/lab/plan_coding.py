"""Coding of every studied setting, measured on one core: what the form of a plan calculates with.

    python -m recipes.lab.plan_coding

writes ``docs/results/plan_coding.json``. Tensors are Gaussian, as with ``mpcomp plan --tflops``;
activations of images are behind a ReLU. An element took the same time at 256 and 1024 channels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mpcomp.plan.coding import measure_cut
from mpcomp.plan.known_quality import TASKS, methods_of
from mpcomp.plan.planner import CHANGES
from mpcomp.plan.timing import Undisturbed
from recipes.bench.workers import machine

__all__ = ["CODING", "kind_of"]

CODING: Final = Path(__file__).parents[2] / "docs" / "results" / "plan_coding.json"
#: The shape of an activation, a million elements: rows of tokens, or of images.
SHAPES: Final = {"text": (4, 256, 1024), "images": (16, 64, 32, 32)}
_REPEATS: Final = 4


def kind_of(task: str) -> str:
    """The kind of what crosses the cuts of a task: "text" or "images"."""
    return "images" if task == "images" else "text"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and writes the file."""
    argparse.ArgumentParser(
        prog="python -m recipes.lab.plan_coding",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(argv)
    torch.set_num_threads(1)
    timing = Undisturbed()
    rows = list(_rows(timing))
    found = {"machine": machine(), "timing": timing.to_dict(), "rows": rows}
    CODING.write_text(json.dumps(found, indent=1) + "\n")
    print(timing.sentence())


def _rows(timing: Undisturbed) -> Iterator[dict[str, Any]]:
    pairs = dict.fromkeys((kind_of(task), pair) for task in TASKS for pair in methods_of(task))
    for kind, (act, grad) in pairs:
        x, gradient = _tensors(kind)
        cost, *errors = measure_cut(
            act, grad, x, gradient, repeats=_REPEATS, changes=CHANGES, settle=timing
        )
        yield {
            "kind": kind,
            "act": act,
            "grad": grad,
            "shape": list(x.shape),
            "coding_ns": [1e9 * seconds / x.numel() for seconds in cost.coding],
            "bits": [8 * count / x.numel() for count in cost.messages],
            "errors": errors,
        }


def _tensors(kind: str) -> tuple[Tensor, Tensor]:
    """An activation and its gradient."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(SHAPES[kind], generator=generator) for _ in range(2))
    return (x.relu() if kind == "images" else x), gradient


if __name__ == "__main__":
    main()
