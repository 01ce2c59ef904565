"""The cost of compression at the cuts to a pretrained language model that never trained with it.

    python -m recipes.lab.lm_inference --model FOLDER --data FOLDER --split 3 --eval-limit 16
    python -m recipes.lab.lm_inference --model model.gguf --data python-docs --methods quant:8

Loads the model once, cuts it, and evaluates the perplexity with one method after another at all
cuts, in fp32, and how far predictions are from the uncompressed ones (`recipes.lab.divergence`).
The first row is without compression, and says how far its logits are from those of the model in one
piece: 0, as they are the same bits. Bytes are those that forward passes send. The bases of `klt`
are learned first, from --calibrate blocks of the training text; that changes no weights.
With --out each method is a line of a file as soon as it is evaluated; given again, the command
goes on with those that are missing. With --table it prints that file, and evaluates nothing.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import mpcomp
from mpcomp.links.build import method_of
from recipes.command import Parser
from recipes.lab.divergence import Against
from recipes.lab.study_table import PERCENT, half_interval
from recipes.placement import device_name, devices_of, parse_split
from recipes.ranks import Ranks, joined
from recipes.run_folder import append_json_line, read_json_lines
from recipes.text import load_text
from recipes.text_config import EVAL_SPLITS, TextConfig
from recipes.text_model import make_model, model_config, split_of
from recipes.tokens import (
    BPE,
    TokenLoader,
    blocks_of,
    check_vocabulary,
    num_predicted,
    tokenizer_of,
)

METHODS: Final = (
    "bf16", "fp8", "quant:8", "quant:4", "quant:4:scale=128", "quant:2:scale=128", "sign",
    "topk:0.5", "topk:0.3", "topk:0.2", "topk:0.1", "topk:0.1:scope=row",
)  # fmt: skip
UNCOMPRESSED: Final = mpcomp.Identity()
CALIBRATION: Final = 400
# Options that are not of `TextConfig`.
OWN_OPTIONS: Final = ("methods", "calibrate", "out", "table")

Method = mpcomp.Compressor | mpcomp.KLT


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table; a mistake in the input ends it with one line."""
    with joined() as ranks:
        if ranks.size > 1:
            raise ValueError(
                "all stages are in one process here, which gives the numbers that several would; "
                "start it with python, not with torchrun"
            )
        options = vars(_parser().parse_args(argv))
        if options.get("table"):
            _print(read_json_lines(options["out"]) if "out" in options else [])
            return
        methods = methods_of(options.get("methods", METHODS))
        chosen = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
        config = TextConfig(**{"batch_size": 1, **chosen}, chunks=1)
        out = options.get("out")
        calibrate = options.get("calibrate", CALIBRATION)
        rows = {} if out is None else _finished(out, settings_of(config), calibrate)
        if missing := [method for method in methods if str(method) not in rows]:
            plain = rows.get(str(UNCOMPRESSED))
            for row in evaluate(config, missing, plain=plain, calibrate=calibrate):
                rows[row["method"]] = row
                if out is not None:
                    append_json_line(out, row)
        _print([rows[str(method)] for method in methods])


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        raise ValueError("there are no results yet; pass --out the file that has some")
    print(f"\n{table(rows)}\n\n{notes(rows)}")


def _parser() -> Parser:
    parser = Parser("lm_inference", "Perplexity of a pretrained model with compression at cuts.")
    add = parser.add_argument
    add("--model", help=f"hub name (default {TextConfig.model}), folder, or GGUF file")
    add("--data", help=f"hub name (default {TextConfig.data}), folder, text file, or python-docs")
    add("--tokenizer", help="hub name, folder or GGUF file (default: the model's own)")
    add("--split", help="paper, a number of stages, block counts 3,2,2,3, or names a,b,c")
    add(
        "--methods",
        nargs="+",
        metavar="SPEC",
        help=f"at all cuts, one after another (default {' '.join(METHODS)})",
    )
    add("--eval-split", choices=EVAL_SPLITS)
    add("--eval-limit", type=int, metavar="BLOCKS", help="only the first blocks of the text")
    add("--seq-len", type=int, metavar="TOKENS", help=f"of a block (default {TextConfig.seq_len})")
    add(
        "--calibrate",
        type=int,
        metavar="BLOCKS",
        help=f"of the training text, from which klt learns (default {CALIBRATION})",
    )
    add("--batch-size", type=int, metavar="BLOCKS", help="of a message at a cut (default 1)")
    add("--device", help="auto, cpu, cuda, or one for each stage: cuda:0,cuda:1")
    add("--threads", type=int, help="of torch on the CPU")
    add("--seed", type=int, help="of methods that draw")
    add("--out", type=Path, metavar="FILE", help="lines of JSON, to be continued")
    add("--table", action="store_true", help="print the results file, evaluate nothing")
    return parser


