"""Tiny language models of transformers, their batches, and the plain way to train them."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mpcomp import CausalLMLoss

transformers.logging.set_verbosity_error()

VOCABULARY = 53
POSITIONS = 16
_SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {"num_key_value_heads": 2}  # heads share keys and values
#: Of every family: what its configuration needs beside `_SIZES`.
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 4},
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 8},
    "smollm3": _GROUPED,
    "gemma2": {**_GROUPED, "head_dim": 8, "sliding_window": 4},
    "gpt_neox": {},
    "phi3": _GROUPED,
    "olmo2": _GROUPED,
    # not in `stages.language_models.FAMILIES`
    "bloom": {},
    "cohere": _GROUPED,
    "falcon": {"alibi": False},
    "gemma": {**_GROUPED, "head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "granite": _GROUPED,
    "mixtral": {**_GROUPED, "num_local_experts": 3},
    "olmo": _GROUPED,
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 32},
    "phi": {},
    "stablelm": _GROUPED,
    "starcoder2": _GROUPED,
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "codegen": {"rotary_dim": 4},
    "rwkv": {"rescale_every": 0, "attention_hidden_size": 32},
}
#: Of families that `_OWN` does not name, what their configurations have of it: heads that share
#: keys, experts, and keys of low rank.
_OTHERS: dict[str, int] = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_LOW_RANK = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}


def config_of(family: str, **settings: Any) -> Any:
    """A configuration of 4 blocks, 32 features and no dropout."""
    known = transformers.AutoConfig.for_model(family)
    if (own := _OWN.get(family)) is None:
        own = {name: size for name, size in _OTHERS.items() if hasattr(known, name)}
        if hasattr(known, "kv_lora_rank"):
            own = {**own, **_LOW_RANK}
            own.pop("head_dim", None)
    dropped = [
        name for name, rate in vars(known).items() if "drop" in name and isinstance(rate, float)
    ]
    return transformers.AutoConfig.for_model(
        family, **{**_SIZES, **dict.fromkeys(dropped, 0.0), **own, **settings}
    )


def language_model(family: str, **settings: Any) -> Any:
    """A model in training mode, as drawn from the test's seed."""
    return transformers.AutoModelForCausalLM.from_config(config_of(family, **settings)).train()


def gpt2(**settings: Any) -> Any:
    """GPT-2, whose embedding is its head, without dropout."""
    return language_model("gpt2", **settings)


def llama(**settings: Any) -> Any:
    """Llama: rotary embeddings and, unless told otherwise, a head of its own."""
    return language_model("llama", **settings)


def mask_of(lengths: Sequence[int], positions: int, side: str) -> Tensor:
    """[b, s], 0 where sequences of these numbers of tokens are padded: "left" or "right"."""
    mask = (torch.arange(positions) < torch.tensor(lengths)[:, None]).long()
    return mask.flip(1) if side == "left" else mask


def text(
    rows: int, seed: int = 0, *, side: str | None = None, positions: int = 9
) -> dict[str, Tensor]:
    """A batch with labels; padded at a side, sequences differ much in length."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, positions), generator=drawn)
    if side is None:
        return {"input_ids": ids, "labels": ids.clone()}
    lengths = [2 + (5 * i + seed) % (positions - 1) for i in range(rows)]
    mask = mask_of(lengths, positions, side)
    ids = ids * mask
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def without_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def chained(stages: Sequence[Any], batch: Mapping[str, Tensor]) -> Tensor:
    """The output of stages for a batch, in evaluation mode."""
    batch = without_labels(batch)
    for stage in stages:
        stage.eval()
    with torch.no_grad():
        x: Tensor = stages[0](**batch)
        for stage in stages[1:]:
            x = stage(x, **stage.takes(batch))
    return x


def parts_of(batch: Mapping[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """Microbatches of these numbers of rows."""
    columns = {name: value.split(list(sizes)) for name, value in batch.items()}
    return [{name: values[i] for name, values in columns.items()} for i in range(len(sizes))]


def plain_step(model: nn.Module, batch: Mapping[str, Tensor], sizes: Sequence[int]) -> Tensor:
    """Law 1's right-hand side: transformers' own loss of each microbatch by its share of tokens."""
    counts = [num_tokens(part["labels"]) for part in parts_of(batch, sizes)]
    total = torch.zeros(())
    for i, part in enumerate(parts_of(batch, sizes)):
        # Without a label transformers' loss is NaN; nothing of it may arrive.
        loss = model(**part, use_cache=False).loss * (counts[i] / sum(counts)) if counts[i] else 0
        if isinstance(loss, Tensor):
            loss.backward()
            total = loss.detach() if i == 0 else total + loss.detach()
    return total


def num_tokens(labels: Tensor) -> int:
    """Tokens that have a prediction and count."""
    return int((labels[:, 1:] != CausalLMLoss.ignore_index).sum())


def untied(model: Any) -> Any:
    """A copy whose head is a parameter of its own, equal to the embedding."""
    apart = copy.deepcopy(model)
    head = apart.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    assert apart.get_input_embeddings().weight is not head.weight
    return apart


def sum_tied(model: Any) -> None:
    """Gives both copies of an `untied` model the sum of both gradients."""
    first, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = first.grad + last.grad
    first.grad, last.grad = total, total.clone()


@contextmanager
def evaluation(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, and then training mode."""
    for model in models:
        model.eval()
    with torch.no_grad():
        yield
    for model in models:
        model.train()


def logits_of(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """In evaluation mode, without gradients."""
    with evaluation(model):
        logits: Tensor = model(**without_labels(batch), use_cache=False).logits
    return logits


class CausalBlock(nn.Module):
    """Attention to what came before, and a feed-forward net, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, positions, width = x.shape
        parts = self.c_attn(self.ln_1(x)).view(rows, positions, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(rows, positions, width))
        added: Tensor = x + self.mlp(self.ln_2(x))
        return added


class NanoGPT(nn.Module):
    """A language model as people write it themselves, after nanoGPT: its embedding is its head."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.block_size = POSITIONS
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "wpe": nn.Embedding(POSITIONS, width),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(CausalBlock(width, 4) for _ in range(blocks)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # type: ignore[union-attr]

    def forward(self, idx: Tensor) -> Tensor:
        _, positions = idx.size()
        assert positions <= self.block_size, f"{positions} tokens, of {self.block_size} at most"
        places = torch.arange(0, positions, dtype=torch.long, device=idx.device)
        parts: Any = self.transformer
        x = parts.drop(parts.wte(idx) + parts.wpe(places))
        for block in parts.h:
            x = block(x)
        logits: Tensor = self.lm_head(parts.ln_f(x))
        return logits
