"""Bytes and predictions of the pipeline that transformers makes of a model, by methods.

    torchrun --nproc-per-node 2 -m recipes.lab.hf_pipeline --model model.gguf --out FILE
    python -m recipes.lab.hf_pipeline --table --out docs/results/hf_pipeline.jsonl

Needs transformers 5.23 or later. Each setting of `mpcomp.hf.compress_pipeline` has a row: bytes
that ranks send for a token of a prompt and for a generated one, perplexity, and the share of
positions whose first choice is the uncompressed model's. Weights are in fp32, and so is what the
first setting sends. Nothing is trained.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from mpcomp.core.loss import CausalLMLoss
from mpcomp.hf import compress_pipeline
from recipes.pretrained import source_of
from recipes.ranks import Ranks, joined
from recipes.run_folder import append_json_line, read_json_lines
from recipes.text import PYTHON_DOCS, load_text
from recipes.tokens import blocks_of, tokenizer_of

__all__ = ["SETTINGS", "main", "table"]

#: Methods of hidden states, and how many logits of a position the last rank sends; None for all.
SETTINGS: Final[tuple[tuple[str, int | None], ...]] = (
    *(("none", None), ("bf16", None), ("auto", None)),
    ("auto", 64),
)
_HEADERS: Final = (
    *("act_comp", "top_logits", "hidden, prompt token", "hidden, new token"),
    *("logits, new token", "perplexity", "same first choice"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes and prints rows; `--table` prints those that were written."""
    options = _parser().parse_args(argv)
    with joined() as ranks:
        if not options.table:
            _check(options, ranks)
            rows = _measured(options, ranks)
            if ranks.speaks:
                options.out.unlink(missing_ok=True)
                for row in rows:
                    append_json_line(options.out, row)
        print(table(read_json_lines(options.out) if ranks.speaks else []))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.hf_pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="hub name, folder, or GGUF file")
    add("--data", default=PYTHON_DOCS, help="hub name, folder, text file (default: %(default)s)")
    add("--blocks", type=int, default=4, help="of the text's test split (default: %(default)s)")
    add("--seq-len", type=int, default=128, help="tokens of a block (default: %(default)s)")
    add("--new-tokens", type=int, default=32, help="generated after each (default: %(default)s)")
    add("--out", type=Path, required=True, metavar="JSONL", help="rows, written anew")
    add("--table", action="store_true", help="print the file, measure nothing")
    return parser


def _check(options: argparse.Namespace, ranks: Ranks) -> None:
    """Raises ValueError where nothing can be measured."""
    if options.model is None:
        raise ValueError("--model is missing: pass a hub name, a folder or a GGUF file")
    if ranks.size < 2:
        raise ValueError("a pipeline has two ranks or more: start it with torchrun")
    if importlib.util.find_spec("transformers.distributed.pipeline_parallel") is None:
        raise ValueError("this transformers has no pipeline: install 5.23 or later")


def _measured(options: argparse.Namespace, ranks: Ranks) -> list[dict[str, Any]]:
    """The rows, on the first rank and on all others alike."""
    rows, reference = [], None
    with _saved(options.model, ranks) as folder:
        tokenizer = tokenizer_of(folder, (), vocab_size=0)
        text = load_text(options.data)
        blocks = blocks_of(
            text.test, tokenizer, options.seq_len, keep_tail=False, limit=options.blocks
        )
        for method, top in SETTINGS:
            row, choices = measure(folder, blocks.input_ids, options.new_tokens, method, top)
            reference = choices if reference is None else reference
            rows.append(
                {
                    "act_comp": method,
                    "top_logits": top,
                    **row,
                    "same_first_choice": (choices == reference).double().mean().item(),
                    "settings": _settings(options, text.name, ranks),
                }
            )
    return rows