def settings_of(config: TextConfig) -> dict[str, Any]:
    """Settings that all rows of one results file share."""
    names = ("split", "eval_split", "eval_limit", "seq_len", "batch_size", "seed")
    return {
        "model": Path(config.model).name,
        "tokenizer": None if config.tokenizer is None else Path(config.tokenizer).name,
        "data": Path(config.data).name,
        **{name: getattr(config, name) for name in names},
    }


def _finished(out: Path, here: Mapping[str, Any], calibrate: int) -> dict[str, dict[str, Any]]:
    """The rows in the results file, by method.

    Raises:
        ValueError: the file cannot be written, or has rows that must not share a table with these.
    """
    existing = out.absolute()
    while not existing.exists():
        existing = existing.parent
    fits = out.is_file() if existing == out.absolute() else existing.is_dir()
    if not fits or not os.access(existing, os.W_OK):
        what = "not writable" if fits else "not a file" if out.exists() else "not a folder"
        raise ValueError(
            f"{out} cannot be written ({existing} is {what}); pass --out a file that can"
        )
    rows = read_json_lines(out)
    for row in rows:
        if (there := row.get("settings")) != here:
            raise ValueError(
                f"{out} holds results of other settings ({there}), while this command has {here}; "
                "pass the same options, or another --out"
            )
        if (learned := row.get("calibration")) and learned["blocks"] != calibrate:
            raise ValueError(
                f"{row['method']} in {out} has learned from {learned['blocks']} blocks, while this "
                f"command has {calibrate}; pass --calibrate {learned['blocks']}, or another --out"
            )
    return {row["method"]: row for row in rows}


def methods_of(specs: Sequence[str]) -> list[Method]:
    """The methods to evaluate: no compression first, then each method once.

    Raises:
        ValueError: a spec that is none, or whose method does something in training only.
    """
    methods: list[Method] = [UNCOMPRESSED]
    for spec in specs:
        method = method_of("act_comp", spec)
        if isinstance(method, mpcomp.Feedback):
            raise ValueError(
                f"{spec} remembers from step to step of a training, and in evaluation sends what "
                f"{method.inner} sends; pass that"
            )
        if not isinstance(method, Method):
            raise ValueError(f"{spec} chooses its ratio in training; pass a compressor of one")
        methods.append(method)
    return list(dict.fromkeys(methods))


@dataclass(frozen=True)
class _Loaded:
    """A model in one piece, the text to evaluate it on, and that from which links learn."""

    model: nn.Module
    loader: TokenLoader
    calibration: TokenLoader | None
    split: str
    devices: list[torch.device]


def evaluate(
    config: TextConfig,
    methods: Sequence[Method],
    *,
    plain: Mapping[str, Any] | None = None,
    calibrate: int = CALIBRATION,
    progress: bool = True,
) -> Iterator[dict[str, Any]]:
    """One row of the results for each method.

    Args:
        config: model, text, cut, and place; what is for training does not matter.
        methods: what is done to activations at all cuts, one after another.
        plain: the row without compression; None if the first method is `Identity`.
        calibrate: blocks of the training text from which links learn, where a method does.
        progress: show a progress bar.

    Raises:
        ValueError: there is no such model, text or device, or they do not fit.
    """
    assert plain is not None or methods[0] == UNCOMPRESSED
    learns = any(isinstance(method, mpcomp.KLT) for method in methods)
    loaded = _load(config, calibrate if learns else None)
    num_batches = sum(
        _num_batches(loaded.loader)
        + (
            _num_batches(loaded.calibration)
            if loaded.calibration and isinstance(method, mpcomp.KLT)
            else 0
        )
        for method in methods
    )
    first = next(iter(loaded.loader))
    logits = _plain_logits(loaded, first)  # before stages may go to several devices

    def cut(method: Method) -> mpcomp.Pipeline:
        # Pipelines share the model's weights, so that each costs next to nothing.
        return mpcomp.pipeline(
            loaded.model,
            chunks=1,  # a message is a batch
            split=parse_split(loaded.split),
            ties="apart",  # a cut before the head would be for the sake of training
            act_comp=method,
            devices=loaded.devices if len(loaded.devices) > 1 else loaded.devices[0],
            seed=config.seed,
        ).eval()

    uncompressed = cut(UNCOMPRESSED)
    with tqdm(total=num_batches, unit="batch", disable=not progress) as bar:
        for method in methods:
            bar.set_description(str(method))
            begin = time.perf_counter()
            pipe = cut(method)
            learned = (
                {"calibration": _calibrate(pipe, loaded, bar)}
                if isinstance(method, mpcomp.KLT)
                else {}
            )
            measures = [
                # All logits would not fit in memory, so they are made again for each method.
                pipe.evaluate([batch], Against(_logits(uncompressed, batch)))
                for batch in _counted(loaded.loader, bar)
            ]
            row = _row(pipe, method, measures, loaded.loader)
            plain = row if plain is None else plain
            row |= _cost(row, plain)
            row["seconds"] = time.perf_counter() - begin
            if method == UNCOMPRESSED:
                difference = _logits(pipe, first).cpu() - logits
                row["largest_logit_difference"] = float(difference.abs().max())
            yield {
                **row,
                **learned,
                "settings": settings_of(config),
                "device": device_name(loaded.devices[0]),
                "torch": torch.__version__,
            }


