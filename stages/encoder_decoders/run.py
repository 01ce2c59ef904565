"""Computation of an encoder-decoder's stage: the model's own forward, from both parts on."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stages.encoders.run import copied, inputs_of, output_of
from stages.encoders.wrapped import Ending, Given, Passing, Reached, Wrapped, in_place_of, in_shape
from stages.hints import listing
from stages.language_models.layout import Layout, unwrapped
from stages.stage import Stage

_MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True)
class EncoderDecoderRun:
    """The code of one stage.

    Args:
        layout: of the model.
        start: the number of the stage's first block, the encoder's counted first.
        stop: the number after its last block.
        first: whether it has the embeddings.
        last: whether it has the head.
        num_encoder: blocks of the encoder.
        returned: values that a block of the encoder and one of the decoder returns in a tuple;
            None of one that returns a tensor.
        sounds: size of a row of a model of sounds, and positions that its encoder makes of it;
            None of a model of texts.
    """

    layout: Layout
    start: int
    stop: int
    first: bool
    last: bool
    num_encoder: int
    returned: tuple[int | None, int | None]
    sounds: tuple[tuple[int, ...], int] | None

    of_transformers = True

    @property
    def side_inputs(self) -> tuple[str, ...]:
        """Inputs that a later stage takes from the batch beside the activation."""
        return () if self.start == self.stop else _MASKS  # a head asks nobody who sees whom

    def __call__(self, stage: Stage, x: Tensor | None = None, **inputs: Any) -> object:
        encoded = decoded = None
        if self.first:
            if x is not None:
                inputs[_main(stage.original)] = x
        elif self.start == self.stop:
            encoded = decoded = x  # no block reads what the encoder gave
        else:
            assert x is not None
            length = self._num_read(stage, inputs.get("attention_mask"))
            encoded, decoded = x[:, :length], x[:, length:]
        reached = self._through(stage, inputs, encoded, decoded)
        if self.stop > self.num_encoder:
            return reached
        if decoded is None:
            decoded = self._embedded(stage, inputs, reached)
        return torch.cat([reached, decoded], 1)

    def completed(self, model: nn.Module, batch: Any, target: Any) -> dict[str, Any]:
        """A batch with all that the model makes of it and its labels before its first block.

        Args:
            model: all of it.
            batch: ``input_ids`` [b, s] or ``input_features``, alone or in a mapping.
            target: labels [b, t], from which the model makes ``decoder_input_ids`` [b, t]; None
                if the batch has these, or its ``labels``.
        """
        given: dict[str, Any] = dict(batch if isinstance(batch, Mapping) else {_main(model): batch})
        labels = given.get("labels", target)
        if "decoder_input_ids" not in given and isinstance(labels, Tensor) and labels.dim() == 2:
            given["decoder_input_ids"] = _shifted(unwrapped(model)[1], labels)
        for ids, mask in zip(("input_ids", "decoder_input_ids"), _MASKS, strict=True):
            if given.get(mask) is None and isinstance(given.get(ids), Tensor):
                given[mask] = torch.ones_like(given[ids])
        return given

    def positions(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Mask [b, s + t] of the positions at a cut that count."""
        read, written = (batch.get(name) for name in _MASKS)
        if self.sounds is not None and isinstance(written, Tensor):
            read = written.new_ones(len(written), self.sounds[1])
        masks = [m for m in (read, written) if isinstance(m, Tensor) and m.dim() == 2]
        return torch.cat(masks, 1) if len(masks) == 2 else None

    def check_batch(self, model: nn.Module, batch: object) -> None:
        """Raise ValueError for a batch that the model cannot take; the message says what it can."""
        inner: Any = unwrapped(model)[1]
        name, main, accepted = type(inner).__name__, _main(model), inputs_of(inner)
        given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
        if not isinstance(given.get(main), Tensor):
            raise ValueError(
                f"{main} is a {type(given.get(main)).__name__}; {name} takes a tensor, alone or in "
                "a mapping under that name"
            )
        if not isinstance(given.get("decoder_input_ids"), Tensor):
            raise ValueError(
                f"the batch has neither labels [b, t] nor decoder_input_ids; {name} makes the "
                "decoder's tokens of labels, by shifting them right"
            )
        if unknown := [other for other in given if other not in accepted]:
            raise ValueError(
                f"the batch has {listing(unknown)}; {name} takes {listing(accepted)} and, for the "
                "loss, 'labels'"
            )
        for mask in _MASKS:
            if (shape := getattr(given.get(mask), "shape", ())) and len(shape) != 2:
                raise ValueError(
                    f"{mask} is {list(shape)}; {name} takes one number for each token "
                    "[b, s] here, 0 where there is padding"
                )

    def _num_read(self, stage: Stage, mask: Tensor | None) -> int:
        """Positions of the encoder in what crosses a cut."""
        if self.sounds is not None:
            return self.sounds[1]
        if mask is None:
            raise ValueError(
                f"{stage.name} needs attention_mask [b, s], to know which positions are the "
                "encoder's; stage.completed(batch) of the first stage makes one"
            )
        return mask.shape[1]

    def _through(
        self,
        stage: Stage,
        inputs: Mapping[str, Any],
        encoded: Tensor | None,
        decoded: Tensor | None,
    ) -> Any:
        """Output of the forward from what crossed the cut on, or of the stage's last block."""
        layout, count = self.layout, self.num_encoder
        ours = self._beside(stage)
        inputs = dict(inputs)
        if encoded is not None and decoded is not None:
            for name in layout.before:
                of_decoder = name.startswith(f"{layout.lists[1].rpartition('.')[0]}.")
                value = decoded if of_decoder else encoded
                ours[name] = in_place_of(stage.original.get_submodule(name), value)
            inputs["decoder_inputs_embeds"] = decoded
            if self.start > count:
                inputs["encoder_outputs"] = (encoded,)
            elif self.sounds is None:
                inputs["inputs_embeds"] = encoded
            else:  # it is asked for its size
                inputs[_main(stage.original)] = in_shape(encoded, self.sounds[0])
        encoder, decoder = layout.lists
        if self.start <= count:
            ours[encoder] = self._blocks(stage, range(self.start, min(self.stop, count)), encoded)
        if self.stop > count:
            ours[decoder] = self._blocks(stage, range(max(self.start, count), self.stop), decoded)
        return self._call(stage, ours, inputs)

    def _embedded(self, stage: Stage, inputs: Mapping[str, Any], encoded: Tensor) -> Tensor:
        """Input of the decoder's first block, made on the first stage."""
        ours = self._beside(stage)
        block = stage.original.get_submodule(self.layout.blocks[self.num_encoder])
        ours[self.layout.lists[1]] = nn.ModuleList([_Asking(block)])
        given: Tensor = self._call(stage, ours, {**inputs, "encoder_outputs": (encoded,)})
        return given

    def _call(self, stage: Stage, ours: Mapping[str, nn.Module], inputs: Mapping[str, Any]) -> Any:
        model = copied(self.layout.lm, stage, ours, _without_cache)
        if self.last:  # buffers of the model itself go where the head is
            held = stage.get_submodule(self.layout.lm)._buffers
            vars(model)["_buffers"] = {name: held[name] for name in model._buffers}
        try:
            result = model(**inputs, use_cache=False, return_dict=True)
        except Reached as reached:
            return reached.output
        output = output_of(result)
        return result if output is None else output

    def _beside(self, stage: Stage) -> dict[str, nn.Module]:
        """Modules of this stage that are no blocks, by name."""
        blocks = set(self.layout.blocks)
        names = (*stage.block_names, *self.layout.everywhere)
        return {name: stage.get_submodule(name) for name in names if name not in blocks}

    def _blocks(self, stage: Stage, numbers: range, received: Tensor | None) -> nn.ModuleList:
        """The stage's blocks of one part: the first is given what crossed the cut."""
        names = [self.layout.blocks[i] for i in numbers]
        in_decoder = numbers.stop > self.num_encoder
        if not names:
            assert received is not None
            like = stage.original.get_submodule(self.layout.blocks[numbers.start - 1])
            returned = self.returned[in_decoder]
            beside = [None] * ((returned or 1) - 1)
            passed = received if returned is None else (received, *beside)
            return nn.ModuleList([Passing(like, passed)])
        blocks: list[nn.Module] = [stage.get_submodule(name) for name in names]
        if received is not None:
            blocks[0] = Given(blocks[0], {0: received})
        if numbers.stop == self.stop and not self.last:
            at_the_head = self.stop == len(self.layout.blocks)
            ends = _EndingBoth if in_decoder and not at_the_head else Ending
            blocks[-1] = ends(blocks[-1])
        return nn.ModuleList(blocks)


