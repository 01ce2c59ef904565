"""Runs that one command trains one after the other, compared as pairs: what is made of them.

Each finished (row, seed) is one line of a results file; those are skipped when the command is given
again. `recipes.replica_study`, `recipes.conef_study` and `recipes.adaptive_study` say what is
trained.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from recipes import image_training, text_training
from recipes.config import RunConfig
from recipes.image_config import ImageConfig
from recipes.ranks import Ranks
from recipes.run_folder import append_json_line, read_json_lines
from recipes.summary import Summary
from recipes.text_config import TextConfig
from recipes.training import Trainer

Line: TypeAlias = dict[str, Any]
#: Row -> seed -> its line.
Found: TypeAlias = Mapping[str, Mapping[int, Line]]
#: What a study keeps of a run that has ended.
Measured: TypeAlias = Callable[[Trainer[Any], Summary], Line]

#: Quantiles of Student's t for two-sided intervals, in percent, by degrees of freedom.
T_QUANTILES: Final[Mapping[int, Sequence[float]]] = {
    90: (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833),
    95: (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262),
}

# What decides which data a run needs; runs that agree in these share them.
_DATA_OPTIONS: Final = {
    ImageConfig: ("data", "train_limit", "test_limit"),
    TextConfig: (
        *("data", "part", "train_limit", "model", "tokenizer", "vocab_size", "seq_len"),
        *("eval_split", "eval_limit"),
    ),
}


def add_common(parser: argparse.ArgumentParser, out: Path) -> None:
    """The options of every study on replicas."""
    add = parser.add_argument
    add("--out", type=Path, default=out, help="results file")
    add("--seeds", type=int, default=5, help="seeds 0 to n-1 of every row")
    add("--precision", default="auto")
    add("--device", default="auto")
    add("--threads", type=int, default=1, help="of each process, on the CPU")
    add("--table", action="store_true", help="print the tables of the results, run nothing")


def run_missing(
    configs: Mapping[tuple[str, int], RunConfig], out: Path, ranks: Ranks, measured: Measured
) -> None:
    """Trains what the results file has no line of, in the order of `configs`.

    Args:
        configs: by row and seed.
        out: the results file.
        ranks: train together.
        measured: what is kept of a run besides its metric, loss and bytes.
    """
    done = ranks.gather([[x["row"], x["seed"]] for x in read_json_lines(out)])[0]
    missing = {key: config for key, config in configs.items() if list(key) not in done}
    if ranks.speaks:
        print(f"{len(configs) - len(missing)} of {len(configs)} runs are finished in {out}")
    loaded: dict[Hashable, Any] = {}
    for (row, _), config in missing.items():
        line = _train(row, config, loaded, ranks, measured)
        gc.collect()  # the last pipeline's connections, and a thread for each, end with it
        if ranks.speaks:
            append_json_line(out, line)
            print(f"{row}, seed {config.seed}: {_shown(line)}", flush=True)


def print_tables(out: Path, ranks: Ranks, render: Callable[[Sequence[Line]], str]) -> None:
    """Prints what ``render`` makes of a results file, on one rank.

    Raises:
        ValueError: there are no results.
    """
    if not ranks.speaks:
        return
    lines = read_json_lines(out)
    if not lines:
        raise ValueError(f"{out} has no results yet; run without --table first")
    print(render(lines))


def by_row(lines: Sequence[Line]) -> dict[str, dict[int, Line]]:
    """The lines of a results file; of two with the same row and seed the later one."""
    found: dict[str, dict[int, Line]] = {}
    for line in lines:
        found.setdefault(line["row"], {})[line["seed"]] = line
    return found


def paired(
    found: Found, row: str, against: str, name: str, *, percent: int, scale: float = 1.0
) -> str:
    """The mean of the differences of seeds that both rows have, with its interval.

    Args:
        found: the results.
        row: the difference is of this row
        against: less this one.
        name: of the number in a line; lines without it, of runs that diverged, are left out.
        percent: of the interval, a key of `T_QUANTILES`.
        scale: of what is shown.
    """
    other = found.get(against, {})
    differences = [
        scale * (line[name] - other[seed][name])
        for seed, line in found.get(row, {}).items()
        if name in line and name in other.get(seed, {})
    ]
    if not differences:
        return "-"
    mean = statistics.mean(differences)
    if len(differences) == 1:
        return f"{mean:+.2f}"
    quantiles = T_QUANTILES[percent]
    error = quantiles[min(len(differences) - 2, len(quantiles) - 1)]
    return f"{mean:+.2f} +- {error * statistics.stdev(differences) / len(differences) ** 0.5:.2f}"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    mean = statistics.mean(values)
    return f"{mean:.2f} +- {statistics.stdev(values):.2f}" if len(values) > 1 else f"{mean:.2f}"


def _trainer(config: RunConfig, loaded: dict[Hashable, Any], ranks: Ranks) -> Trainer[Any]:
    """That of a run; its data are loaded unless an earlier run has left them in `loaded`."""
    key = (type(config), *(getattr(config, name) for name in _DATA_OPTIONS[type(config)]))
    if isinstance(config, ImageConfig):
        images = config
        if key not in loaded:
            loaded[key] = ranks.together(lambda: image_training.load_data(images))
        return image_training.ImageTrainer(config, loaded[key], ranks)
    assert isinstance(config, TextConfig)
    text = config
    if key not in loaded:
        loaded[key] = ranks.together(lambda: text_training.load_data(text))
    return text_training.TextTrainer(config, loaded[key], ranks)


def _train(
    row: str,
    config: RunConfig,
    loaded: dict[Hashable, Any],
    ranks: Ranks,
    measured: Measured,
) -> Line:
    """Trains one run on all ranks; a divergence is a result too."""
    start: Line = {"row": row, "seed": config.seed, "settings": config.to_json()}
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    start |= {"device": machine, "torch": torch.__version__}
    start["settings"]["data"] = Path(config.data).name
    trainer = _trainer(config, loaded, ranks)
    try:
        summary = trainer.fit(progress=False)
    except FloatingPointError as error:  # on all ranks
        return {**start, "diverged": str(error)}
    return {
        **start,
        summary.metric.name: summary.on,
        "loss": summary.loss,
        "seconds": summary.seconds,
        "steps": summary.steps,
        "wire_bytes": summary.wire_bytes,
        "dense_bytes": summary.dense_bytes,
        **measured(trainer, summary),
    }


def _shown(line: Line) -> str:
    if "diverged" in line:
        return "diverged"
    saved = line["dense_bytes"] / line["wire_bytes"]
    reached = (
        f"{100 * line['accuracy']:.2f} %"
        if "accuracy" in line
        else f"perplexity {line['perplexity']:.2f}"
    )
    return f"{reached}, {saved:.1f} x fewer bytes, {line['seconds']:.0f} s"
