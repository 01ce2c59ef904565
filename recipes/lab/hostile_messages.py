"""Hostile messages: what links and compressors do with bytes that nobody's sender has made.

    python -m recipes.lab.hostile_messages --messages 200000

Payloads go to a compressor's `decompress`; whole messages, header and all, to the receiving end of
a link. A message is a good one of which bits, words or stretches were changed, or noise, or all
ones, zeros, cut short or grown. It may be refused (ValueError, RuntimeError), decode to finite
numbers, or to NaN and Inf that the link flags at the end of the step. Anything else is a failure,
and so is an attempt to allocate what the message asks for: the program then ends with status 1.
"""

from __future__ import annotations

import argparse
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from mpcomp import Compressor, Link, TensorMeta, parse
from mpcomp.compressors import Identity
from mpcomp.core.context import Step
from mpcomp.core.randomness import generator_for
from mpcomp.core.spec import SpecValue
from mpcomp.core.wire import CHECKED_HEADER_BYTES, HEADER_BYTES, LONG_HEADER_BYTES, Payload

__all__ = ["FAILED", "METHODS", "attack_compressor", "attack_link", "attacks", "main", "spoilt"]

#: One of each class of compressors and feedback methods, and of what codes positions and values.
METHODS: Final = (
    *("none", "cast:fp16", "topk:0.1", "topk:0.3:scope=row", "topk:0.02:scope=tensor"),
    *("topk:0.2+quant:8", "randomk:0.1", "randomblock:0.1", "sampledtopk:0.1", "redsynctopk:0.1"),
    *("samesign:0.1", "meanvalue", "multilevel:0.1+topk:0.3", "quant:4", "quant:2:scale=token"),
    *("lloyd:2", "rotate+quant:4:scale=token", "rotate+step:0.5", "fixed:4", "qsgd:4", "onebit"),
    *("lowrank:1", "sign", "step:0.5", "step:0.5:centre=True:spikes=16"),
    *("step:2:scale=tensor:rounding=dither", "klt+step:0.5", "ef+topk:0.1", "conef+topk:0.1"),
    *("efmixed+topk:0.2", "ef21+topk:0.1", "ef21+step:0.5", "aqsgd+quant:4", "aqsgd+step:0.3"),
)
SHAPES: Final = ((4, 24), (2, 3, 4, 4), (7,), (1, 1), (3, 130))
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: Attacks on one good message.
_TRIES: Final = 25
REFUSED, FINITE, FLAGGED, NONFINITE, FAILED = (
    "refused",
    "finite",
    "NaN or Inf, flagged",
    "NaN or Inf",  # of a compressor alone, which is asked for no flag
    "failed",
)
#: What a message may be answered with.
_ERRORS = (ValueError, RuntimeError)
_HEADERS: Final = (HEADER_BYTES, LONG_HEADER_BYTES, CHECKED_HEADER_BYTES)
_WORDS: Final = (0, 1, -1, 2**31 - 1, -(2**31), 2**16, 255, 0x7F800000, 0x7FC00000)


def spoilt(good: Tensor, generator: torch.Generator) -> Tensor:
    """A hostile one in place of good bytes, uint8 [n], as long.

    Args:
        good: bytes that a sender has made; they are not changed.
        generator: for all choices.
    """

    def drawn(end: int) -> int:
        return int(torch.randint(end, (), generator=generator))

    bad = good.clone()
    length = bad.numel()
    if not length:
        return bad
    kind = drawn(8)
    if kind == 0:
        return torch.randint(256, (length,), dtype=torch.uint8, generator=generator)
    if kind == 1:
        return bad.fill_(255 * drawn(2))
    for _ in range(1 + drawn(3)):
        at = drawn(length)
        if kind in (2, 3, 4):
            bad[at] ^= 1 << drawn(8)
        elif kind == 5:  # a word that means much as an integer, or as a float
            raw = torch.tensor([_WORDS[drawn(len(_WORDS))]], dtype=torch.int32).view(torch.uint8)
            bad[at : at + 4] = raw[: length - at]
        else:  # a stretch of it at another place
            source, size = drawn(length), 1 + drawn(16)
            piece = good[source : source + size]
            bad[at : at + piece.numel()] = piece[: length - at]
    return bad


def attack_compressor(
    method: Compressor, meta: TensorMeta, generator: torch.Generator, tries: int = _TRIES
) -> Iterator[str]:
    """Outcomes of hostile payloads of tensors like ``meta``; of failures with the error."""
    x = torch.randn(meta.shape, generator=generator).to(meta.dtype)
    good = method.compress(x, generator_for("attack"))
    layout = method.layout(meta)
    for _ in range(tries):
        parts = []
        for part in good:
            bad = spoilt(part.contiguous().reshape(-1).view(torch.uint8), generator)
            parts.append(bad.view(part.dtype).reshape(part.shape))
        if method.variable_length:
            end = int(torch.randint(layout[-1].numel + 1, (), generator=generator))
            longer = torch.cat([parts[-1], torch.zeros(layout[-1].numel, dtype=torch.uint8)])
            parts[-1] = longer[: end if end % 2 else parts[-1].numel()]
        yield _outcome(partial(_decompressed, method, tuple(parts), meta))


