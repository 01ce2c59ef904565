"""Computation of an encoder's stage: the model's own forward, from what crosses a cut on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stages.encoders.wrapped import Ending, Given, Passing, Reached, in_place_of, in_shape
from stages.hints import listing
from stages.language_models.layout import Layout, unwrapped
from stages.language_models.run import config_of_blocks, shallow
from stages.stage import Stage, ancestors

#: What forwards of transformers take besides inputs: settings, states, and what a loss is from.
_NO_INPUTS = frozenset(
    {
        "cache",
        "decoder_inputs_embeds",
        "decoder_position_ids",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "encoder_outputs",
        "end_positions",
        "inputs_embeds",
        "labels",
        "next_sentence_label",
        "output_attentions",
        "output_hidden_states",
        "past_key_values",
        "return_dict",
        "start_positions",
        "use_cache",
    }
)


_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def inputs_of(model: nn.Module) -> list[str]:
    """Names of the inputs that a model of transformers takes."""
    return [name for name in _arguments(model) if name not in _NO_INPUTS]


def _arguments(model: nn.Module) -> list[str]:
    """Names that a model's forward takes: its own, and its base classes' that it hands on."""
    names: dict[str, None] = {}
    for kind in type(model).__mro__:
        if kind is not nn.Module and "forward" in vars(kind):
            parameters = inspect.signature(vars(kind)["forward"]).parameters.values()
            names |= {p.name: None for p in parameters if p.kind not in _STARS}
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                break
    return [name for name in names if name != "self"]


def output_of(result: Any) -> Tensor | None:
    """The one tensor of a model's result that a loss is computed from; None if there is none.

    Of a question's answer, where it begins and where it ends: [b, s, 2].
    """
    if getattr(result, "start_logits", None) is not None:
        return torch.stack((result.start_logits, result.end_logits), dim=-1)
    for name in ("logits", "last_hidden_state"):
        value = getattr(result, name, None)
        if isinstance(value, Tensor):
            return value
    return None


@dataclass(frozen=True)
class EncoderRun:
    """The code of one stage.

    Args:
        layout: of the model.
        start: the number of the stage's first block.
        stop: the number after its last block.
        first: whether it has the embeddings.
        last: whether it has the head.
        returned: values that a block returns in a tuple; None if it returns a tensor.
        embedded: what modules before the blocks return beside the activation, by name.
        numbers: sizes that each block is given beside it, by their places.
        pixels: the size [channels, height, width] of the images that these are for.
        sounds: the size [bins, frames] of a row of a model of sounds; None of others.
    """

    layout: Layout
    start: int
    stop: int
    first: bool
    last: bool
    returned: int | None
    embedded: Mapping[str, tuple[Any, ...]]
    numbers: tuple[Mapping[int, Any], ...]
    pixels: tuple[int, ...] | None
    sounds: tuple[int, ...] | None

    of_transformers = True

    @property
    def side_inputs(self) -> tuple[str, ...]:
        """Inputs that a later stage takes from the batch beside the activation."""
        # Some heads look for the last token that is no padding.
        return ("attention_mask", "position_ids", *(("input_ids",) if self.last else ()))

    def __call__(self, stage: Stage, x: Tensor | None = None, **inputs: Any) -> object:
        model: Any = stage.original.get_submodule(self.layout.lm)
        takes = _arguments(model)
        inputs = {name: value for name, value in inputs.items() if self.first or name in takes}
        main = model.main_input_name
        if x is not None and not self.first and self.sounds is not None:
            inputs[main] = in_shape(x, self.sounds)
        elif x is not None and main not in inputs:  # a later stage's is asked for shape and device
            inputs["inputs_embeds" if "inputs_embeds" in takes and not self.first else main] = x
        received = None if self.first else x
        try:
            result = self._model(stage, received)(**inputs, return_dict=True)
        except Reached as reached:
            return reached.output
        output = output_of(result)
        return result if output is None else output

    def check_batch(self, model: nn.Module, batch: object) -> None:
        """Raise ValueError for a batch that the model cannot take; the message says what it can."""
        inner: Any = unwrapped(model)[1]
        main, accepted = inner.main_input_name, inputs_of(inner)
        given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {main: batch}
        if not isinstance(given.get(main), Tensor):
            raise ValueError(
                f"{main} is a {type(given.get(main)).__name__}; {type(inner).__name__} takes a "
                "tensor, alone or in a mapping under that name"
            )
        if self.pixels is not None and tuple(given[main].shape[1:]) != self.pixels:
            raise ValueError(
                f"{main} is {list(given[main].shape)}, but the stages of {type(inner).__name__} "
                f"are for images {list(self.pixels)}, as config.image_size says: blocks are told "
                "the size of what they are given. Resize the images, or set the configuration's "
                "image_size before the model is cut"
            )
        if unknown := [name for name in given if name not in accepted]:
            raise ValueError(
                f"the batch has {listing(unknown)}; {type(inner).__name__} takes "
                f"{listing(accepted)} and, for the loss, 'labels' or what it computes its own from"
            )

    def _model(self, stage: Stage, received: Tensor | None) -> nn.Module:
        """A shallow copy of the model with the stage's modules."""
        layout = self.layout
        ours: dict[str, nn.Module] = {
            name: stage.get_submodule(name)
            for name in (*stage.block_names, *layout.everywhere, *layout.read_by_all)
            if name not in layout.blocks
        }
        if received is not None:
            for name in layout.before:
                beside = self.embedded.get(name)
                output = received if beside is None else (received, *beside)
                ours[name] = in_place_of(stage.original.get_submodule(name), output)
        (blocks,) = layout.lists
        ours[blocks] = self._blocks(stage, received)
        return copied(layout.lm, stage, ours, self._config)

    def _config(self, config: Any) -> Any:
        """The configuration of a part of the model, with the stage's blocks alone."""
        start = min(self.start, self.stop - 1)  # a head alone passes for the last block
        own = config_of_blocks(config, start, self.stop)
        own.use_cache = False
        return own

    def _blocks(self, stage: Stage, received: Tensor | None) -> nn.ModuleList:
        """The stage's blocks: the first is given what was received, the last ends the forward."""
        names = self.layout.blocks[self.start : self.stop]
        if not names:
            assert received is not None and self.last
            like = stage.original.get_submodule(self.layout.blocks[-1])
            beside = [None] * ((self.returned or 1) - 1)
            passed = received if self.returned is None else (received, *beside)
            return nn.ModuleList([Passing(like, passed)])
        blocks = [stage.get_submodule(name) for name in names]
        if received is not None:
            given: list[dict[int, Any]] = [dict(numbers) for numbers in self.numbers]
            given[0][0] = received
            blocks = [Given(b, what) if what else b for b, what in zip(blocks, given, strict=True)]
        if not self.last:
            blocks[-1] = Ending(blocks[-1])
        return nn.ModuleList(blocks)


def copied(
    name: str, stage: Stage, ours: Mapping[str, nn.Module], config_of: Callable[[Any], Any]
) -> nn.Module:
    """A shallow copy of a module, with ours inside, down to where they are.

    Args:
        name: of the module in the model.
        stage: that it is for.
        ours: modules in place of the model's, by name.
        config_of: gives a part's configuration in the stage, of its own.
    """
    theirs = stage.original.get_submodule(name)
    modules = dict(theirs._modules)
    for leaf in modules:
        path = f"{name}.{leaf}" if name else leaf
        if path in ours:
            modules[leaf] = ours[path]
        elif any(path in ancestors(other) for other in ours):
            modules[leaf] = copied(path, stage, ours, config_of)
    config: Any = getattr(theirs, "config", None)
    return shallow(theirs, stage, modules, None if config is None else config_of(config))
