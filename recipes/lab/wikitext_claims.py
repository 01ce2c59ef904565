"""The tables of the fine-tuning study, and the claims of the papers that it is held against.

Effects are losses times 100, that is 100 ln(perplexity) in evaluation: a difference is nearly
percent of perplexity, and more is worse. Bounds were set before there were results.

With compression on, evaluation sends what a method sends without its memory: for AQ-SGD the plain
code of an activation, which it never trained with. Its authors evaluate without compression and
show the loss in training; claims on AQ-SGD are held against both.
"""

from __future__ import annotations

import math
import statistics
from typing import Final

from mpcomp.core.sent import Sent
from recipes.lab.account import REFERENCE, account_of
from recipes.lab.study_table import Claim, Column, Results, Table
from recipes.metric import PERPLEXITY

SEVERE: Final = 10.0
NEAR: Final = 2.0

_ONE_SCALE: Final = "one scale"
_CHANNELS: Final = "a scale a channel"
#: The rows with the plain code of 2 bits; a good one is in the rows that say rotated.
BESIDE: Final = {
    "fw2-bw8": _ONE_SCALE,
    "fw2-bw6": _ONE_SCALE,
    "fw2-bw8, after warm-up": _ONE_SCALE,
    "fw2-bw8, AQ-SGD": _ONE_SCALE,
    "fw2 channels-bw8, after warm-up": _CHANNELS,
    "fw2 channels-bw8, AQ-SGD": _CHANNELS,
}

# The directions 1 to 6 are those of Rudakov et al., AQ-SGD that of Wang et al.
_AQSGD: Final = "AQ-SGD"


def _is_above(number: int | str, text: str, first: str, second: str, at: str = "on") -> Claim:
    return Claim(number, text, first, second, above=True, first_at=at, second_at=at)


def _harm(number: int, row: str, *, severe: bool, at: str = "on") -> Claim:
    text = f"{row}: {'' if severe else 'no '}severe harm"
    return Claim(
        number, text, row, REFERENCE, above=severe, bound=SEVERE, first_at=at, second_at=at
    )


def _rise(row: str, *, rises: bool) -> Claim:
    text = f"{row}: the loss {'has risen' if rises else 'has not risen yet'}"
    return Claim(6, text, row, REFERENCE, above=rises, bound=NEAR)


def _needs_compression(row: str) -> Claim:
    text = f"{row}: needs compression at inference"
    return Claim(3, text, row, row, above=True, bound=NEAR, first_at="off")


def _feedback(name: str) -> tuple[Claim, Claim]:
    plain, row = "top 10 %, after warm-up", f"top 10 %, {name}"
    return (
        Claim(4, f"{name}: no better than plain", plain, row, above=False, bound=NEAR),
        Claim(
            4,
            f"{name}: nearly as good without compression at inference",
            row,
            row,
            above=False,
            bound=NEAR,
            first_at="off",
        ),
    )


def _no_loss(of: str, name: str, row: str) -> tuple[Claim, ...]:
    text = f"{name}: no loss of quality"
    return tuple(
        Claim(of, text, row, REFERENCE, above=False, bound=NEAR, first_at=at, second_at=at)
        for at in ("off", "training")
    )


def _aqsgd(bits: str) -> tuple[Claim, ...]:
    plain, row = f"{bits}, after warm-up", f"{bits}, AQ-SGD"
    worse = (
        _is_above(_AQSGD, f"{bits}: worse without AQ-SGD", plain, row, at)
        for at in ("off", "training")
    )
    return (*_no_loss(_AQSGD, bits, row), *worse)


