"""Ratios that adapt at the cuts against fixed ones of as many bytes.

    python -m recipes.lab.adaptive_study --groups images --images FOLDER --seeds 3
    python -m recipes.lab.adaptive_study --groups text --text FOLDER --seeds 3
    python -m recipes.lab.adaptive_study --table

All rows but the first, bf16, and the last few send the same share of the dense bytes: Top-k
(``--budget``) or numbers with few bits, the same everywhere, more for activations or for gradients,
for the first cuts or for the last; and `mpcomp.Adaptive` with that budget, by its two energies and
by the loss. GraVAC's rule has no budget: its rows are to be held against the uniform ones of half
and of twice the bytes.
`recipes.lab.study` runs it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from tabulate import tabulate

import mpcomp
from recipes.config import RunConfig
from recipes.image_config import ImageConfig
from recipes.lab.account import REFERENCE
from recipes.lab.study import (
    Line,
    Runs,
    Study,
    given,
    run_study,
    study_parser,
)
from recipes.lab.study_runs import own_settings, reached, trainer_of
from recipes.lab.study_table import PAIRED, Results, Run, spread
from recipes.metric import ACCURACY, PERPLEXITY, Metric
from recipes.ranks import Ranks
from recipes.text_config import TextConfig

UNIFORM: Final = "uniform"
_CF: Final = "cf=2-400:window=20"


class Group(NamedTuple):
    """A model and its data.

    Attributes:
        metric: its runs are judged by.
        weights: bytes of each cut, as shares of the largest.
        settings: of the configuration.
        bits: an element, of the uniform row; None for Top-k.
    """

    metric: Metric
    weights: tuple[float, ...]
    settings: Mapping[str, Any]
    bits: int | None = None


_TEXT: Final = {
    **{"model": "tiny", "split": "4", "chunks": 4, "batch_size": 16, "seq_len": 128},
    **{"epochs": 2, "lr": 1e-3, "optimizer": "adamw", "vocab_size": 2048},
    **{"tokenizer": "bpe", "tie": "none", "eval_limit": 64},
}

GROUPS: Final[Mapping[str, Group]] = {
    # ResNet's cuts lie after its layers, each of which halves what crosses.
    "images": Group(
        ACCURACY,
        (1.0, 0.5, 0.25),
        {
            **{"model": "resnet18", "width": 16, "split": "4", "chunks": 4, "batch_size": 128},
            **{"epochs": 5, "lr": 0.05, "train_limit": 8_192, "test_limit": 2_000},
        },
    ),
    "text": Group(PERPLEXITY, (1.0, 1.0, 1.0), _TEXT),
    "text in bits": Group(PERPLEXITY, (1.0, 1.0, 1.0), _TEXT, bits=3),
}

#: By row the methods of activations and of gradients, one for each cut or one for all.
Rows: TypeAlias = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]


def rows_of(group: Group, budget: float) -> Rows:
    """The rows of a group, given the budget of those with Top-k."""
    return _rows_in_bits(group.bits) if group.bits else _rows_of_topk(group, budget)


def _rows_of_topk(group: Group, budget: float) -> Rows:
    early = _shares(group.weights, 2.0)
    late = _shares(group.weights, 0.5)

    def static(act: float, grad: float, shares: Sequence[float] | None = None) -> Any:
        each = shares or [1.0] * len(group.weights)
        return tuple(
            tuple(topk_of(of_direction * share) for share in each) for of_direction in (act, grad)
        )

    def adaptive(act: str, grad: str | None = None) -> Any:
        return tuple(
            (f"adaptive:{_CF}:{settings}+topk:0.1",) for settings in (act, grad if grad else act)
        )

    return {
        REFERENCE: ((REFERENCE,), (REFERENCE,)),
        UNIFORM: static(budget, budget),
        "more for activations": static(1.5 * budget, 0.5 * budget),
        "more for gradients": static(0.5 * budget, 1.5 * budget),
        "more for early cuts": static(budget, budget, early),
        "more for late cuts": static(budget, budget, late),
        **_adaptive_rows(f"{_CF}:budget={budget:g}", "topk:0.1"),
        "uniform, half": static(budget / 2, budget / 2),
        "uniform, twice": static(2 * budget, 2 * budget),
        "GraVAC, energy": adaptive("eps=0.8"),
        "GraVAC, centred": adaptive("eps=0.7:gain=centred"),
    }


def _rows_in_bits(bits: int) -> Rows:
    """A bit more here is one less there; scales are of 128 elements."""

    def static(act: Sequence[int], grad: Sequence[int]) -> Any:
        return tuple(tuple(f"quant:{b}:scale=128" for b in each) for each in (act, grad))

    same, more, less = ([b] * 3 for b in (bits, bits + 1, bits - 1))
    early = [bits + 1, bits, bits - 1]
    uniform = mpcomp.Quantize(bits, scale=128)
    # A little above what the uniform row sends, which else would not fit for its headers.
    budget = 1.005 * uniform.wire_ratio(mpcomp.TensorMeta((4, 32_768)))
    return {
        REFERENCE: ((REFERENCE,), (REFERENCE,)),
        UNIFORM: static(same, same),
        "more for activations": static(more, less),
        "more for gradients": static(less, more),
        "more for early cuts": static(early, early),
        "more for late cuts": static(early[::-1], early[::-1]),
        **_adaptive_rows(f"cf=4-16:window=20:budget={budget:.6f}", str(uniform)),
    }


def _adaptive_rows(settings: str, inner: str) -> Rows:
    """A budget by each gain."""

    def adaptive(act: str, grad: str = "") -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (f"adaptive:{settings}{act}+{inner}",), (f"adaptive:{settings}{grad}+{inner}",)

    return {
        "adaptive budget, energy": adaptive(""),
        "adaptive budget, centred": adaptive(":gain=centred", ":gain=centred"),
    }


def topk_of(ratio: float) -> str:
    """Top-k whose message is such a share of the dense fp32 bytes."""
    meta = mpcomp.TensorMeta((8, 8192))
    low, high = 0.0, 1.0
    for _ in range(40):
        keep = (low + high) / 2
        smaller = mpcomp.TopK(keep).wire_ratio(meta) < ratio
        low, high = (keep, high) if smaller else (low, keep)
    return f"topk:{high:.6f}"


def _shares(weights: Sequence[float], factor: float) -> list[float]:
    """Ratios of the cuts relative to a uniform one, each ``factor`` times the next, same bytes."""
    steps = [factor ** (-0.5 * i) for i in range(len(weights))]
    mean = sum(w * s for w, s in zip(weights, steps, strict=True)) / sum(weights)
    return [step / mean for step in steps]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the tables; `--table` prints only."""
    study = Study(parse=_parse, runs=runs, train=train, settings=own_settings, render=render)
    run_study(study, argv)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    rows = rows_of(GROUPS["text"], 0.05)
    parser = study_parser("adaptive_study", __doc__, rows, seeds=5)
    add = parser.add_argument
    add("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    add("--budget", type=float, default=0.05, dest="share",
        help="share of the dense bytes (default %(default)s)")  # fmt: skip
    add("--images", default=ImageConfig.data, help="hub name, folder of parquet files, or digits")
    add("--text", default=TextConfig.data, help="hub name, folder, text files, or python-docs")
    add("--epochs", type=int)
    add("--batch-size", type=int)
    add("--train-limit", type=int, help="images, or articles of text")
    add("--test-limit", type=int, help="images")
    add("--eval-limit", type=int, metavar="BLOCKS", help="of text")
    return parser.parse_args(argv)


