"""A language model as a line of blocks that can be cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stages.hints import listing, nearest
from stages.language_models.buffers import fill_buffers
from stages.language_models.layout import layout_of, unwrapped
from stages.language_models.run import DecoderRun
from stages.stage import Piece, Stage

#: Values of `config.model_type` for which tests show that stages give the model's bits.
FAMILIES = frozenset(
    {"gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gpt_neox", "phi3", "olmo2"}
)


class Decoder:
    """A causal language model as `split` sees it: units are its blocks.

    The first has the embeddings with it, the last the final norm and the head.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layout = layout_of(model)
        self.units = list(self._layout.blocks)
        self.places = list(range(1, len(self.units)))
        #: Before the final norm and the head.
        self.head_place: int | None = len(self.units)
        config: Any = unwrapped(model)[1].config
        if every := getattr(config, "rescale_every", 0):
            raise ValueError(
                f"{type(unwrapped(model)[1]).__name__} with config.rescale_every = {every} changes "
                "its weights in forward, whenever it goes over to evaluation or back, and a stage "
                "does not know of it. Set model.config.rescale_every = 0 before its first "
                "evaluation; that only guards fp16 against overflow, and gives the same logits"
            )
        self.tested = config.model_type in FAMILIES

    @property
    def paper_cut(self) -> tuple[str, ...]:
        """Four stages of equally many blocks: after blocks 2, 5 and 8 of GPT-2's twelve.

        Rudakov et al., Activations and Gradients Compression for Model-Parallel Training, 2023.
        """
        quarter, rest = divmod(len(self.units), 4)
        if rest or not quarter:
            raise ValueError(
                f"where is 'paper', which cuts into four stages of equally many blocks, but the "
                f"model has {len(self.units)}; pass a number of stages"
            )
        return tuple(self.units[i * quarter - 1] for i in (1, 2, 3))

    def place(self, name: str) -> int:
        """Return the place after the block of that qualified name.

        Raises:
            ValueError: There is none, or nothing comes after it.
        """
        if name not in self.units:
            raise ValueError(f"the model has no block {name!r}; {nearest(name, self.units)}")
        place = self.units.index(name) + 1
        if place == len(self.units):
            raise ValueError(
                f"cannot cut after {name!r}: it is the last block and would leave an empty stage; "
                "leave it out"
            )
        return place

    def pieces(self, places: Sequence[int]) -> list[Piece]:
        """Cut at these increasing places; at `head_place`, the last has no blocks."""
        layout, bounds = self._layout, [0, *places, len(self.units)]
        pieces: list[Piece] = []
        for start, stop in pairwise(bounds):
            first, last = start == 0, len(pieces) == len(places)
            names = (
                *(layout.before if first else ()),
                *layout.blocks[start:stop],
                *(layout.after if last else ()),
            )
            run = DecoderRun(layout, start, stop, last)
            pieces.append(Piece(names, (), run, copied=layout.everywhere))
        return pieces

    def fill_buffers(self) -> None:
        """Give a model on "meta" the buffers that its configuration says; no file has them."""
        fill_buffers(unwrapped(self._model)[1])

    def check(self, stages: Sequence[Stage]) -> None:
        """Raise ValueError if the stages of an untested family do not give the model's logits."""
        weights = next(self._model.parameters(), None)
        if self.tested or weights is None or weights.is_meta:
            return
        ids = torch.arange(1, 11, device=weights.device).reshape(2, 5)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        batch["attention_mask"][0, :2] = 0
        with evaluation(self._model, *stages):
            expected = self._model(**batch, use_cache=False).logits
            error = _difference(stages, batch, expected)
        if error is not None:
            raise ValueError(
                f"{type(self._model).__name__} cannot be cut like this: its stages do not give its "
                "logits, so its forward does more between the blocks than the families that are "
                f"known ({listing(sorted(FAMILIES))}); write it as an nn.Sequential"
            ) from error


@contextmanager
def evaluation(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module has the mode it had."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _difference(
    stages: Sequence[Stage], batch: Mapping[str, Tensor], expected: Tensor
) -> Exception | None:
    """Why stages do not give the expected output for a batch; None if they do."""
    try:
        value = stages[0](**batch)
        for stage in stages[1:]:
            value = stage(value, **stage.takes(batch))
    except Exception as error:  # anything at all: the code was not written to be run in parts
        return error
    return None if torch.equal(value, expected) else ValueError("other logits")