CLAIMS: Final[tuple[Claim, ...]] = (
    *(
        _is_above(1, "4 bits harm gradients more than activations", "fw8-bw4", "fw4-bw8", at)
        for at in ("on", "off")
    ),
    _is_above(1, "6 bits harm gradients", "fw2-bw6", "fw2-bw8"),
    _harm(2, "top 10 %", severe=False),
    _harm(2, "top 5 %", severe=True),
    _needs_compression("top 20 %"),
    _needs_compression("top 10 %"),
    _needs_compression("top 5 %"),
    _needs_compression("top 10 %, same indices"),
    *_feedback("EF"),
    *_feedback("EF21"),
    _harm(5, "top 10 %, AQ-SGD", severe=True, at="off"),
    _harm(5, "top 30 %, AQ-SGD", severe=False, at="off"),
    _rise("top 50 %", rises=False),
    _rise("top 30 %", rises=False),
    _rise("top 20 %", rises=True),
    *(
        _is_above(
            6, "own indices are worse than the same", f"top {k} %", f"top {k} %, same indices"
        )
        for k in (20, 10)
    ),
    *_aqsgd("fw4-bw8"),
    *_aqsgd("fw2-bw8"),
    *_aqsgd("fw2 channels-bw8"),
    *_aqsgd("fw2 rotated-bw8"),
    *_no_loss("auto", "auto:memory", "auto:memory"),
    *_no_loss("auto", "auto:scratch", "auto:scratch"),
)


def notes(results: Results) -> list[str]:
    """The meaning of the columns, and what is the same for all rows."""
    finished = [run for runs in results.runs.values() for run in runs.values()]
    said = [
        "Bytes are of a step, after the warm-up where a row has one: cuts and tied embedding, then "
        "the cuts alone."
    ]
    if ties := [run["tie_dense_bytes_per_step"] for run in finished]:
        said.append(
            f"The gradients of the tied embedding are {max(ties) / 1e6:.3f} MB of each step in "
            "fp32."
        )
    paragraphs = [" ".join(said)]
    if before := [run["perplexity_before"] for run in finished if "perplexity_before" in run]:
        paragraphs.append(_learned(statistics.fmean(before), results))
    if BESIDE.keys() & results.runs.keys():
        paragraphs.append(
            "One scale, a scale a channel: 2 bits are one minimum and step for a tensor or a "
            "channel. These rows are about that code, and not about 2 bits; a good one is rotated: "
            "`rotate+lloyd:2`, a scale a token and the centroids of a Gaussian."
        )
    return "\n\n".join(paragraphs).splitlines()


def _learned(before: float, results: Results) -> str:
    """The change by fine-tuning without compression: claims of no loss cannot mean more."""
    said = f"Before fine-tuning the perplexity is {before:.2f}"
    if not (plain := results.of_row(results.reference)):
        return f"{said}."
    after = statistics.fmean(run[PERPLEXITY.on] for run in plain)
    first, last = (statistics.fmean(run["losses"][i] for run in plain) for i in (0, -1))
    said += f", after it, uncompressed, {after:.2f}"
    if after < 0.99 * before:
        return f"{said}."
    return (
        f"{said}: on held-out text nothing is learned, only the training loss falls, from "
        f"{first:.2f} in the first epoch to {last:.2f} in the last. So 'no loss' with compression "
        "off at inference says that the weights were not spoiled, and not that as much was learned."
    )


def _below(sent: Sent) -> float:
    """Times below bf16, of runs that sent something."""
    return 2 * sent.num_elements / sent.wire_bytes


TABLE: Final = Table(
    metric=PERPLEXITY,
    effects={
        "on": lambda run: 100 * math.log(run[PERPLEXITY.on]),
        "off": lambda run: 100 * math.log(run[PERPLEXITY.off]),
        "training": lambda run: 100 * run["loss"],
    },
    unit="loss times 100 (nearly percent of perplexity)",
    short_unit="%",
    severe=SEVERE,
    near=NEAR,
    columns=(
        Column(title="loss, last epoch", value=lambda run: run["loss"], digits=3),
        Column(title="MB/step", value=lambda run: account_of(run).whole.wire_bytes / 1e6, digits=3),
        Column(title="below bf16", value=lambda run: _below(account_of(run).whole), digits=1),
        Column(
            title="MB/step, cuts alone", value=lambda run: run["cut_bytes_per_step"] / 1e6, digits=3
        ),
        Column(title="below bf16, cuts", value=lambda run: _below(account_of(run).cuts), digits=1),
    ),
    claims=CLAIMS,
    notes=notes,
    beside=BESIDE,
)
