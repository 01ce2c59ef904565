"""Small language models and batches of text for `runs`, for tests of several processes.

Importing transformers takes seconds in each process, so that only what a process uses is imported.
"""

from collections.abc import Callable, Sequence
from typing import Any

import runs
import torch
from ranks import preload
from runs import Kind, Outcome, Run, assert_same, train
from torch import Tensor, nn

import mpcomp

preload(
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "peft",
    "lm_runs",
)

#: Tokens of all models here, and positions of those that learn them.
VOCABULARY = 37
POSITIONS = 16
#: Of each model but the deep ones.
BLOCKS = 4


def gpt2(**settings: Any) -> nn.Module:
    """Embedding and head are one parameter; dropout is on."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        n_embd=16,
        n_layer=settings.pop("blocks", BLOCKS),
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        **settings,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(*, tied: bool = False, **settings: Any) -> nn.Module:
    """Rotary positions; embedding and head are two parameters, or one."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=settings.pop("blocks", BLOCKS),
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
        **settings,
    )
    return transformers.LlamaForCausalLM(config)


def lora() -> nn.Module:
    """GPT-2 with adapters in every block; nothing else is trained."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(gpt2(), config)


def lora_late() -> nn.Module:
    """Adapters in the last two blocks alone."""
    import peft

    config = peft.LoraConfig(
        r=2,
        target_modules=["c_attn"],
        layers_to_transform=[BLOCKS - 2, BLOCKS - 1],
        fan_in_fan_out=True,
    )
    return peft.get_peft_model(gpt2(), config)


def text(count: int, seed: int, pad: str = "right", length: int = 9) -> tuple[Any, Tensor]:
    """Sequences of unequal lengths, the first with a single token, and their labels.

    Args:
        count: rows.
        seed: of the tokens and lengths.
        pad: "right", "left", or "" for nothing.
        length: of the longest.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (count, length), generator=generator)
    if not pad:
        return {"input_ids": ids}, ids
    lengths = torch.randint(2, length + 1, (count, 1), generator=generator)
    lengths[0] = 1  # no token follows: a row without a term of the loss
    places = torch.arange(length)[None]
    mask = (places < lengths) if pad == "right" else (places >= length - lengths)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    if pad == "left":
        batch["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
    return batch, ids.masked_fill(~mask, -100)


def left(count: int, seed: int) -> tuple[Any, Tensor]:
    return text(count, seed, "left")


def full(count: int, seed: int) -> tuple[Any, Tensor]:
    return text(count, seed, "")


def few(count: int, seed: int) -> tuple[Any, Tensor]:
    """Sequences of four words out of all, other ones in each step."""
    batch, labels = text(count, seed)
    words = 4 * (seed % 5)
    batch["input_ids"] = batch["input_ids"] % 4 + words
    return batch, torch.where(labels < 0, labels, labels % 4 + words)


def tied_llama() -> nn.Module:
    return llama(tied=True)


def deep() -> nn.Module:
    """Enough blocks for eight stages."""
    return gpt2(blocks=8)


def calm() -> nn.Module:
    """Without dropout."""
    return gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


runs.KINDS.update(
    {
        "gpt2": Kind(gpt2, text, BLOCKS),
        "gpt2 left": Kind(gpt2, left, BLOCKS),
        "gpt2 full": Kind(gpt2, full, BLOCKS),
        "gpt2 few": Kind(gpt2, few, BLOCKS),
        "deep gpt2": Kind(deep, text, 8),
        "calm gpt2": Kind(calm, text, BLOCKS),
        "llama": Kind(llama, text, BLOCKS),
        "llama left": Kind(llama, left, BLOCKS),
        "tied llama": Kind(tied_llama, text, BLOCKS),
        "lora": Kind(lora, text, BLOCKS),
        "late lora": Kind(lora_late, text, BLOCKS),
    }
)


def not_adapted(make: Callable[[], nn.Module]) -> tuple[str, ...]:
    """Names of what a model with adapters does not train, for `Run.frozen`."""
    return tuple(name for name, p in make().named_parameters() if not p.requires_grad)


def lm_run(model: str = "gpt2", stages: int = 2, schedule: str | None = None, **rest: Any) -> Run:
    """A run with AdamW and clipping; its loss is the pipeline's own."""
    pipeline = {"loss_fn": None, "split": stages, **rest.pop("pipeline", {})}
    settings: dict[str, Any] = {"rows": (7, 5), "chunks": 4, "steps": 3, "clip": 0.5}
    settings.update(rest, optimizer="adamw", pipeline=pipeline)
    return Run(model, stages, schedule, **settings)


def train_lms(all_runs: list[Run]) -> list[Outcome]:
    """`runs.train_all`, by a name with which ranks find this module."""
    return runs.train_all(all_runs)


def make_lm(run: Run, *, alone: bool = False, **kwargs: Any) -> mpcomp.Pipeline:
    """The pipeline of a run."""
    return runs.make(run, alone=alone, **kwargs)[0]


#: With these the first stage and the last are on one rank, and the two in the middle on another.
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")


def check(
    ranks: Callable[..., Any],
    num_ranks: int,
    all_runs: Sequence[Run],
    trained: Callable[[list[Run]], list[Outcome]] = train_lms,
) -> list[tuple[Outcome, ...]]:
    """Runs in so many ranks, and alone: the same bits, and the same bytes of each link.

    Ranks find the models in the module of ``trained``.

    Returns the outcomes of each run, by rank.
    """
    outcomes = ranks(trained, num_ranks, list(all_runs))
    all_ours = list(zip(*outcomes, strict=True))
    for run, ours in zip(all_runs, all_ours, strict=True):
        alone = train(run)
        assert_same(run, ours, alone)
        sent = dict(alone.sent)
        if run.schedule in V_SCHEDULES:  # neither leaves its rank
            middle = f"boundary {run.stages // 2 - 1} "
            inside = [name for name in sent if middle in name or "tie" in name]
            sent.update(dict.fromkeys(inside, (0, 0)))
        for name, figures in sent.items():
            by_rank = [outcome.sent[name] for outcome in ours]
            assert sum(wire for wire, _ in by_rank) == figures[0], (run, name, by_rank)
            assert sum(dense for _, dense in by_rank) == figures[1], (run, name, by_rank)
            assert sum(wire > 0 for wire, _ in by_rank) <= 1  # metered where it is sent
        for outcome in ours:
            assert outcome.bytes == tuple(map(sum, zip(*sent.values(), strict=True))), run
    return all_ours
