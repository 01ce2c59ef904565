"""Sharded training over slow links: torch's FSDP2, dense and with mpcomp's gradients and weights.

    python -m recipes.bench.slow_shards --json slow_shards.json --plot slow_shards.png
    python -m recipes.bench.slow_shards --train-steps 500 --data <WikiText-2> --json trained.json

Makes the hosts itself (`recipes.bench.hosts`; needs root), one for each rank of a small decoder
language model whose blocks are sharded one by one, and then its root, with real TCP (gloo) between
them. In a step a rank sends parts of all weights twice, before forward and before backward, and of
all gradients once. A variant is a method for the gradients and, after a comma, a compressor for the
weights: ``conef:0.2+topk:0.1,quant:8:scale=128``.

The rate of the links is such that the dense step is communication for the most part, from what was
computed and sent at the start, or what --mbps says. Within each repetition all variants take turns,
in rotating order, so that a slow moment of the machine meets all of them: first the whole model
without communication and the dense step on unlimited links, then every variant for a few steps on
the limited ones. Bytes are those that the kernel counts at each host's interface.

4-bit gradients go without a memory by default: rounding to the nearest of 15 levels loses about a
hundredth of a gradient's energy, evenly, which `ConEF` gives back a tenth at a time with the noise
of a sketch of five elements a cell; it is for what leaves most elements out, as Top-K does. Pass
``conef:0.2+quant:4:scale=128`` to see for yourself.

With --train-steps, each variant then trains from the same weights on the same batches of real text
over unlimited links, where bytes count and time does not. Without the rights for namespaces
everything runs over loopback, unlimited and uncounted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

import mpcomp
from mpcomp.data_parallel.methods import replica_method_of
from recipes.bench import replica_report, shard_report
from recipes.bench.replica_turns import (
    Replicas,
    open_all,
    side_by_side,
)
from recipes.bench.replica_variants import ALONE, MPCOMP
from recipes.bench.shard_worker import REFERENCE, Job, Part, Tokens, save_tokens, specs_of
from recipes.bench.workers import (
    bench_parser,
    choose_hosts,
    machine,
    settings_of,
    too_small,
    work,
    write,
)
from recipes.text import PYTHON_DOCS, load_text
from recipes.tokens import blocks_of, tokenizer_of

BYTES_8: Final = "quant:8:scale=128"
BYTES_4: Final = "quant:4:scale=64"
VARIANTS: Final = (
    "none",
    "ef+topk:0.1",
    "conef:0.2+topk:0.1",
    f"conef:0.2+topk:0.1,{BYTES_8}",
    f"conef:0.2+topk:0.1,{BYTES_4}",
    "quant:4:scale=128",
    f"quant:4:scale=128,{BYTES_8}",
    f"quant:4:scale=128,{BYTES_4}",
)
MODULE: Final = "recipes.bench.slow_shards"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes the figures and the plot."""
    options = parse_args(argv)
    if options.worker is not None:
        work(options.worker, Job, Part)
        return
    if problem := _problem(options):
        sys.exit(f"error: {problem}")
    names = names_of(options)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            tokens, vocab = tokens_of(options)
        except ValueError as error:
            sys.exit(f"error: {error}")
        save_tokens(tokens, folder / "tokens.pt")
        hosts = choose_hosts(stack, options.ranks, options)
        same = ("blocks", "width", "context", "batch", "lr")
        told = {
            "tokens": str(folder / "tokens.pt"),
            "vocab": vocab,
            **{name: getattr(options, name) for name in same},
        }
        ranks = Replicas(hosts, MODULE, options, told)

        def sent(dense_bytes: int) -> float:
            counted = replica_report.host_bytes(ranks.steps(REFERENCE, options.steps))
            assert counted is not None, "hosts other than the loopback are counted"
            return counted

        dense_bytes, mbps = open_all(ranks, names, options, sent)
        turns = side_by_side(ranks, names, mbps, options)
        result: dict[str, Any] = {
            "command": shlex.join(
                ["python", "-m", MODULE, *(sys.argv[1:] if argv is None else argv)]
            ),
            "settings": settings_of(options),
            "machine": machine(),
            "links": hosts.describe(),
            "mbps": mbps,
            "n": options.repeats,
            "vocab": vocab,
            "dense_bytes": dense_bytes,
            "dense": replica_report.dense_figures(turns, REFERENCE),
            "figures": shard_report.summarise(turns),
            "turns": turns,
            "trainings": [],
        }
        if options.train_steps:
            write(result, options.json)  # trainings take long: what is known stays
            for name in (*names, ALONE):
                ranks.close(name)
            hosts.set_rate(None)
            result["trainings"] = train_all(ranks, names, options)
    print(shard_report.tables(result))
    print("links:", json.dumps(result["links"]))
    write(result, options.json)
    if options.plot is not None:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        shard_report.plot(result, options.plot)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the measurement."""
    parser = bench_parser(MODULE, __doc__)
    add = parser.add_argument
    add("--variants", nargs="+", default=list(VARIANTS), metavar="GRADIENTS[,WEIGHTS]",
        help="of mpcomp, beside dense FSDP2")  # fmt: skip
    add("--ranks", type=int, default=4, help="one host each")
    add("--mbps", type=float, help="Mbit/s of every host each way; by default from --share")
    add("--share", type=float, default=0.86,
        help="of communication in the dense step, for which the rate is chosen")  # fmt: skip
    add("--blocks", type=int, default=4)
    add("--width", type=int, default=256)
    add("--context", type=int, default=128, help="tokens of a sequence")
    add("--batch", type=int, default=4, help="sequences of one rank in a step")
    add("--lr", type=float, default=1e-3, help="of AdamW")
    add("--data", default=PYTHON_DOCS, help="folder or file of text, or a hub's name")
    add("--vocab", type=int, default=2048, help="entries of a new tokenizer, at most")
    add("--train-limit", type=int, help="articles")
    add("--eval-limit", type=int, default=200, help="held-out sequences")
    add("--steps", type=int, default=3, help="of each variant in a turn")
    add("--repeats", type=int, default=7, help="turns of each variant")
    add("--warmup-steps", type=int, default=4, help="of each variant on the limited links")
    add("--train-steps", type=int, default=0, help="of each variant on unlimited links; 0: none")
    add("--loss-every", type=int, default=10, metavar="STEPS", help="over which a loss is the mean")
    add("--json", type=Path, metavar="FILE", help="for the figures and every turn")
    add("--plot", type=Path, metavar="PNG", help="losses, and times of a step")
    return parser.parse_args(argv)


def names_of(options: argparse.Namespace) -> list[str]:
    """All variants that are compared, the dense one first."""
    return list(dict.fromkeys((REFERENCE, *(MPCOMP + variant for variant in options.variants))))


def _problem(options: argparse.Namespace) -> str | None:
    at_least_1 = ("blocks", "width", "context", "batch", "steps", "repeats", "warmup_steps")
    if problem := too_small(options, (*at_least_1, "loss_every", "eval_limit", "train_limit")):
        return problem
    if options.ranks < 2:
        return f"ranks is {options.ranks}; pass at least 2"
    if options.width % 4:
        return f"width is {options.width}; pass a multiple of 4, the number of heads"
    if options.train_steps < 0:
        return f"train_steps is {options.train_steps}; pass at least 1, or 0 for no training"
    if options.eval_limit < options.ranks:
        return f"eval_limit is {options.eval_limit}; pass at least one for each of the ranks"
    if options.mbps is not None and not 0 < options.mbps < math.inf:
        return f"mbps is {options.mbps:g}; pass Mbit/s above 0"
    if not 0 < options.share < 1:
        return f"share is {options.share:g}; pass a fraction between 0 and 1"
    try:
        for variant in options.variants:
            method, codec = specs_of(variant)
            replica_method_of(method)
            if codec is not None:
                mpcomp.parse(codec)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def tokens_of(options: argparse.Namespace) -> tuple[Tokens, int]:
    """The text as sequences of tokens, and how many different ones there may be.

    Raises:
        ValueError: there is no such text, or too little of it.
    """
    text = load_text(options.data, train_limit=options.train_limit)
    tokenizer = tokenizer_of(None, text.train, vocab_size=options.vocab)
    length = options.context + 1
    train = blocks_of(text.train, tokenizer, length, keep_tail=False).input_ids
    held_out = blocks_of(
        text.validation, tokenizer, length, keep_tail=False, limit=options.eval_limit
    ).input_ids
    for split, found, least in (
        ("training", len(train), options.ranks * options.batch),
        ("held-out", len(held_out), options.ranks),
    ):
        if found < least:
            raise ValueError(
                f"{options.data} has {found} {split} sequences of {length} tokens, and {least} are "
                "needed: pass more text, or a smaller --context or --batch"
            )
    even = len(held_out) // options.ranks * options.ranks  # ranks run the model equally often
    return Tokens(train, held_out[:even]), len(tokenizer)


def train_all(
    ranks: Replicas, names: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The training of every variant, one after the other, on the same batches."""
    trainings = []
    with tqdm(total=len(names) * options.train_steps, unit="step") as bar:
        for name in names:
            bar.set_description(name)
            ranks.open(name, options.seed, None)
            losses: list[dict[str, float]] = []
            sent: list[float] = []
            steps = 0
            while steps < options.train_steps:
                count = min(options.loss_every, options.train_steps - steps)
                turn = ranks.steps(name, count)
                steps += count
                losses.append({"step": steps, "loss": turn["loss"]})
                if (host := replica_report.host_bytes(turn)) is not None:
                    sent.append(count * host)
                bar.update(count)
            trainings.append(
                {
                    "variant": name,
                    "losses": losses,
                    "held_out": ranks.held_out_loss(name),
                    "host_bytes": sum(sent) if sent else None,
                }
            )
            ranks.close(name)
    return trainings


if __name__ == "__main__":
    main()
