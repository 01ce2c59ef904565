"""An encoder of transformers, with its head or without, as a line of blocks that can be cut."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stages.encoders.loss import HeadLoss
from stages.encoders.run import EncoderRun, inputs_of, output_of
from stages.hints import listing
from stages.language_models.layout import Layout, is_encoder_decoder, unwrapped
from stages.language_models.line import BlockLine, difference, evaluation
from stages.stage import Run, Stage, ancestors

#: Of what is tried, where a configuration says nothing.
_IMAGE_SIZE = 64
#: Of sounds, for a position of Whisper's encoder.
_FRAMES = 2


def is_encoder(model: nn.Module) -> bool:
    """Whether a model of transformers has inputs under their names, as those of the library have.

    A trace of such a forward would hold its input at its default, which is None.
    """
    inner: Any = unwrapped(model)[1]
    parameters = inspect.signature(inner.forward).parameters
    main = parameters.get(inner.main_input_name)
    return main is not None and main.default is None


class Encoder(BlockLine):
    """A model of transformers that is no language model: an encoder of texts or images."""

    def __init__(self, model: nn.Module) -> None:
        self._inner: Any = unwrapped(model)[1]
        if getattr(self._inner.config, "num_hidden_groups", 0):
            raise ValueError(
                f"{type(self._inner).__name__} has the same weights in all its layers. Each stage "
                "would need all of them, and their gradients an exchange as large; train it whole "
                "in replicas with mpcomp.compress_gradients"
            )
        super().__init__(model)
        self._refuse_loose_weights()
        self._batch = batch_for(self._inner)
        self._hears = "input_features" in self._batch
        self._tried = Trial(model, self.layout)
        with self._tried.watching():
            self._expected = self._run_once()
            read = self._tried.read_beside()
        self._arrange(read)
        self.own_loss: HeadLoss | None = None
        if HeadLoss.names(self._inner) is not None:
            self.own_loss = HeadLoss(self._inner.config)

    def run(self, start: int, stop: int, *, first: bool, last: bool) -> Run:
        """The code of a stage with blocks ``start`` to ``stop`` - 1."""
        tried = self._tried
        return EncoderRun(
            self.layout,
            start,
            stop,
            first,
            last,
            returned=tried.returned[-1],
            embedded=tried.embedded,
            numbers=tuple(tried.numbers[start:stop]),
            pixels=tuple(self._batch["pixel_values"].shape[1:]) if tried.has_numbers else None,
            sounds=tuple(self._batch["input_features"].shape[1:]) if self._hears else None,
        )

    def check(self, stages: Sequence[Stage]) -> None:
        """Raise ValueError if the stages do not give what the model gives for a few inputs."""
        if self._expected.is_meta:
            return
        with evaluation(self._inner, *stages), torch.enable_grad():  # as it was tried
            error = difference(stages, self._batch, self._expected)
        if error is not None:
            raise ValueError(
                f"{type(self._inner).__name__} cannot be cut like this: its stages do not give "
                f"what it gives ({error}), so its forward hands more from block to block than one "
                "tensor; write it as an nn.Sequential of blocks that do not, or train it whole in "
                "replicas with mpcomp.compress_gradients"
            ) from error

    def _run_once(self) -> Tensor:
        """Output of the model for a few inputs."""
        name = type(self._inner).__name__
        try:
            with evaluation(self._inner), torch.enable_grad():
                result = self._inner(**self._batch, return_dict=True)
        except Exception as error:  # anything at all can be in a model's forward
            raise ValueError(
                f"{name} cannot be cut: with {listing(self._batch)} alone it does not run "
                f"({type(error).__name__}: {error}). Write an nn.Sequential of its embeddings, "
                "layers and head, or train it whole in replicas with mpcomp.compress_gradients"
            ) from error
        output = output_of(result)
        if output is None:
            raise ValueError(
                f"{name} gives {listing(result)}, and the last stage gives one tensor: logits, "
                "start and end of an answer, or last_hidden_state; cut a model with one head"
            )
        return output.detach()

    def _arrange(self, read: Sequence[str]) -> None:
        """Let what is called before the first block be before it, wherever a class names it.

        Args:
            read: names of parameters that blocks read beside the activation.
        """
        layout, at = self.layout, self._tried.called_at
        both = (*layout.before, *layout.after)
        before = [n for n in both if at.get(n, n in layout.after) == 0]
        self.layout = replace(
            layout, before=tuple(before), after=tuple(n for n in both if n not in before)
        )
        if read:
            self._let_all_read(read)

    def _refuse_loose_weights(self) -> None:
        """Raise ValueError for weights that stand beside the blocks in no module of their own."""
        around = [parent for name in self.layout.lists for parent in ancestors(name)[:-1]]
        for name in dict.fromkeys((self.layout.lm, *around)):
            module = self.model.get_submodule(name)
            if own := [key for key, value in module._parameters.items() if value is not None]:
                raise ValueError(
                    f"{type(self._inner).__name__} cannot be cut: {name or 'the model'} "
                    f"({type(module).__name__}) has {listing(own)} itself, beside its modules, and "
                    "no stage would own that; put it into a module of its own"
                )

    def _let_all_read(self, names: Sequence[str]) -> None:
        """Give each stage a copy of the modules beside the blocks whose weights all blocks read.

        Raises:
            ValueError: Some of the weights are in a block, or far from them.
        """
        layout = self.layout
        beside = {
            name: parent
            for name in names
            for parent in ancestors(name)
            if parent.rpartition(".")[0] == layout.holder and parent not in layout.blocks
        }
        list_name = layout.blocks[0].rpartition(".")[0]
        if bad := [name for name in names if beside.get(name, list_name) == list_name]:
            raise ValueError(
                f"{type(self._inner).__name__} cannot be cut: {listing(bad)} gives the blocks "
                "something to read beside the one tensor that crosses a cut. Write it as an "
                "nn.Sequential of blocks that compute this themselves, or train it whole in "
                "replicas with mpcomp.compress_gradients"
            )
        modules = tuple(dict.fromkeys(beside.values()))
        self.layout = replace(
            layout,
            before=tuple(name for name in layout.before if name not in modules),
            after=tuple(name for name in layout.after if name not in modules),
            read_by_all=modules,
        )


def check_head_loss(model: nn.Module) -> None:
    """Raise ValueError if a model's own loss is another than `HeadLoss`, on a few inputs.

    A model on "meta" has no numbers to compare.
    """
    inner: Any = unwrapped(model)[1]
    batch = batch_for(inner)
    with evaluation(inner):
        output = output_of(inner(**batch, return_dict=True))
    assert output is not None, "it has been cut"
    if not output.is_meta:
        HeadLoss(inner.config).check(inner, batch, output)


@dataclass
class Trial:
    """Calls of a model's modules, seen while it runs once.

    Attributes:
        returned: of each block, values that it returns in a tuple; None if it returns a tensor.
        embedded: what modules before the blocks return beside the activation, by name.
        numbers: sizes that each block is given beside it, by their places.
        called_at: by name of a module beside the blocks, how many blocks had run at its first call.
        beside: tensors that blocks are given beside the activation.
        encoded: output of an encoder that a decoder's blocks may read, as it crosses cuts.
    """

    model: nn.Module
    layout: Layout
    returned: list[int | None] = field(default_factory=list)
    embedded: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    numbers: list[dict[int, Any]] = field(default_factory=list)
    called_at: dict[str, int] = field(default_factory=dict)
    beside: list[Tensor] = field(default_factory=list)
    encoded: list[Tensor] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at each call; all weights take gradients."""
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        with ExitStack() as stack:
            for parameter in frozen:
                if parameter.is_floating_point():
                    parameter.requires_grad_()
                    stack.callback(parameter.requires_grad_, False)
            for name in self.layout.blocks:
                block = self.model.get_submodule(name)
                stack.callback(
                    block.register_forward_pre_hook(self._given, with_kwargs=True).remove
                )
                stack.callback(block.register_forward_hook(self._gave).remove)
            for name in (*self.layout.before, *self.layout.after):
                hook = partial(self._called, name)
                stack.callback(self.model.get_submodule(name).register_forward_hook(hook).remove)
            yield

    @property
    def has_numbers(self) -> bool:
        """Whether blocks are given sizes, which follow from the size of the images."""
        return any(self.numbers)

    def read_beside(self) -> list[str]:
        """Names of parameters that make what blocks are given beside the activation.

        All weights must take gradients.
        """
        tensors = [
            x for x in self.beside if x.requires_grad and all(x is not y for y in self.encoded)
        ]
        if not tensors:
            return []
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        with torch.enable_grad():
            total = torch.stack([x.sum() for x in tensors]).sum()
        found = torch.autograd.grad(total, parameters, allow_unused=True)
        return [name for name, g in zip(names, found, strict=True) if g is not None]

    def _given(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = {name: value for name, value in kwargs.items() if args or name != "hidden_states"}
        self.beside += [x for x in tree_leaves((args[1:], rest)) if isinstance(x, Tensor)]
        self.numbers.append({i: x for i, x in enumerate(args) if _is_size(x)})

    def _gave(self, block: nn.Module, args: object, output: object) -> None:
        self.returned.append(len(output) if isinstance(output, tuple) else None)

    def _called(self, name: str, module: nn.Module, args: object, output: object) -> None:
        self.called_at.setdefault(name, len(self.numbers))
        if isinstance(output, tuple):
            self.embedded[name] = tuple(None if isinstance(x, Tensor) else x for x in output[1:])


def _is_size(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(x, int) for x in value)


def batch_for(model: Any) -> dict[str, Tensor]:
    """Two rows of a few inputs: tokens, of which some are padding, pixels or features of sounds."""
    device, config = next(model.parameters()).device, model.config
    batch: dict[str, Tensor] = {}
    if model.main_input_name == "input_ids":
        batch = _tokens(model, 5, device)
    elif model.main_input_name == "pixel_values":
        config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", _IMAGE_SIZE)
        height, width = (size, size) if isinstance(size, int) else size
        batch["pixel_values"] = _numbers(model, (config.num_channels, height, width), device)
    elif model.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        frames = _FRAMES * config.max_source_positions
        batch["input_features"] = _numbers(model, (config.num_mel_bins, frames), device)
    else:
        raise ValueError(
            f"{type(model).__name__} cannot be cut: it takes {listing(inputs_of(model))}; of "
            "transformers' models those of tokens (input_ids), images (pixel_values) or Whisper's "
            "sounds (input_features) can. Write an nn.Sequential of its embeddings, layers and "
            "head, or train it whole in replicas with mpcomp.compress_gradients"
        )
    if is_encoder_decoder(model):  # of another length, so that nothing takes one for the other
        written = _tokens(model, 4, device)
        batch |= {f"decoder_{name}": value for name, value in written.items()}
        if device.type == "meta":  # of all pairs of tokens, as the model makes one of tokens
            batch["decoder_attention_mask"] = torch.zeros(2, 1, 4, 4, device=device)
    return batch


def _numbers(model: Any, row: Sequence[int], device: torch.device) -> Tensor:
    """Two rows of a size, from -1 to 1."""
    count = 2 * math.prod(row)
    return torch.linspace(-1, 1, count, device=device).reshape(2, *row).to(model.dtype)


def _tokens(model: Any, length: int, device: torch.device) -> dict[str, Tensor]:
    """Two rows of tokens; the end of the first is padding."""
    ids = torch.arange(1, 2 * length + 1, device=device).reshape(2, length)
    if device.type == "meta":  # code for masks asks for their values
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    padding = getattr(model.config, "pad_token_id", None)
    return {
        "input_ids": ids if padding is None else ids.masked_fill(mask == 0, padding),
        "attention_mask": mask,
    }
