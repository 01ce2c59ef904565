"""A language model as a line of blocks that can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stages.hints import listing
from stages.language_models.layout import unwrapped
from stages.language_models.line import BlockLine, difference, evaluation
from stages.language_models.run import DecoderRun
from stages.stage import Run, Stage

#: Values of `config.model_type` for which tests show that stages give the model's bits.
FAMILIES = frozenset(
    {"gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gpt_neox", "phi3", "olmo2"}
)


class Decoder(BlockLine):
    """A causal language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        config: Any = unwrapped(model)[1].config
        if every := getattr(config, "rescale_every", 0):
            raise ValueError(
                f"{type(unwrapped(model)[1]).__name__} with config.rescale_every = {every} changes "
                "its weights in forward, whenever it goes over to evaluation or back, and a stage "
                "does not know of it. Set model.config.rescale_every = 0 before its first "
                "evaluation; that only guards fp16 against overflow, and gives the same logits"
            )
        self.tested = config.model_type in FAMILIES

    def run(self, start: int, stop: int, *, first: bool, last: bool) -> Run:
        """The code of a stage with blocks ``start`` to ``stop`` - 1."""
        return DecoderRun(self.layout, start, stop, last)

    def check(self, stages: Sequence[Stage]) -> None:
        """Raise ValueError if the stages of an untested family do not give the model's logits."""
        weights = next(self.model.parameters(), None)
        if self.tested or weights is None or weights.is_meta:
            return
        ids = torch.arange(1, 11, device=weights.device).reshape(2, 5)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        batch["attention_mask"][0, :2] = 0
        with evaluation(self.model, *stages):
            expected = self.model(**batch, use_cache=False).logits
            error = difference(stages, batch, expected)
        if error is not None:
            raise ValueError(
                f"{type(self.model).__name__} cannot be cut like this: its stages do not give its "
                f"logits ({error}), so its forward does more between the blocks than the families "
                f"that are known ({listing(sorted(FAMILIES))}); write it as an nn.Sequential, or "
                "train it whole in replicas with mpcomp.compress_gradients"
            ) from error
