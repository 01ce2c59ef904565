"""Minutes that each training would take on an H100, from what it computes and how it is launched.

A step is the longer of two times. One is its floating-point operations, at the rate that such a
training reaches there. The other is its operations of torch, at what Python takes to launch one;
that is mostly the longer one where messages are coded. Both are counted on a CPU, in one pass of
the model at its true size over few samples.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

from tabulate import tabulate
from torch._C._profiler import _ExperimentalConfig  # replicas exchange in threads
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from recipes.bench.profiled import profiled
from recipes.image_config import ImageConfig
from recipes.lab.full_size import STUDIES, Config, Study
from recipes.lab.timed import trainer_of

__all__ = ["measure_plan", "measured", "num_operations", "render_plan"]

#: Seconds of an operation of torch, launches and Python together, beside an H100: Top-10 % takes
#: 2.8 ms to encode in some 105 launches (`docs/results/time_to_loss_speed_203M.json`).
_OPERATION_S: Final = 25e-6
#: Operations without others inside that make views or memory.
_NO_WORK: Final = frozenset(
    f"aten::{name}"
    for name in ("as_strided", "detach", "empty", "empty_strided", "set_", "unsafe_view", "view")
)
#: Steps before the one that is counted: in the first ones copies of weights are compared.
_STEPS_BEFORE: Final = 3
_FEW: Final[dict[str, Any]] = {
    "precision": "fp32",
    "device": "cpu",
    "train_limit": 64,
    "warmup_epochs": 0,
}


def num_operations(work: Callable[[], object]) -> int:
    """Operations of torch that compute or copy something, of all threads, in a call of ``work``."""
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    found = profiled(work, [ProfilerActivity.CPU], experimental_config=every_thread)
    events = [event for event in found.events() if event.name.startswith("aten::")]
    return sum(not event.cpu_children and event.name not in _NO_WORK for event in events)


def measure_plan(
    options: argparse.Namespace, before: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Figures of rows, in their order.

    Args:
        options: choose the rows that are measured, if their data or model is given.
        before: figures of all that were measured before.
    """
    chosen = [
        (name, row)
        for name in options.studies
        if STUDIES[name].missing(options) is None
        for row in STUDIES[name].rows
        if options.rows is None or row in options.rows
    ]
    found = {(one["study"], one["row"]): one for one in before}
    for name, row in tqdm(chosen, unit="row", disable=None):
        study = STUDIES[name]
        config = study.configuration(options, row, 0)
        flops, operations = measured(study, config)
        steps = config.epochs * (study.samples // config.batch_size)
        figures = {"steps": steps, "flops": flops, "operations": operations}
        found[name, row] = {"study": name, "row": row, **figures}
    order = [(name, row) for name, study in STUDIES.items() for row in study.rows]
    return [found[key] for key in order if key in found]


def render_plan(figures: Sequence[Mapping[str, Any]]) -> str:
    """A table of what a step of each row takes, and the minutes of a run."""
    rows = []
    for one in figures:
        study = STUDIES[one["study"]]
        step_s = max(one["flops"] / (1e12 * study.tflops), one["operations"] * _OPERATION_S)
        minutes = one["steps"] * step_s / 60
        both = one["flops"] / 1e9, one["operations"]
        rows.append([one["study"], one["row"], one["steps"], *both, 1e3 * step_s, minutes])
    headers = (
        *("study", "row", "steps", "GFLOP a step", "operations a step", "ms a step", "minutes"),
    )
    formats = ("", "", ",d", ",.0f", ",.0f", ".0f", ".1f")
    text = tabulate(rows, headers, floatfmt=formats, intfmt=",")
    answers = [
        (name, study.question, f"--{study.data}", study.carried_mb)
        for name, study in STUDIES.items()
    ]
    return (
        f"{tabulate(answers, ('study', 'shows', 'needs', 'MB'), floatfmt='.0f')}\n\n{text}\n\n"
        f"One seed of all takes {sum(row[-1] for row in rows):.0f} minutes if runs follow each "
        f"other, less where several share the GPU.\nAn operation counts "
        f"{1e6 * _OPERATION_S:.0f} us. Evaluations and the optimizer are left out."
    )


def measured(study: Study, config: Config) -> tuple[float, float]:
    """Floating-point operations and operations of torch of a step, but the optimizer's.

    Args:
        study: of the run.
        config: at full size; few samples are passed through the model, and counted as many.
    """
    samples = config.chunks * config.replicas
    if isinstance(config, ImageConfig):
        few: Config = dataclasses.replace(
            config, **_FEW, data="digits", test_limit=8, batch_size=2 * samples
        )
        factor = config.batch_size / few.batch_size
    else:
        short = min(config.seq_len, 64)
        few = dataclasses.replace(
            config,
            **_FEW,
            data="python-docs",
            eval_limit=samples,
            seq_len=short,
            batch_size=samples,
        )
        factor = config.batch_size * config.seq_len / (few.batch_size * short)
    with closing(trainer_of(study, few)) as trainer:
        batch = next(iter(trainer.batches(0)))
        trainer.start_epoch()
        trainer.pipe.train()
        for _ in range(_STEPS_BEFORE - 1):
            trainer.forward_backward(batch)
        with FlopCounterMode(display=False) as flops:
            trainer.forward_backward(batch)
        operations = num_operations(lambda: trainer.forward_backward(batch))
    return factor * flops.get_total_flops(), operations
