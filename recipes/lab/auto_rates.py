"""The choices of ``auto`` at several rates of the links, beside the best fixed setting.

    python -m recipes.lab.auto_rates                          # writes the rows, in docs/results
    python -m recipes.lab.auto_rates --table --gflops 5000    # prints some of them

Nothing runs: a step is simulated, as by ``mpcomp plan``. Operations of models are counted; coding
took what `recipes.lab.plan_coding` has measured on one core, and bytes are the studies'. What
``auto`` sends follows from the rule that a run uses, by the same code
(`mpcomp.monitor.payoff.Simulation.where_it_pays`). Fixed settings are those of the studies that
cost at most one per cent, or one point, more than the word.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tabulate import tabulate

from mpcomp.command.models import candidate
from mpcomp.monitor.payoff import CutTimes, RankTimes, Simulation
from mpcomp.plan.curve import time_text
from mpcomp.plan.known_quality import known_of, methods_of
from mpcomp.plan.planner import Pair
from mpcomp.plan.profile import Profile, count_profile
from recipes.lab.plan_coding import CODING
from recipes.lab.plan_form import TEXT, cost_of
from recipes.run_folder import read_json_lines

__all__ = ["MACHINES", "OUT", "RATES", "TASKS", "Row", "rows_of"]

OUT: Final = CODING.with_name("auto_rates.jsonl")
#: GFLOP/s of every machine: a few cores; many, or a small accelerator; an accelerator.
MACHINES: Final = (50.0, 500.0, 5000.0)

#: Mbit/s of every link.
RATES: Final = (10.0, 30.0, 100.0, 300.0, 1000.0)
_LATENCY_S: Final = 0.005
#: Of quality, beyond the word's, that a fixed setting may cost.
_FLOOR: Final = 1.0
_NONE, _BF16 = ("none", "none"), ("bf16", "bf16")


class Task(NamedTuple):
    """A task of the page that says which setting to start with.

    Attributes:
        model: as ``mpcomp plan`` takes it.
        kind: in `mpcomp.plan.known_quality.TASKS`.
        word: that ``auto`` is for it.
        stages: one to a machine.
        rows: of a microbatch.
        tokens: of a row of text.
        chunks: microbatches of a step.
        backward: of a forward's time.
    """

    model: str
    kind: str
    word: str
    stages: int
    rows: int
    tokens: int = 256
    chunks: int = 8
    backward: float = 2.0


_SMOLLM2: Final = TEXT["SmolLM2-135M"]
#: Weights that LoRA freezes have no gradients, which are half of a backward.
TASKS: Final = {
    "ResNet-18 from scratch": Task("resnet18", "images", "auto:relu", 4, 16),
    "GPT-2 from scratch": Task("gpt2", "scratch", "auto:scratch", 4, 4),
    "small GPT-2 of your own": Task(
        "gpt2 --config n_layer=8 n_embd=256 n_head=4", "scratch", "auto:scratch", 4, 8
    ),
    "SmolLM2-135M, fine-tuned": Task(_SMOLLM2, "finetune", "auto:memory", 3, 4),
    "SmolLM2-135M, LoRA": Task(_SMOLLM2, "finetune", "auto:memory", 3, 4, backward=1.0),
}


class Row(NamedTuple):
    """A task at one rate.

    Attributes:
        gflops: of every machine, a second.
        task: of `TASKS`.
        mbps: of every link.
        sends: what ``auto`` does.
        step_s: its step.
        best: the fastest fixed setting.
        best_s: its step.
    """

    gflops: float
    task: str
    mbps: float
    sends: str
    step_s: float
    best: str
    best_s: float


def main(argv: Sequence[str] | None = None) -> None:
    """Writes all rows, or prints some."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.auto_rates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--table", action="store_true", help="print what was written")
    parser.add_argument("--gflops", type=float, help="of a machine, in the table (default: all)")
    parser.add_argument("--out", type=Path, default=OUT, help="of rows (default: %(default)s)")
    options = parser.parse_args(argv)
    if not options.table:
        found = [row for gflops in MACHINES for name in TASKS for row in rows_of(name, gflops)]
        options.out.write_text("".join(f"{json.dumps(row._asdict())}\n" for row in found))
        return
    every = [Row(**row) for row in read_json_lines(options.out)]
    found = [row for row in every if options.gflops in (None, row.gflops)]
    headers = ["task", "Mbit/s", "auto sends", "step", "best fixed", "its step", "times as long"]
    cells = [
        [
            *(row.task, f"{row.mbps:g}", row.sends, time_text(row.step_s)),
            *(row.best, time_text(row.best_s), f"{row.step_s / row.best_s:.2f}"),
        ]
        for row in found
    ]
    print(tabulate(cells, headers, disable_numparse=True))


def rows_of(name: str, gflops: float) -> Iterator[Row]:
    """The rows of a task, on machines of so many GFLOP/s."""
    task = TASKS[name]
    command, *rest = task.model.split()
    config = dict(entry.split("=", 1) for entry in rest if "=" in entry)
    model = candidate(command, rows=task.rows, seq_len=task.tokens, config=config)
    profile = count_profile(
        model.model, model.sample, flops_per_s=1e9 * gflops, together=task.kind != "images"
    )
    ranks, sizes = _machines(task, profile)
    word = (task.word, task.word)
    most = _loss(task, word) + _FLOOR
    fixed = [pair for pair in methods_of(task.kind) if _loss(task, pair) <= most]
    costs = {pair: [cost_of(task.kind, pair, size) for size in sizes] for pair in fixed}
    for mbps in RATES:
        link = mbps, 2 * _LATENCY_S
        cuts = [
            CutTimes(own.coding, own.messages, dense.messages, bf16.messages, link)
            for own, dense, bf16 in zip(costs[word], costs[_NONE], costs[_BF16], strict=True)
        ]
        simulation = Simulation(ranks, cuts, task.chunks, None)
        pays = simulation.where_it_pays([cut.in_bf16() for cut in cuts])
        sent = [costs[word if here else _BF16][i] for i, here in enumerate(pays)]
        steps = {p: simulation.seconds(simulation.network, own) for p, own in costs.items()}
        best = min(steps, key=lambda pair: steps[pair])
        yield Row(
            gflops,
            name,
            mbps,
            _sends(task.word, pays),
            simulation.seconds(simulation.network, sent),
            best[0] if best[0] == best[1] else " / ".join(best),
            steps[best],
        )


def _machines(task: Task, profile: Profile) -> tuple[list[RankTimes], list[int]]:
    """Times of the machines, and elements of a microbatch at each cut."""
    forward = [block.compute.forward_s for block in profile.blocks]
    counts = profile.balanced(task.stages, [forward] * task.stages)
    stages = profile.stages(counts)
    seconds = [task.chunks * (1 + task.backward) * sum(forward[own]) for own in stages]
    last = seconds.pop() if len(seconds) > task.stages else 0.0
    ranks = [RankTimes(each, 0.0, 0.0) for each in seconds]
    if last:
        ranks[0] = RankTimes(seconds[0] + last, 0.0, 0.0, last / (seconds[0] + last))
    return ranks, [profile.blocks[own][-1].output.numel for own in stages[:-1]]


def _loss(task: Task, pair: Pair) -> float:
    known = known_of(task.kind, *pair)
    assert known is not None
    return known.loss


def _sends(word: str, pays: Sequence[bool]) -> str:
    if len(set(pays)) == 1:
        return word if pays[0] else "bf16"
    some = ", ".join(str(cut) for cut, here in enumerate(pays) if here)
    return f"{word} at cut {some}, bf16"


if __name__ == "__main__":
    main()