def _main(model: nn.Module) -> str:
    """Name of what the encoder reads."""
    inner: Any = unwrapped(model)[1]
    return str(inner.main_input_name)


class _Asking(Wrapped):
    """A block of another stage, in whose place the forward ends with what it would be given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise Reached(_given(self.inside, args, kwargs)["hidden_states"])


class _EndingBoth(Wrapped):
    """A block of the decoder after which the forward ends, with what it read and what it gives."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inside(*args, **kwargs)
        read = _given(self.inside, args, kwargs)["encoder_hidden_states"]
        raise Reached(torch.cat([read, output[0] if isinstance(output, tuple) else output], 1))


class _Stopping(nn.Module):
    """In place of all but the head: ends the forward with the decoder's tokens."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.__dict__["_like"] = like  # no child: nothing of it is computed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise Reached(_given(self.__dict__["_like"], args, kwargs)["decoder_input_ids"])


def _shifted(lm: Any, labels: Tensor) -> Tensor:
    """Tokens of the decoder [b, t] that a model makes of its labels."""
    modules = {**lm._modules, lm.base_model_prefix: _Stopping(lm.base_model)}
    shell = copy.copy(lm)
    vars(shell)["_modules"] = modules
    try:
        shell(**{lm.main_input_name: labels}, labels=labels, use_cache=False, return_dict=True)
    except Reached as reached:
        return reached.output
    raise AssertionError("the forward goes through the model below the head")


def _given(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of a call by name."""
    while isinstance(block, Wrapped):
        block = block.inside
    return inspect.signature(block.forward).bind(*args, **kwargs).arguments


def _without_cache(config: Any) -> Any:
    own = copy.copy(config)
    own.use_cache = False
    return own
