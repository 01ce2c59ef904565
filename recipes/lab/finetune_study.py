"""A released language model, fine-tuned: what each method at the cuts costs, and what it sends.

    python -m recipes.lab.finetune_study --model SmolLM2-135M-Instruct.Q4_1.gguf --data FOLDER
    python -m recipes.lab.finetune_study --model FILE --data FOLDER --resume FOLDER
    python -m recipes.lab.finetune_study --model FILE --data FOLDER --lora 8 --lr 2e-4 --out FILE
    python -m recipes.lab.finetune_study --table

All weights, or with ``--lora`` adapters, in three stages, over epochs in which the same blocks of
text come again in another order: what methods with a memory are made for. Seeds vary the order.
Published methods stand in their own settings beside the project's own, and the parts of a memory by
themselves. Both uses of the tied embedding are on the first rank: a step sends what its cuts send,
and has one more.

By default an epoch has 161 steps (45 articles of WikiText-2), three of them, and each ends with
an evaluation on 64 blocks. A memory may cost nothing over 27 steps and much over 483, as a sample's
second visit is the first that it answers for. A run takes 40 minutes on a core: ``--resume FOLDER``
keeps what its epochs have ended with, and the same command goes on from there.

`recipes.lab.study` runs it; `recipes.lab.rate_quality` draws it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Final

from tabulate import tabulate

from mpcomp.core.traffic import LAGS
from mpcomp.links.auto import AUTO, BEFORE_HEAD, GENERAL
from mpcomp.links.budget import scaled
from recipes.lab.account import REFERENCE
from recipes.lab.cut_grid import (
    Row,
    chosen_options,
    grid_parser,
    need_row,
    run_grid,
    shared_settings,
)
from recipes.lab.rate_quality import BF16_BITS, WITH_DEAD_ZONES, table_of_epochs
from recipes.lab.study import Line, data_of
from recipes.lab.study_table import PERCENT, half_interval
from recipes.lab.wikitext_study import identity, outcome_of
from recipes.metric import PERPLEXITY
from recipes.ranks import Ranks
from recipes.run_folder import RunFolder
from recipes.text_config import TextConfig
from recipes.wikitext import TextTrainer, load_data

_FIRST: Final = "step/0.4/centre=true/spikes=16"
_ACT: Final = f"aqsgd:first={_FIRST}:eval=step/0.1/centre=true/spikes=16"
#: Activations: a memory, one in a dead zone, and none.
_MEMORY, _STILL = f"{_ACT}+step:0.4:spikes=16", f"{_ACT}+step:0.4:spikes=16:dead_zone=0.7"
_NO_MEMORY: Final = _FIRST.replace("/", ":")
#: Gradients: likewise, dithered at the first visit or in every step.
_ROUNDED: Final = "aqsgd:first=step/1.05/scale=tensor+step:0.9:scale=tensor"
_DITHERED_AT_FIRST: Final = "aqsgd:first=step/1.2/scale=tensor/rounding=dither+step:1:scale=tensor"
_DITHERED: Final = "step:1:scale=tensor:rounding=dither"


def _scaled(factor: float) -> Row:
    """`auto:memory` with all steps of training times a factor, the ones before the head, too."""
    of_cuts = [*[AUTO["auto:memory"]] * 2, BEFORE_HEAD["auto:memory"]]
    act, grad = (
        tuple(scaled(methods[argument], factor) for methods in of_cuts)
        for argument in ("act_comp", "grad_comp")
    )
    return Row(act, grad)


ROWS: Final[dict[str, Row]] = {
    REFERENCE: Row(REFERENCE, REFERENCE),
    "auto:memory": Row("auto:memory", "auto:memory"),
    # What a budget goes by (`mpcomp.links.budget`).
    "training steps times 1.6": _scaled(1.6),
    # Without what it has before a head.
    "alike at all cuts": Row(AUTO["auto:memory"]["act_comp"], AUTO["auto:memory"]["grad_comp"]),
    "auto": Row(*GENERAL),
    # What auto:memory was, and its parts: dead zones, `along=`, and the memories by themselves.
    "dead zones": Row(*WITH_DEAD_ZONES),
    "dead zones, no along": Row(_STILL, WITH_DEAD_ZONES[1]),
    "dead zone of activations": Row(_STILL, _DITHERED_AT_FIRST),
    "dead zone of gradients": Row(_MEMORY, WITH_DEAD_ZONES[1]),
    "along": Row(WITH_DEAD_ZONES[0].replace(":dead_zone=0.7", ""), _DITHERED_AT_FIRST),
    "no dither": Row(_MEMORY, _ROUNDED),
    "memory of activations": Row(_MEMORY, _DITHERED),
    "memory of gradients": Row(_NO_MEMORY, _DITHERED_AT_FIRST),
    "no memory": Row(_NO_MEMORY, _DITHERED),
    "finer steps": Row(
        _MEMORY.replace("+step:0.4", "+step:0.25"),
        "aqsgd:first=step/0.8/scale=tensor/rounding=dither+step:0.7:scale=tensor",
    ),
    "coarser gradients": Row(
        _MEMORY, "aqsgd:first=step/1.5/scale=tensor/rounding=dither+step:1.5:scale=tensor"
    ),
    "fw4-bw8": Row("quant:4:scale=128", "quant:8:scale=128"),
    "fw4-bw8, AQ-SGD": Row("aqsgd+quant:4:scale=128", "quant:8:scale=128"),
    "fw2-bw8, AQ-SGD": Row("aqsgd+quant:2:scale=128", "quant:8:scale=128"),
    # Tiles of 64 elements with a scale each, as TAH-Quant has them.
    "tiles of 64, 4 bits": Row("quant:4:scale=64", "quant:4:scale=64:rounding=stochastic"),
    # A rotation and the Gaussian's centroids, as in TurboQuant.
    "rotation, 3 bits": Row("rotate+lloyd:3", "rotate+lloyd:3"),
    "top 10 %": Row("topk:0.1+fp16", "topk:0.1+fp16"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the tables; `--table` prints only."""
    run_grid(
        argv,
        parse=parse_args,
        configuration=configuration,
        train=partial(train, folder=parse_args(argv).resume),
        settings=settings,
        render=render,
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the study."""
    parser = grid_parser("finetune_study", __doc__, ROWS)
    parser.set_defaults(epochs=3, eval_every=1, batch_size=4, chunks=1, lr=2e-5, workers=2)
    add = parser.add_argument
    add("--model", help="file or folder of a released model; needed to run")
    add("--data", help="hub name, folder, text files, or python-docs")
    add("--split", default="10,10,10", help="blocks of each stage (default %(default)s)")
    add("--seq-len", type=int, default=256, metavar="TOKENS", help="of a block")
    add("--lora", type=int, metavar="RANK", help="of the adapters that alone are trained")
    add("--train-limit", type=int, default=45, metavar="ARTICLES", help="(default %(default)s)")
    add("--eval-limit", type=int, default=64, metavar="BLOCKS", help="(default %(default)s)")
    add("--resume", type=Path, metavar="FOLDER", help="of checkpoints, to go on with stopped runs")
    options = parser.parse_args(argv)
    need_row(parser, options, REFERENCE)
    if options.model is None and not options.table:
        parser.error("--model is missing: pass the file or folder of a released model")
    if options.precision == "auto":
        options.precision = "bf16"
    return options


def configuration(options: argparse.Namespace, row: str, seed: int) -> TextConfig:
    """The run of one row and seed."""
    chosen = chosen_options(options, TextConfig, ROWS[row], seed)
    return TextConfig.for_model(**{**chosen, "optimizer": "adamw"})


def settings(config: TextConfig, options: argparse.Namespace) -> Line:
    """Settings that all runs of one file share; the model by its weights, wherever it lies."""
    return {**shared_settings(config, options), "model": identity(config)}


def train(config: TextConfig, settings: Line, ranks: Ranks, *, folder: Path | None = None) -> Line:
    """Trains one run; its line has the bytes and both perplexities of each epoch.

    Args:
        config: of the run.
        settings: of all runs.
        ranks: this one.
        folder: of checkpoints of runs that have not ended; None keeps none.
    """
    trainer = TextTrainer(config, data_of(config, load_data, ranks))
    own = None if folder is None else RunFolder(folder / name_of(config))
    outcome = outcome_of(trainer, own)  # trains
    if own is not None:
        shutil.rmtree(own.path)
    cuts = [epoch["account"]["cuts"] for epoch in trainer.history]
    sums = [0, *(each["wire_bytes"] for each in cuts)]
    elements = cuts[-1]["num_elements"]
    return {
        **outcome,
        **{
            name: methods[0] if len(methods) == 1 else methods
            for name, methods in (("act", config.act), ("grad", config.grad))
        },
        "cut_bytes_by_epoch": [after - before for before, after in itertools.pairwise(sums)],
        **{
            f"{key}_by_epoch": [epoch[key] for epoch in trainer.history]
            for key in (PERPLEXITY.on, PERPLEXITY.off)
        },
        "memories": {
            link.name: {name: getattr(link.meter.train, name) for name in LAGS}
            for link in trainer.pipe.links
            if link.meter.train.lag is not None
        },
        "bf16_bytes_an_epoch": BF16_BITS / 8 * elements / config.epochs,
    }


def name_of(config: TextConfig) -> str:
    """The folder of a run: its seed, and a number for its methods."""
    methods = " / ".join((*config.act, *config.grad))
    return f"seed-{config.seed}-{zlib.crc32(methods.encode()):08x}"


def render(lines: Sequence[Line]) -> str:
    """The table of runs, and of those that were evaluated after each epoch their curves."""
    text = table_of_epochs(lines)
    followed = [line for line in lines if None not in line.get(_OFF_BY_EPOCH, [None])]
    return f"{text}\n\n{curves(followed)}" if followed else text


def curves(lines: Sequence[Line]) -> str:
    """A line for each row and epoch: bytes, training loss, perplexity, and the gap between them.

    The gap is the logarithm of the perplexity without compression, less the training loss. It is
    larger than that of the uncompressed run where a run learns its samples and not their language.
    """
    plain = {line["seed"]: line for line in lines if line["row"] == REFERENCE}
    if not plain:
        raise ValueError(f"there is no row {REFERENCE}, which is what the others are held to")
    cells = []
    for row in dict.fromkeys(line["row"] for line in lines):
        own = [line for line in lines if line["row"] == row and line["seed"] in plain]
        for epoch in range(len(own[0]["losses"])):
            pairs = [(_at(line, epoch), _at(plain[line["seed"]], epoch)) for line in own]
            if row == REFERENCE:
                shown = [f"{mean(at[i] for at, _ in pairs):.3f}" for i in range(1, len(_FIGURES))]
            else:
                shown = [
                    *(_spread([100 * (at[i] / of[i] - 1) for at, of in pairs], " %")
                      for i in (1, 2, 3)),
                    _spread([at[4] - of[4] for at, of in pairs], "", ".3f"),
                ]  # fmt: skip
            sent = mean(at[0] for at, _ in pairs)
            cells.append([row, epoch + 1, f"{sent:.1f}", *shown, len(own)])
    headers = ["row", "epoch", *_FIGURES, "n"]
    return tabulate(cells, headers, tablefmt="pipe", disable_numparse=True)


_FIGURES: Final = (
    *("cuts below bf16", "training loss", "perplexity on", "perplexity off"),
    "gap",
)
_OFF_BY_EPOCH: Final = f"{PERPLEXITY.off}_by_epoch"


def _at(line: Line, epoch: int) -> tuple[float, ...]:
    """The figures of an epoch of a run."""
    loss, off = line["losses"][epoch], line[_OFF_BY_EPOCH][epoch]
    return (
        line["bf16_bytes_an_epoch"] / line["cut_bytes_by_epoch"][epoch],
        *(loss, line[f"{PERPLEXITY.on}_by_epoch"][epoch], off, math.log(off) - loss),
    )


def _spread(values: Sequence[float], unit: str, form: str = ".1f") -> str:
    """The mean, with half of its interval by t where there are three or more."""
    text = f"{mean(values):+{form}}"
    if len(values) > 2:
        text += f" ± {half_interval(values, PERCENT):{form}}"
    return text + unit


if __name__ == "__main__":
    main()