def _settings(options: argparse.Namespace, text: str, ranks: Ranks) -> dict[str, Any]:
    import transformers

    return {
        "model": Path(options.model).name,
        "data": text,
        **{name: getattr(options, name) for name in ("blocks", "seq_len", "new_tokens")},
        "ranks": ranks.size,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),  # whose documentation the text may be
    }


@contextmanager
def _saved(name: str, ranks: Ranks) -> Iterator[str]:
    """A folder, one for all ranks, to which the first has saved the model in fp32."""
    with tempfile.TemporaryDirectory() as own:

        def save() -> None:
            if ranks.speaks:
                source, options = source_of(name, "pass another --model", weights=True)
                _auto().from_pretrained(source, **options).float().save_pretrained(own)
                tokenizer_of(name, (), vocab_size=0).save_pretrained(own)

        ranks.together(save)
        yield ranks.gather(own)[0]
        ranks.gather(None)  # it is removed when nobody reads it


@torch.no_grad()
def measure(
    folder: str, ids: Tensor, new_tokens: int, method: str, top: int | None
) -> tuple[dict[str, float | None], Tensor]:
    """Bytes that all ranks send, and the perplexity; and the model's first choices [b, s] int64.

    Args:
        folder: of the model.
        ids: of the text [b, s] int64.
        new_tokens: generated after each row, greedily.
        method: of hidden states.
        top: number of logits of a position that the last rank sends; None for all.
    """
    from transformers import DistributedConfig

    config = DistributedConfig(pp_size=dist.get_world_size())
    model: Any = _auto().from_pretrained(folder, distributed_config=config).eval()
    stage = compress_pipeline(model, method, top_logits=top)
    logits = model(ids).logits
    links = stage.links[stage.pp_rank : stage.pp_rank + 1]  # none on the last rank
    with _broadcasts() as told:

        def counts() -> Tensor:
            """Bytes of hidden states and of logits that this rank has sent [2]."""
            hidden = sum(link.meter.eval.wire_bytes for link in links)
            return torch.tensor([hidden, sum(told)], dtype=torch.float64)

        def sent(count: int) -> Tensor:
            """Bytes of all ranks for so many new tokens [2]."""
            before = counts()
            mask = torch.ones_like(ids)
            model.generate(
                ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None
            )
            both = counts() - before
            dist.all_reduce(both)
            return both

        prompt = sent(1)
        hidden, of_logits = ((sent(1 + new_tokens) - prompt) / (new_tokens * len(ids))).tolist()
    row = {
        "hidden_bytes_a_prompt_token": prompt[0].item() / ids.numel(),
        "hidden_bytes_a_new_token": hidden,
        "logits_bytes_a_new_token": of_logits,
        # A loss needs all logits.
        "perplexity": CausalLMLoss()(logits, ids).exp().item() if top is None else None,
    }
    return row, logits.argmax(-1)


@contextmanager
def _broadcasts() -> Iterator[list[int]]:
    """Bytes of each broadcast of this rank, one copy for every other rank."""
    told: list[int] = []
    broadcast = dist.broadcast

    def noted(tensor: Tensor, src: int, **given: Any) -> None:
        if dist.get_rank() == src:
            told.append(tensor.nbytes * (dist.get_world_size() - 1))
        broadcast(tensor, src, **given)

    with patch.object(dist, "broadcast", noted):
        yield told


def _auto() -> Any:
    """The class of transformers that loads a model; its import takes seconds."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row for each setting; bytes a token of all ranks."""
    cells = [
        (
            row["act_comp"],
            row["top_logits"] or "all",
            f"{row['hidden_bytes_a_prompt_token']:,.0f}",
            f"{row['hidden_bytes_a_new_token']:,.0f}",
            f"{row['logits_bytes_a_new_token']:,.0f}",
            "" if row["perplexity"] is None else f"{row['perplexity']:.2f}",
            f"{row['same_first_choice']:.1%}",
        )
        for row in rows
    ]
    return tabulate(cells, _HEADERS, tablefmt="pipe", disable_numparse=True)


if __name__ == "__main__":
    main()
