"""The grid of Rudakov et al. on CIFAR-10, from one command that can be stopped and continued.

    python -m recipes.lab.cifar10_study --data FOLDER --epochs 3 --train-limit 10000 --seeds 3
    python -m recipes.lab.cifar10_study --table

`recipes.lab.study` runs it. Full size: ``--width 64 --epochs 100 --device cuda --workers 1``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from recipes.cifar10 import load_data, run
from recipes.image_config import MODELS, ImageConfig
from recipes.lab.account import REFERENCE
from recipes.lab.cut_grid import Row, chosen_options, grid_parser, run_grid
from recipes.lab.study import Line, data_of
from recipes.lab.study_table import Claim, Column, Results, Table, render
from recipes.metric import ACCURACY
from recipes.ranks import Ranks

# Quantization fwA-bwB: A bits forward, B bits backward. As in the paper, methods with memory start
# from an uncompressed warm-up (there 10 to 20 of 100 epochs), and AQ-SGD remembers activations
# while gradients go as plain Top-K; "after warm-up" is what they are to be compared with.
ROWS: Final[dict[str, Row]] = {
    REFERENCE: Row(REFERENCE, REFERENCE),
    "quant fw4-bw8": Row("quant:4", "quant:8"),
    "quant fw4-bw4": Row("quant:4", "quant:4"),
    "quant fw2-bw8": Row("quant:2", "quant:8"),
    "step 0.5, gradients 1": Row("step:0.5", "step:1"),
    "step 1, gradients 1.5": Row("step:1", "step:1.5"),
    # Behind a ReLU, as all cuts of a ResNet are: gradients where the activation is not zero.
    "step 0.5, dithered gradients of nonzero": Row(
        "step:0.5", "same:where=nonzero+step:1.5:scale=tensor:rounding=dither"
    ),
    "step 0.4, finer dithered gradients of nonzero": Row(
        "step:0.4", "same:where=nonzero+step:1:scale=tensor:rounding=dither"
    ),
    "step 0.3, dithered gradients of nonzero 0.7": Row(
        "step:0.3", "same:where=nonzero+step:0.7:scale=tensor:rounding=dither"
    ),
    "top 50 %": Row("topk:0.5", "topk:0.5"),
    "top 20 %": Row("topk:0.2", "topk:0.2"),
    "top 10 %": Row("topk:0.1", "topk:0.1"),
    "top 5 %": Row("topk:0.05", "topk:0.05"),
    "top 2 %": Row("topk:0.02", "topk:0.02"),
    "top act 5 % grad 20 %": Row("topk:0.05", "topk:0.2"),
    "top act 20 % grad 5 %": Row("topk:0.2", "topk:0.05"),
    "top 10 %, same indices": Row("topk:0.1", "same"),
    "top 10 %, after warm-up": Row("topk:0.1", "topk:0.1", warmup=True),
    "top 10 %, EF": Row("ef+topk:0.1", "ef+topk:0.1", warmup=True),
    "top 10 %, EF on gradients": Row("topk:0.1", "ef+topk:0.1", warmup=True),
    "top 10 %, EF21": Row("ef21+topk:0.1", "ef21+topk:0.1", warmup=True),
    "top 10 %, EFMixed": Row("efmixed+topk:0.1", "efmixed+topk:0.1", warmup=True),
    "top 10 %, AQ-SGD": Row("aqsgd+topk:0.1", "topk:0.1", warmup=True),
    "top 30 %, AQ-SGD": Row("aqsgd+topk:0.3", "topk:0.3", warmup=True),
}

FRESH_CROPS: Final = "fresh crops"
ONE_SCALE: Final = "one scale"
#: What also moves the numbers of a row; `notes` says how.
BESIDE: Final = {
    "quant fw2-bw8": ONE_SCALE,
    "top 10 %, AQ-SGD": FRESH_CROPS,
    "top 30 %, AQ-SGD": FRESH_CROPS,
}
EXPLAINED: Final = {
    FRESH_CROPS: "an image is cropped and flipped anew in every epoch, so AQ-SGD sends the "
    "difference between two crops. The row says nothing of samples that come back as they were, "
    "for which the method is made; these were not trained here (`recipes.cifar10 --aug-seeds` "
    "repeats crops).",
    ONE_SCALE: "2 bits are one minimum and step for the whole tensor. The row is about that code, "
    "and not about 2 bits: see the rows with `step`, which send fewer.",
}

SEVERE_POINTS: Final = 3.0
NEAR_POINTS: Final = 1.0


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the table; `--table` prints only."""
    run_grid(
        argv,
        parse=parse_args,
        configuration=configuration,
        train=train,
        render=lambda lines: render(Results.of(lines, order=list(ROWS)), TABLE),
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the study."""
    parser = grid_parser("cifar10_study", __doc__, ROWS)
    parser.set_defaults(
        epochs=3,
        batch_size=ImageConfig.batch_size,
        chunks=ImageConfig.chunks,
        lr=ImageConfig.lr,
        workers=2,
    )
    add = parser.add_argument
    add("--data", default=ImageConfig.data, help="hub name, folder of parquet files, or digits")
    add("--model", choices=MODELS, default="resnet18")
    add("--width", type=int, default=16)
    add("--schedule-epochs", type=int, default=ImageConfig.schedule_epochs)
    add("--train-limit", type=int, help="images; default: all")
    add("--test-limit", type=int, help="images; default: all")
    return parser.parse_args(argv)


def configuration(options: argparse.Namespace, row: str, seed: int) -> ImageConfig:
    """The run of one row and seed."""
    return ImageConfig(**chosen_options(options, ImageConfig, ROWS[row], seed))


def train(config: ImageConfig, settings: Line, ranks: Ranks) -> Line:
    """Trains one run; its line is its summary."""
    return run(config, dataset=data_of(config, load_data, ranks), progress=False).to_json()


def _harm(number: int, row: str, *, severe: bool) -> Claim:
    text = f"{row}: {'' if severe else 'no '}severe harm"
    return Claim(number, text, REFERENCE, row, above=severe, bound=SEVERE_POINTS)


def _needs_compression(row: str) -> Claim:
    text = f"{row}: needs compression at inference"
    return Claim(3, text, row, row, above=True, bound=NEAR_POINTS, second_at="off")


def _feedback(name: str) -> tuple[Claim, Claim]:
    plain, row = "top 10 %, after warm-up", f"top 10 %, {name}"
    return (
        Claim(4, f"{name}: no better than plain", row, plain, above=False, bound=NEAR_POINTS),
        Claim(
            4,
            f"{name}: nearly as good without compression at inference",
            row,
            row,
            above=False,
            bound=NEAR_POINTS,
            second_at="off",
        ),
    )


def notes(results: Results) -> list[str]:
    """The meaning of the words beside rows."""
    words = dict.fromkeys(BESIDE[row] for row in results.runs if row in BESIDE)
    return [f"{word.capitalize()}: {EXPLAINED[word]}" for word in words]


CLAIMS: Final[tuple[Claim, ...]] = (
    Claim(
        1,
        "Top-5 % harms gradients more than activations",
        "top act 5 % grad 20 %",
        "top act 20 % grad 5 %",
        above=True,
    ),
    Claim(1, "4 bits harm gradients", "quant fw4-bw8", "quant fw4-bw4", above=True),
    _harm(2, "top 10 %", severe=False),
    _harm(2, "top 5 %", severe=True),
    _needs_compression("top 10 %"),
    _needs_compression("top 5 %"),
    _needs_compression("top 2 %"),
    *_feedback("EF"),
    *_feedback("EF on gradients"),
    *_feedback("EF21"),
    *_feedback("EFMixed"),
    _harm(5, "top 10 %, AQ-SGD", severe=True),
    _harm(5, "top 30 %, AQ-SGD", severe=False),
)

TABLE: Final = Table(
    metric=ACCURACY,
    effects={
        "on": lambda run: 100 * run[ACCURACY.on],
        "off": lambda run: 100 * run[ACCURACY.off],
    },
    unit="points of accuracy",
    short_unit="points",
    severe=SEVERE_POINTS,
    near=NEAR_POINTS,
    columns=(
        Column(
            title="MB/epoch", value=lambda run: run["wire_bytes"] / run["epochs"] / 1e6, digits=1
        ),
        Column(title="sent/dense", value=lambda run: run["wire_ratio"], digits=3),
    ),
    claims=CLAIMS,
    notes=notes,
    beside=BESIDE,
)


if __name__ == "__main__":
    main()