def _load(config: TextConfig, calibrate: int | None) -> _Loaded:
    if config.is_new:
        raise ValueError(
            f"model is {config.model}, which has random weights; pass --model a pretrained one, or "
            "a folder that another recipe has left"
        )
    if config.tokenizer == BPE:
        raise ValueError(f"tokenizer is {BPE}, a new one; a pretrained model needs its own")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    devices = devices_of(config, Ranks())
    chosen = model_config(config)
    text = load_text(config.data)
    name = config.tokenizer or config.model
    tokenizer = tokenizer_of(name, text.train, vocab_size=config.vocab_size)
    check_vocabulary(tokenizer, chosen.vocab_size)
    blocks = blocks_of(
        getattr(text, config.eval_split),
        tokenizer,
        config.seq_len,
        keep_tail=True,
        limit=config.eval_limit,
    )
    calibration = None
    if calibrate is not None:
        if calibrate < 1:
            raise ValueError(f"calibrate is {calibrate} blocks; pass at least 1")
        learned = blocks_of(text.train, tokenizer, config.seq_len, keep_tail=False, limit=calibrate)
        if len(learned) < calibrate:
            raise ValueError(
                f"calibrate is {calibrate} blocks, and the training text has {len(learned)}; pass "
                "at most that"
            )
        calibration = TokenLoader(blocks=learned, batch_size=config.batch_size)
    loader = TokenLoader(blocks=blocks, batch_size=config.batch_size)
    model = make_model(config, tokenizer).eval()
    # Nothing is trained, and a tied embedding's gradient is much larger than what crosses the cuts.
    model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    return _Loaded(model, loader, calibration, split_of(config, chosen), devices)


def _calibrate(pipe: mpcomp.Pipeline, loaded: _Loaded, bar: tqdm[Any]) -> dict[str, int]:
    """Lets the links learn from the training text, weights as they are; how much that took."""
    assert loaded.calibration is not None
    pipe.train()
    loaded.model.eval()  # its blocks, which are the pipeline's: no dropout, as in evaluation
    for batch in _counted(loaded.calibration, bar):
        pipe.forward_backward(batch)
        loaded.model.zero_grad()
    pipe.eval()
    return {"blocks": len(loaded.calibration.blocks), "bytes": pipe.wire_bytes}


