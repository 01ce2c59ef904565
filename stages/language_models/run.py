"""Computation of a language model's stage: the model's own forward, with the stage's blocks."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stages.language_models.caches import StageCaches
from stages.language_models.layout import Layout, unwrapped
from stages.language_models.tokens import check_tokens
from stages.stage import Stage


@dataclass(frozen=True)
class DecoderRun:
    """The code of one stage: the model's own forward, with blocks `start` to `stop` - 1 alone."""

    layout: Layout
    start: int
    stop: int
    last: bool

    @property
    def side_inputs(self) -> tuple[str, ...]:
        """Inputs that a later stage takes from the batch beside the activation."""
        if self.start == self.stop:  # no block asks who may look at whom
            return ("logits_to_keep",)
        return ("attention_mask", "position_ids", "past_key_values", "logits_to_keep")

    of_transformers = True
    is_causal_lm = True

    def __call__(
        self,
        stage: Stage,
        x: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StageCaches | None = None,
        logits_to_keep: int = 0,
    ) -> object:
        first, last = self.start == 0, self.last
        cache = None
        if past_key_values is not None:
            cache = past_key_values.of(stage.index, self.start, self._config(stage))
        if first:
            ids = x if input_ids is None else input_ids
            assert ids is not None
            source, length, device = {"input_ids": ids}, ids.shape[1], ids.device
        else:
            assert x is not None
            source, length, device = {"inputs_embeds": x}, x.shape[1], x.device
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + length, device=device)[None]
        settings: dict[str, Any] = {
            **source,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "use_cache": cache is not None,
        }
        holder = self._holder(stage, first=first, last=last)
        model = self._above(stage, holder) if last else holder
        if cache is not None:
            settings[_name_of_cache(model)] = cache
        if not last:
            return model(**settings).last_hidden_state
        return model(**settings, logits_to_keep=logits_to_keep).logits

    def check_batch(self, model: nn.Module, batch: object) -> None:
        """Raise for a batch that the model cannot take; the message says what it can."""
        check_tokens(unwrapped(model)[1], batch)

    def _config(self, stage: Stage) -> Any:
        """The configuration of a model with these blocks alone."""
        config = stage.original.get_submodule(self.layout.holder).config
        return config_of_blocks(config, self.start, self.stop)

    def _holder(self, stage: Stage, *, first: bool, last: bool) -> nn.Module:
        """A shallow copy of what holds the blocks, with this stage's."""
        layout, theirs = self.layout, stage.original.get_submodule(self.layout.holder)
        list_name = layout.blocks[0].rpartition(".")[0]
        modules: dict[str, nn.Module | None] = {}
        for name, child in theirs._modules.items():
            qualified = f"{layout.holder}.{name}" if layout.holder else name
            if qualified == list_name:
                names = layout.blocks[self.start : self.stop]
                modules[name] = nn.ModuleList(stage.get_submodule(block) for block in names)
            elif qualified in layout.everywhere or qualified in stage.block_names:
                modules[name] = stage.get_submodule(qualified)
            elif child is None:
                modules[name] = None
            else:
                modules[name] = _Nothing() if isinstance(child, nn.Embedding) else nn.Identity()
        return shallow(theirs, stage, modules, self._config(stage))

    def _above(self, stage: Stage, holder: nn.Module) -> nn.Module:
        """Shallow copies of the modules round the holder, up to the model with the head."""
        inner, name = holder, self.layout.holder
        while name != self.layout.lm:
            parent, _, leaf = name.rpartition(".")
            theirs = stage.original.get_submodule(parent)
            modules = dict(theirs._modules)
            for other in modules:
                qualified = f"{parent}.{other}" if parent else other
                if qualified in stage.block_names:
                    modules[other] = stage.get_submodule(qualified)
            modules[leaf] = inner
            inner, name = shallow(theirs, stage, modules, self._config(stage)), parent
        return inner


def _name_of_cache(model: nn.Module) -> str:
    """The name under which a forward takes a cache: another one from transformers 5.24 on."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


class _Nothing(nn.Module):
    """In place of an embedding of positions: the first stage has added it."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


def config_of_blocks(config: Any, start: int, stop: int) -> Any:
    """A configuration of a model with blocks ``start`` to ``stop`` - 1 alone."""
    own = copy.copy(config)
    if vars(own).get("layer_types") is not None:  # elsewhere it follows from the number
        own.layer_types = list(own.layer_types)[start:stop]
    own.num_hidden_layers = stop - start
    if hasattr(own, "output_router_logits"):  # of these blocks alone, or of none
        own.output_router_logits = False
    return own


def shallow(
    theirs: nn.Module, stage: Stage, modules: dict[str, nn.Module | None], config: Any
) -> nn.Module:
    """A copy of a module with other children, in the mode of a stage."""
    shell = copy.copy(theirs)
    # Not by assignment to attributes: `_modules` is still that of the original.
    vars(shell).update(_modules=modules, training=stage.training, config=config)
    return shell