def _decompressed(method: Compressor, payload: Payload, meta: TensorMeta) -> str:
    y = method.decompress(payload, meta, generator_for("attack"))
    _check_like(y, meta)
    return FINITE if bool(y.isfinite().all()) else NONFINITE


def attack_link(
    method: SpecValue,
    meta: TensorMeta,
    generator: torch.Generator,
    tries: int = _TRIES,
    *,
    checked: bool = False,
) -> Iterator[str]:
    """Outcomes of hostile messages to the receiving end of a link that has good ones too."""
    here, there = (Link(method, boundary=0, direction="act", checked=checked) for _ in range(2))
    rows = tuple((i,) for i in range(meta.num_rows))
    for index in range(3):
        x = torch.randn(meta.shape, generator=generator).to(meta.dtype)
        step = Step(index, True, sample_ids=(rows,))
        size = there.message_bytes(meta, step, 0, x.device)
        message = here.encode(x, step, 0)
        for _ in range(index, tries, 3):
            bad = _spoilt_message(message, size, generator)
            outcome = _outcome(partial(_received, there, bad, meta, step))
            taken = outcome in (FINITE, FLAGGED)
            if checked and taken and not torch.equal(bad[: message.numel()], message):
                outcome = f"{FAILED}: a checked message was taken although it was another"
            yield outcome
            there.discard()
            there.nonfinite.found()
            there.message_bytes(meta, step, 0, x.device)
        there.decode(message, meta, step, 0)
        here.commit()
        there.commit()
        there.nonfinite.found()


def _spoilt_message(message: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A message of which header, payload or length are not the sender's."""
    kind = int(torch.randint(5, (), generator=generator))
    if kind == 0:
        return spoilt(message, generator)
    if kind == 1:  # the header alone
        head = _HEADERS[int(torch.randint(3, (), generator=generator))]
        return torch.cat([spoilt(message[:head], generator), message[head:]])
    if kind == 2:  # cut short, in a buffer that was posted for it
        posted = torch.zeros(size, dtype=torch.uint8)
        end = int(torch.randint(message.numel() + 1, (), generator=generator))
        posted[:end] = message[:end]
        return posted
    if kind == 3:
        end = int(torch.randint(2 * message.numel() + 1, (), generator=generator))
        return torch.cat([message, message])[:end]
    return torch.cat([message[:HEADER_BYTES], spoilt(message[HEADER_BYTES:], generator)])


def _received(link: Link, message: Tensor, meta: TensorMeta, step: Step) -> str:
    y = link.decode(message, meta, step, 0)
    _check_like(y, meta)
    finite = bool(y.isfinite().all())
    assert link.nonfinite.found() is not finite, "NaN or Inf that nobody is told of"
    return FINITE if finite else FLAGGED


def _check_like(y: Tensor, meta: TensorMeta) -> None:
    assert (tuple(y.shape), y.dtype) == (meta.shape, meta.dtype), f"{y.dtype} {list(y.shape)}"


def _outcome(attack: Callable[[], str]) -> str:
    try:
        return attack()
    except _ERRORS as error:
        if "allocate" in str(error) or "memory" in str(error):
            return f"{FAILED}: {error}"
        return REFUSED
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also a library's panic, which is no Exception
        return f"{FAILED}: {type(error).__name__}: {error}"


def attacks(methods: Sequence[SpecValue], generator: torch.Generator) -> Iterator[tuple[str, str]]:
    """Method and outcome of one attack after another, without end."""
    turn = 0
    while True:
        for method in methods:
            meta = TensorMeta(SHAPES[turn % len(SHAPES)], DTYPES[turn % len(DTYPES)])
            turn += 1
            found = list(attack_link(method, meta, generator, checked=turn % 4 == 0))
            if isinstance(method, Compressor):
                found += attack_compressor(method, meta, generator)
            yield from ((str(method), outcome) for outcome in found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the attacks, and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=200_000, help="attacks in all")
    parser.add_argument("--seed", type=int, default=0, help="of all choices")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="spec strings")
    options = parser.parse_args(arguments)
    if options.messages < 1:
        parser.error(f"--messages {options.messages}: expected 1 or more")
    warnings.filterwarnings("ignore", message=".*would not shrink")
    methods = [Identity() if spec == "none" else parse(spec) for spec in options.methods]
    generator = torch.Generator().manual_seed(options.seed)
    counts: Counter[tuple[str, str]] = Counter()
    failures: dict[str, str] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = attacks(methods, generator)
    for _ in tqdm(range(options.messages), unit="message", disable=None):
        method, outcome = next(found)
        kind = outcome.partition(":")[0]
        counts[method, kind] += 1
        if kind == FAILED:
            failures.setdefault(method, outcome)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    kinds = (REFUSED, FINITE, FLAGGED, NONFINITE, FAILED)
    names = list(dict.fromkeys(str(method) for method in methods))
    rows = [[name, *(counts[name, kind] for kind in kinds)] for name in names]
    rows.append(["all", *(sum(counts[name, kind] for name in names) for kind in kinds)])
    print(tabulate(rows, headers=["method", *kinds]))
    print(f"\n{options.messages} messages, seed {options.seed}; memory has grown by {grown:.0f} MB")
    for method, failure in failures.items():
        print(f"{method}: {failure}")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