def runs(options: argparse.Namespace, num_processes: int) -> Runs[RunConfig]:
    """Group by group, all rows of a seed before the next."""
    return {
        (f"{group}: {row}", seed): configuration(options, group, row, seed)
        for group in options.groups
        for seed in range(options.seeds)
        for row in options.rows
        if row in rows_of(GROUPS[group], options.share)
    }


def configuration(options: argparse.Namespace, group: str, row: str, seed: int) -> RunConfig:
    """The run of one row of a group and seed."""
    of_group = GROUPS[group]
    config = ImageConfig if of_group.metric is ACCURACY else TextConfig
    act, grad = rows_of(of_group, options.share)[row]
    chosen: dict[str, Any] = {**of_group.settings, **given(options, config)}
    chosen |= {"act": act, "grad": grad, "seed": seed, "eval_every": chosen["epochs"]}
    chosen["precision"] = "fp32" if options.precision == "auto" else options.precision
    if config is ImageConfig:
        chosen |= {"data": options.images, "schedule_epochs": chosen["epochs"]}
    else:
        chosen["data"] = options.text
    return config(**chosen)


def train(config: RunConfig, settings: Line, ranks: Ranks) -> Line:
    """Trains one run; its line has the bytes and ratios of the cuts, and quality without them."""
    trainer = trainer_of(config, ranks)
    summary = trainer.fit(progress=False)
    links = [link for boundary in trainer.pipe.boundaries for link in boundary.links]
    sent = [link.meter.train for link in links]
    history = trainer.adaptive_log.new_steps()
    every = max(1, len(history) // 40)
    return {
        **reached(summary),
        "off": summary.off,
        # Of the cuts alone: what copies of a tied weight exchange is dense in all rows.
        "wire_ratio": sum(t.wire_bytes for t in sent) / sum(t.dense_bytes for t in sent),
        "links": [[link.boundary, link.direction, link.meter.train.ratio] for link in links],
        "adaptive": history[::every],
    }


def render(lines: Sequence[Line]) -> str:
    """The tables of all groups that have results."""
    results = Results.of(lines)
    return "\n\n".join(text for group in GROUPS if (text := _group_table(group, results)))


def _group_table(group: str, results: Results) -> str:
    metric, prefix = GROUPS[group].metric, f"{group}: "
    names = {row: row.removeprefix(prefix) for row in results.runs if row.startswith(prefix)}
    if not names:
        return ""

    def cells(row: str, runs: Sequence[Run]) -> list[str]:
        uniform = prefix + UNIFORM
        return [
            spread([metric.scale * run[metric.name] for run in runs], between="+-"),
            "" if row == uniform else results.paired(row, uniform, metric),
            spread([metric.scale * run["off"] for run in runs], between="+-"),
            f"{(ratio := statistics.mean(run['wire_ratio'] for run in runs)):.4f}",
            f"{0.5 / ratio:.1f}",  # these runs are in fp32
        ]

    shown = f"{metric.name} {metric.unit}".rstrip()
    headers = (
        *("row", "n", shown, "less uniform", f"{shown}, off", "bytes ÷ fp32"),
        "cuts below bf16",
    )
    text = tabulate(results.table(names, cells), headers, disable_numparse=[2, 3, 4, 5, 6])
    return f"{group}\n{text}\n{PAIRED}"


if __name__ == "__main__":
    main()