def _plain_logits(loaded: _Loaded, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits of the model in one piece for a batch, [b, s, vocabulary] on the CPU."""
    device = loaded.devices[0]
    inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        logits: Tensor = loaded.model.to(device)(**inputs, use_cache=False).logits
    return logits.cpu()


@torch.no_grad()
def _logits(pipe: mpcomp.Pipeline, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits of a pipeline for a batch, [b, s, vocabulary]."""
    logits: Tensor = pipe(batch)
    return logits


def _num_batches(loader: TokenLoader) -> int:
    """All of them, the last one as full as it is."""
    return -(-len(loader.blocks) // loader.batch_size)


def _counted(loader: TokenLoader, bar: tqdm[Any]) -> Iterator[dict[str, Tensor]]:
    for batch in loader:
        yield batch
        bar.update()


def _row(
    pipe: mpcomp.Pipeline,
    method: Method,
    measures: Sequence[Mapping[str, float]],
    loader: TokenLoader,
) -> dict[str, Any]:
    """The line of a method, without what its perplexity is held against, from its batches."""
    blocks = loader.blocks
    predicted = [num_predicted(batch["labels"]) for batch in loader]

    def mean(name: str) -> float:
        return float(np.average([batch[name] for batch in measures], weights=predicted))

    loss = mean("loss")
    divergences = [batch["divergence"] for batch in measures]
    cuts = [
        {"after": link["after"], **link["eval"]}
        for link in pipe.report(show=False)["boundaries"]
        if link["direction"] == "act"
    ]
    wire_bytes = sum(cut["wire_bytes"] for cut in cuts)
    return {
        "method": str(method),
        "perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()),  # math.exp would raise
        "loss": loss,
        "losses": [batch["loss"] for batch in measures],
        "divergence": mean("divergence"),
        "divergence_half_interval": (
            half_interval(divergences, PERCENT) if len(divergences) > 2 else None
        ),
        "agreement": mean("agreement"),
        "bytes_per_token_and_cut": wire_bytes / len(cuts) / blocks.input_ids.numel(),
        "wire_ratio": wire_bytes / sum(cut["dense_bytes"] for cut in cuts),
        "relative_error": sum(cut["relative_error"] for cut in cuts) / len(cuts),
        "cuts": cuts,
        "blocks": len(blocks),
        "predicted_tokens": blocks.num_predicted,
    }


def _cost(row: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """The perplexity over that of the row without compression, and half of its interval."""
    times = row["perplexity"] / plain["perplexity"]
    # Rows of a time before losses of batches were kept have no interval.
    differences = list(map(operator.sub, row["losses"], plain.get("losses", ())))
    half = times * half_interval(differences, PERCENT) if len(differences) > 2 else None
    return {"times_uncompressed": times, "times_half_interval": half}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row for each method."""
    columns = {
        "method": [row["method"] for row in rows],
        "perplexity": [f"{row['perplexity']:.2f}" for row in rows],
        "x uncompressed": [
            f"{row['times_uncompressed']:.3f}"
            + (f" ± {half:.3f}" if (half := row.get("times_half_interval")) else "")
            for row in rows
        ],
        "KL [nats]": [_divergence(row) for row in rows],
        "same first choice [%]": [
            f"{100 * row['agreement']:.1f}" if "agreement" in row else "" for row in rows
        ],
        "bytes a token and cut": [f"{row['bytes_per_token_and_cut']:.1f}" for row in rows],
        "sent/fp32": [f"{row['wire_ratio']:.4f}" for row in rows],
        "x below bf16": [f"{0.5 / row['wire_ratio']:.1f}" for row in rows],  # evaluated in fp32
        "relative error": [f"{row['relative_error']:.4f}" for row in rows],
    }
    return tabulate(columns, headers="keys", disable_numparse=True)


def _divergence(row: Mapping[str, Any]) -> str:
    if "divergence" not in row:  # of a time before it was measured
        return ""
    half = row["divergence_half_interval"]
    return f"{row['divergence']:.4f}" + (f" ± {half:.4f}" if half else "")


def notes(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text below the table: its subject, and what its first row was compared with."""
    first = rows[0]
    settings = first["settings"]
    after = ", ".join(cut["after"] for cut in first["cuts"])
    lines = [
        f"{settings['model']}, cut after {after}; {first['predicted_tokens']} tokens of "
        f"{settings['data']} ({settings['eval_split']}) predicted in {first['blocks']} blocks",
        *(_calibration_note(row) for row in rows if row.get("calibration")),
        "KL: divergence of predictions from the uncompressed ones, a token; same first choice: "
        "share of tokens",
        "largest difference of uncompressed logits from those of the model in one piece: "
        f"{first['largest_logit_difference']:g}",
    ]
    return "\n".join(lines)


def _calibration_note(row: Mapping[str, Any]) -> str:
    blocks, num_bytes = row["calibration"]["blocks"], row["calibration"]["bytes"]
    return (
        f"{row['method']}: learned from {blocks} blocks of the training text, for which "
        f"{num_bytes / 1e6:,.0f} MB were sent both ways before"
    )


if __name__ == "__main__":
    main()
