"""Causal language models of transformers, cut between the blocks of their decoder without tracing.

The model's own forward runs in every stage, on a shallow copy that holds the stage's blocks alone;
what stands before the blocks belongs to the first stage, what stands after them to the last::

    model                      stage 0           stage 1               stage 2
    |- transformer
    |  |- wte, wpe, drop       input_ids         (inputs_embeds)       (inputs_embeds)
    |  |- h.0 ... h.11         h.0 to h.3        h.4 to h.7            h.8 to h.11
    |  |- ln_f                 (identity)        (identity)            ln_f
    |- lm_head                                                         lm_head -> logits

Masks and positions go to every stage from the batch, which every rank has, and so cross no cut.
Rotary embeddings have no weights: each stage has its own. Embedding and head are often one tensor;
cut apart they become two equal ones, and whoever trains adds up their gradients (`stages.ties`).

Tested with transformers 5.23; families outside `FAMILIES` are tried on a few tokens when they are
cut, and refused if the stages do not give the model's logits.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stages.buffers import fill_buffers
from stages.hints import listing, nearest
from stages.sharing import name_groups
from stages.stage import Piece, Stage, StageState, ancestors
from stages.tokens import check_tokens

#: Values of `config.model_type` for which tests show that stages give the model's bits.
FAMILIES = frozenset(
    {"gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gpt_neox", "phi3", "olmo2"}
)


def is_causal_lm(model: nn.Module) -> bool:
    """Whether `model` is a language model of transformers, or one that peft has wrapped."""
    # It cannot be one where transformers has never been imported; importing it takes seconds.
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return False
    inner = _unwrapped(model)[1]
    return (
        isinstance(inner, transformers.PreTrainedModel)
        and not inner.config.is_encoder_decoder
        and inner.get_output_embeddings() is not None
        and inner.can_generate()  # a masked language model has a head as well
    )


@dataclass(frozen=True)
class _Layout:
    """Where things are in a language model, by qualified names."""

    lm: str  # the model with the head
    holder: str  # the module that holds the list of blocks
    blocks: tuple[str, ...]
    before: tuple[str, ...]  # children of the holder that only the first stage runs
    after: tuple[str, ...]  # those of the last, and what stands between the holder and the logits
    everywhere: tuple[str, ...]  # children without weights: each stage has a copy


class Decoder:
    """A causal language model as `split` sees it: units are its blocks.

    The first has the embeddings with it, the last the final norm and the head.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layout = _layout_of(model)
        self.units = list(self._layout.blocks)
        self.places = list(range(1, len(self.units)))
        config: Any = _unwrapped(model)[1].config
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
        """Cut at these increasing places."""
        layout, bounds = self._layout, [0, *places, len(self.units)]
        pieces = []
        for start, stop in pairwise(bounds):
            first, last = start == 0, stop == len(self.units)
            names = (
                *(layout.before if first else ()),
                *layout.blocks[start:stop],
                *(layout.after if last else ()),
            )
            run = DecoderRun(layout, start, stop)
            pieces.append(Piece(names, (), run, copied=layout.everywhere))
        return self._with_tied_copies(pieces)

    def _with_tied_copies(self, pieces: list[Piece]) -> list[Piece]:
        """Let a stage have a copy of what it shares with an earlier one."""
        copied: list[tuple[str, ...]] = [piece.copied for piece in pieces]
        for names in name_groups(self._model):
            homes = [(i, name) for name in names for i, p in enumerate(pieces) if p.holds(name)]
            for i, name in homes:
                if i != homes[0][0]:
                    block = next(b for b in pieces[i].blocks if b in ancestors(name))
                    copied[i] = (*copied[i], block)
        return [
            Piece(piece.blocks, piece.tensors, piece.run, copied=names)
            for piece, names in zip(pieces, copied, strict=True)
        ]

    def fill_buffers(self) -> None:
        """Give a model on "meta" the buffers that its configuration says; no file has them."""
        fill_buffers(_unwrapped(self._model)[1])

    def check(self, stages: Sequence[Stage]) -> None:
        """Raise ValueError if the stages of an untested family do not give the model's logits."""
        weights = next(self._model.parameters(), None)
        if self.tested or weights is None or weights.is_meta:
            return
        ids = torch.arange(1, 11, device=weights.device).reshape(2, 5)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        batch["attention_mask"][0, :2] = 0
        modes = [(module, module.training) for module in self._model.modules()]
        copies = [(module, module.training) for stage in stages for module in stage.modules()]
        try:
            for module, _ in modes + copies:
                module.training = False
            with torch.no_grad():
                expected = self._model(**batch, use_cache=False).logits
                error = _difference(stages, batch, expected)
        finally:
            for module, mode in modes + copies:
                module.training = mode
        if error is not None:
            raise ValueError(
                f"{type(self._model).__name__} cannot be cut like this: its stages do not give its "
                "logits, so its forward does more between the blocks than the families that are "
                f"known ({listing(sorted(FAMILIES))}); write it as an nn.Sequential"
            ) from error


