"""Places in a language model of transformers: its blocks, and what stands round them."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from stages.hints import listing, nearest
from stages.stage import ancestors


def is_pretrained(model: nn.Module) -> bool:
    """Whether `model` is one of transformers, or one that peft has wrapped."""
    # It cannot be one where transformers has never been imported; importing it takes seconds.
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(
        unwrapped(model)[1], transformers.PreTrainedModel
    )


def is_causal_lm(model: nn.Module) -> bool:
    """Whether `model` is a language model of transformers, or one that peft has wrapped."""
    if not is_pretrained(model):
        return False
    inner: Any = unwrapped(model)[1]
    return (
        not inner.config.is_encoder_decoder
        and inner.get_output_embeddings() is not None
        and bool(inner.can_generate())  # a masked language model has a head as well
    )


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether `model` is one of transformers with a decoder that reads what its encoder gives.

    Its class decides: a classifier on Whisper's encoder has the configuration of both.
    """
    if not is_pretrained(model):
        return False
    return "decoder_input_ids" in inspect.signature(unwrapped(model)[1].forward).parameters


@dataclass(frozen=True)
class Layout:
    """Places in a model of transformers, by qualified names."""

    lm: str  # the model with the head
    blocks: tuple[str, ...]
    before: tuple[str, ...]  # what only the first stage runs
    after: tuple[str, ...]  # those of the last, and what stands between the holder and the logits
    everywhere: tuple[str, ...]  # modules without weights: each stage has a copy
    read_by_all: tuple[str, ...] = ()  # those with weights that all blocks read, tied copies

    @property
    def lists(self) -> tuple[str, ...]:
        """The lists of blocks, in order: one, or an encoder's and a decoder's."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.blocks))

    @property
    def holder(self) -> str:
        """The module that holds the first list of blocks."""
        return self.blocks[0].rpartition(".")[0].rpartition(".")[0]


def unwrapped(model: nn.Module) -> tuple[str, nn.Module]:
    """The model of transformers inside what peft has made of it, and its qualified name."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return "", model
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"peft's {model.active_peft_config.peft_type} changes the model's inputs, which stages "
            "do not see; methods that adapt layers, such as LoRA, can be cut"
        )
    inner = model.get_base_model()
    return next(name for name, module in model.named_modules() if module is inner), inner


def layout_of(model: nn.Module) -> Layout:
    prefix, lm = unwrapped(model)

    def qualified(*parts: str) -> str:
        return ".".join(part for part in (prefix, *parts) if part)

    list_name = _block_list(lm)
    holder_name = list_name.rpartition(".")[0]
    before: list[str] = []
    after: list[str] = []
    everywhere: list[str] = []
    inside = list_name
    while inside:  # the modules beside the list, then those beside what holds it, and so on
        parent, _, leaf = inside.rpartition(".")
        passed = False
        for name, child in lm.get_submodule(parent).named_children():
            path = qualified(parent, name)
            if name == leaf:
                passed = True
            elif parent != holder_name and passed:
                after.append(path)  # a head
            elif isinstance(child, nn.Dropout) or (not passed and _has_parameters(child)):
                before.append(path)  # dropout is the embeddings', also where it is named after all
            elif _has_parameters(child) or (passed and "Norm" in type(child).__name__):
                after.append(path)  # a norm may have no weights, as OLMo's
            else:
                everywhere.append(path)
        inside = parent
    num_blocks = len(_list(lm, list_name))
    blocks = tuple(qualified(list_name, str(i)) for i in range(num_blocks))
    return Layout(prefix, blocks, tuple(before), tuple(after), tuple(everywhere))


def _block_list(lm: nn.Module) -> str:
    """The qualified name of the list of the decoder's blocks."""
    lists = {
        name: len(module)
        for name, module in lm.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    named: Any = getattr(lm, "block_list", None)
    if named is not None:
        if named not in lists:
            raise ValueError(
                f"block_list is {named!r}, but {type(lm).__name__} has no nn.ModuleList of that "
                f"name; {nearest(str(named), lists)}"
            )
        return str(named)
    config: Any = lm.config
    wanted = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    fitting = [name for name, length in lists.items() if length == wanted]
    # Lists inside the blocks of another, such as experts, are not what is looked for.
    found = [name for name in fitting if set(fitting).isdisjoint(ancestors(name)[:-1])]
    if len(found) != 1:
        what = "several fit" if found else "none fits"
        raise ValueError(
            f"cannot find the blocks of {type(lm).__name__}: looked for an nn.ModuleList of "
            f"config.num_hidden_layers = {wanted} modules, and {what}; there are "
            f"{listing(f'{name} ({length})' for name, length in lists.items())}. Name it: "
            "model.block_list = 'model.layers'"
        )
    return str(found[0])


def _list(lm: nn.Module, name: str) -> nn.ModuleList:
    module = lm.get_submodule(name)
    assert isinstance(module, nn.ModuleList)
    return module


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
