"""Text generation through the stages: each keeps the keys and values of its own blocks.

The prompt goes through once, then one token at a time: one message a token and cut. The last stage
chooses the token and sends it to all ranks, which then go on alike::

    stage 0   prompt ─> ... ─> last stage ─> token ┐
       ^───────────────────────────────────────────┘ to all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import stages as staging
from stages.language_models import StageCaches

__all__ = ["generate"]


class NextTokens(Protocol):
    """A call of the stages for one token of each row; every rank makes it.

    Args:
        batch: what the first stage is called with.
        choose: gets the logits where the last stage is, and gives int64 [b].
        call: number of the call, from 0.
        same: in the first call, what else than the batch must be the same on all ranks.

    Returns:
        What it chose, int64 [b] of each replica, on every rank; with ``data="first"`` of this
        replica alone.

    Raises:
        FloatingPointError: NaN or Inf in the logits of one of the replicas; on every rank.
    """

    def __call__(
        self,
        batch: Mapping[str, Any],
        choose: Callable[[Tensor], Tensor],
        *,
        call: int,
        same: Any = None,
    ) -> list[Tensor]: ...


def generate(
    next_tokens: NextTokens,
    cut: Sequence[staging.Stage],
    replica: int,
    input_ids: Tensor | None,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 20,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    logits_processor: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    streamer: Any = None,
    seed: int = 0,
) -> Tensor:
    """Continues token sequences; see `Pipeline.generate`, which documents the other arguments.

    Called in evaluation mode and without gradients.

    Args:
        next_tokens: runs the stages.
        cut: all stages.
        replica: which of the replicas, whose tokens `next_tokens` gives, is this one.
    """
    lm: Any = cut[0].original
    if not cut[0].is_causal_lm:
        can = cut[0].of_transformers and lm.can_generate()
        whole = "; pipe.merge().generate(...) runs the whole model" if can else ""
        raise ValueError(f"generate: {type(lm).__name__} is no causal language model{whole}")
    if getattr(lm, "_is_stateful", False):
        raise ValueError(
            f"generate: {type(lm).__name__} is recurrent and keeps a state, but stages keep keys "
            "and values alone; generate with the whole model: pipe.merge().generate(...)"
        )
    if input_ids is None:
        raise ValueError("generate: there is no prompt: pass input_ids [b, s]")
    _check(cut, input_ids, attention_mask, max_new_tokens, temperature, top_p)
    config = getattr(lm, "generation_config", None)
    ends = _ids(eos_token_id if eos_token_id is not None else getattr(config, "eos_token_id", None))
    if pad_token_id is None:
        pad_token_id = getattr(config, "pad_token_id", None)
    if pad_token_id is None:
        pad_token_id = ends[0] if ends else 0
    vocabulary = lm.config.get_text_config(decoder=True).vocab_size
    if ends and not 0 <= pad_token_id < vocabulary:
        raise ValueError(
            f"pad_token_id={pad_token_id}, which rows that have ended are continued with; expected "
            f"one of the model's tokens, 0 to {vocabulary - 1}"
        )
    generator: torch.Generator | None = None
    ids = input_ids.cpu().long()
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask.cpu().long()
    processors = [
        *_penalty(float(repetition_penalty), mask),
        *logits_processor,
        *_warpers(do_sample, float(temperature), top_k, top_p),
    ]
    going: list[Tensor] = []  # of each replica, which rows have not ended
    caches = StageCaches()

    def choose(logits: Tensor) -> Tensor:
        """The next token of each row [b], from logits [b, 1, vocabulary]; on the last stage."""
        nonlocal generator
        scores = logits[:, -1].float()
        for processor in processors:
            scores = processor(ids.to(scores.device), scores)
        if not do_sample:
            return scores.argmax(dim=-1)
        if generator is None:
            generator = torch.Generator(scores.device).manual_seed(seed)
        probabilities = scores.softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    agreed = (max_new_tokens, ends, do_sample, temperature, top_k, top_p, repetition_penalty, seed)
    if streamer is not None:
        streamer.put(ids)
    fed = ids
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    for i in range(max_new_tokens):
        batch = {
            "input_ids": fed,
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": caches,
            "logits_to_keep": 1,
        }
        same = None if i else (*agreed, pad_token_id)
        tokens_of = next_tokens(batch, choose, call=i, same=same)
        going = going or [torch.ones_like(tokens, dtype=torch.bool) for tokens in tokens_of]
        own = going[replica]
        chosen = torch.where(own, tokens_of[replica], pad_token_id)
        if own.any():  # else this replica only keeps pace with another
            ids = torch.cat([ids, chosen[:, None]], dim=1)
            if streamer is not None:
                streamer.put(chosen)
        for tokens, rows in zip(tokens_of, going, strict=True):
            for end in ends:
                rows &= tokens != end
        if not any(bool(rows.any()) for rows in going):
            break
        fed = chosen[:, None]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(fed)], dim=1)
    if streamer is not None:
        streamer.end()
    return ids.to(input_ids.device)


def _check(
    cut: Sequence[staging.Stage],
    input_ids: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float | None,
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: expected 1 or more")
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature}: expected a positive number; do_sample=False is greedy"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: expected a share of the probability, in (0, 1]")
    batch = {"input_ids": input_ids}
    if attention_mask is not None:
        batch["attention_mask"] = attention_mask
    cut[0].check_batch(batch)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; expected that of input_ids, "
            f"{list(input_ids.shape)}"
        )
    if not input_ids.numel():
        raise ValueError(f"input_ids of shape {list(input_ids.shape)}: expected a token at least")
    if attention_mask is not None and bool((attention_mask[:, -1] == 0).any()):
        raise ValueError(
            "attention_mask ends with 0: generation goes on after the last position, so pad on the "
            "left (tokenizer.padding_side = 'left')"
        )
    config: Any = cut[0].original.config
    limit = getattr(config, "max_position_embeddings", None)
    needed = input_ids.shape[1] + max_new_tokens - 1  # the last token is not fed again
    if limit is not None and needed > limit:
        raise ValueError(
            f"{input_ids.shape[1]} tokens and max_new_tokens={max_new_tokens} need more than the "
            f"model's {limit} positions"
        )


def _ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _penalty(repetition_penalty: float, mask: Tensor) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Scores of tokens that a row has are made less likely; what pads it counts for nothing."""
    from transformers import RepetitionPenaltyLogitsProcessor

    if repetition_penalty == 1:
        return []
    penalise = RepetitionPenaltyLogitsProcessor(repetition_penalty)

    def penalise_text(ids: Tensor, scores: Tensor) -> Tensor:
        # In place of the padding another token that the row has anyway.
        prompt = ids[:, : mask.shape[1]].where(mask.to(ids.device) != 0, ids[:, -1:])
        result: Tensor = penalise(torch.cat([prompt, ids[:, mask.shape[1] :]], dim=1), scores)
        return result

    return [penalise_text]


def _warpers(
    do_sample: bool, temperature: float, top_k: int | None, top_p: float | None
) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """The last things that transformers does to scores before it draws a token."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    found: list[Callable[[Tensor, Tensor], Tensor]] = []
    if not do_sample:
        return found
    if temperature != 1:
        found.append(TemperatureLogitsWarper(temperature))
    if top_k:
        found.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        found.append(TopPLogitsWarper(top_p))
    return found