@dataclass(frozen=True)
class DecoderRun:
    """The code of one stage: the model's own forward, with blocks `start` to `stop` - 1 alone."""

    layout: _Layout
    start: int
    stop: int

    @property
    def side_inputs(self) -> tuple[str, ...]:
        """What a later stage takes from the batch beside the activation."""
        return ("attention_mask", "position_ids", "past_key_values", "logits_to_keep")

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
        first, last = self.start == 0, self.stop == len(self.layout.blocks)
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
            "past_key_values": cache,
            "use_cache": cache is not None,
        }
        holder = self._holder(stage, first=first, last=last)
        if not last:
            return holder(**settings).last_hidden_state
        lm = self._above(stage, holder)
        return lm(**settings, logits_to_keep=logits_to_keep).logits

    def check_batch(self, model: nn.Module, batch: object) -> None:
        """Raise for a batch that the model cannot take; the message says what it can."""
        check_tokens(_unwrapped(model)[1], batch)

    def _config(self, stage: Stage) -> Any:
        """The configuration of a model with these blocks alone."""
        config: Any = copy.copy(stage.original.get_submodule(self.layout.holder).config)
        if vars(config).get("layer_types") is not None:  # elsewhere it follows from the number
            config.layer_types = list(config.layer_types)[self.start : self.stop]
        config.num_hidden_layers = self.stop - self.start
        return config

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
        return _shallow(theirs, stage, modules, self._config(stage))

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
            inner, name = _shallow(theirs, stage, modules, self._config(stage)), parent
        return inner


class StageCaches(StageState):
    """The keys and values of one batch under generation: each stage here has its own cache."""

    def __init__(self) -> None:
        self._caches: dict[int, Any] = {}

    def shaping(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The tokens of this call; the mask is of all tokens so far, and longer in each call."""
        return {"input_ids": batch["input_ids"]}

    @property
    def length(self) -> int:
        """Number of tokens that the stages here have seen."""
        return max((cache.get_seq_length() for cache in self._caches.values()), default=0)

    def of(self, stage: int, first_block: int, config: Any) -> Any:
        """The cache of a stage, made when it is first asked for."""
        from stages.cache import StageCache

        if stage not in self._caches:
            self._caches[stage] = StageCache(config, first_block)
        return self._caches[stage]


class _Nothing(nn.Module):
    """In place of an embedding of positions: the first stage has added it."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


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


def _shallow(
    theirs: nn.Module, stage: Stage, modules: dict[str, nn.Module | None], config: Any
) -> nn.Module:
    shell = copy.copy(theirs)
    # Not by assignment to attributes: `_modules` is still that of the original.
    vars(shell).update(_modules=modules, training=stage.training, config=config)
    return shell


def _unwrapped(model: nn.Module) -> tuple[str, nn.Module]:
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


def _layout_of(model: nn.Module) -> _Layout:
    prefix, lm = _unwrapped(model)

    def qualified(*parts: str) -> str:
        return ".".join(part for part in (prefix, *parts) if part)

    list_name = _block_list(lm)
    holder_name = list_name.rpartition(".")[0]
    holder = lm.get_submodule(holder_name)
    before: list[str] = []
    after: list[str] = []
    everywhere: list[str] = []
    passed = False
    for name, child in holder.named_children():
        path = qualified(holder_name, name)
        if child is lm.get_submodule(list_name):
            passed = True
        elif not passed and (isinstance(child, nn.Dropout) or _has_parameters(child)):
            before.append(path)
        elif _has_parameters(child):
            after.append(path)
        else:
            everywhere.append(path)
    inside = holder_name
    while inside:  # what the modules round the holder have beside it: the head
        parent, _, leaf = inside.rpartition(".")
        around = lm.get_submodule(parent).named_children()
        after += [qualified(parent, name) for name, _ in around if name != leaf]
        inside = parent
    num_blocks = len(_list(lm, list_name))
    blocks = tuple(qualified(list_name, str(i)) for i in range(num_blocks))
    return _Layout(
        prefix, qualified(holder_name), blocks, tuple(before), tuple(after), tuple(everywhere)
    )


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
    wanted = config.get_text_config(decoder=True).num_hidden_layers
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
