"""The finest units at which a model may be cut."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stages.chain import Chain, expand, is_compiled, is_plain
from stages.containers import has_hooks
from stages.encoder_decoders import EncoderDecoder
from stages.encoders import Encoder, is_encoder
from stages.graph import Trace
from stages.language_models import Decoder, is_causal_lm, is_encoder_decoder, is_pretrained
from stages.stage import Origin, Piece, Stage


@dataclass(frozen=True)
class Block:
    """A unit of a model: its qualified name, and a module from one tensor to one tensor."""

    name: str
    module: nn.Module


class Line(Protocol):
    """A model as a line of units that can be cut at places.

    It is a `Chain`, `Decoder`, `Encoder`, `EncoderDecoder` or `Trace`.
    """

    units: list[str]
    places: list[int]
    head_place: int | None  # inside the last unit, if it can be cut once more

    def place(self, name: str) -> int: ...

    def pieces(self, places: Sequence[int]) -> list[Piece]: ...


def line_of(model: nn.Module, names: Sequence[str] = ()) -> Line:
    """Lay `model` out as a line; `names` are blocks that must not be hidden inside others."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"got a {type(model).__name__} as the model; accepted is an nn.Module")
    if is_compiled(model):
        raise ValueError(
            "the model is compiled (torch.compile), and a cut goes through the middle of what was "
            "compiled as one; cut the model itself, and compile its blocks in place before: "
            "for block in model.layers: block.compile()"
        )
    if has_hooks(model):
        raise ValueError(
            f"{type(model).__name__} has hooks on the model itself, which no stage would run; "
            "register them on a block, or remove them before splitting"
        )
    if is_causal_lm(model):
        return Decoder(model)
    if is_encoder_decoder(model):
        return EncoderDecoder(model)
    if is_plain(model):
        return Chain(model)
    if is_pretrained(model) and is_encoder(model):
        return Encoder(model)
    return Trace(model, names)


def blocks(model: nn.Module, sample: object = None) -> list[Block]:
    """Return the finest units at which `model` may be cut, in order.

    A plain `nn.Sequential` gives its children, nested plain ones expanded. A model with a forward
    of its own gives the segments between the calls after which one tensor is alive, each as a
    `Stage` named for the last block in it.

    Args:
        model: any module.
        sample: an input (tensor, tuple of arguments or mapping of keywords) on which to check
            that every block gives one tensor. The model stays as it is.

    Raises:
        ValueError: The model cannot be traced.
        TypeError: A block gives something else than one tensor.
    """
    units = units_of(model, line_of(model))
    if sample is not None:
        activations(units, sample)
    return units


def units_of(model: nn.Module, line: Line, *, with_head: bool = False) -> list[Block]:
    """Return the units of a line, and after them a head that the last one can be cut from."""
    if isinstance(line, Chain):
        return [Block(name, module) for name, module in expand(model)]
    names, places = list(line.units), list(line.places)
    if with_head and line.head_place is not None:
        names, places = [*names, "head"], [*places, line.head_place]
    origin = Origin(model, len(names))
    stages = [Stage(origin, i, piece) for i, piece in enumerate(line.pieces(places))]
    return [Block(name, stage) for name, stage in zip(names, stages, strict=True)]


def activations(units: Sequence[Block], sample: object) -> list[Tensor]:
    """Return the output of every block for `sample`, leaving blocks and random state alone."""
    args, kwargs = arguments(sample)
    outputs: list[Tensor] = []
    with random_state_kept(), torch.no_grad():
        for unit in units:
            if outputs:
                args, kwargs = (outputs[-1],), side_inputs(unit, sample)
            output: object = copy.deepcopy(unit.module)(*args, **kwargs)
            outputs.append(one_tensor(unit, output))
    return outputs


def random_state_kept() -> AbstractContextManager[None]:
    """Put the random state of the CPU and of every GPU back at the end."""
    # Said explicitly, as fork_rng warns when it finds several GPUs by itself.
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


def arguments(sample: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a sample as positional and keyword arguments."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (sample if isinstance(sample, tuple) else (sample,)), {}


def side_inputs(unit: Block, sample: object) -> dict[str, Any]:
    """Inputs that a unit after the first takes from the sample beside the activation."""
    return unit.module.takes(sample) if isinstance(unit.module, Stage) else {}


def one_tensor(unit: Block, output: object) -> Tensor:
    """Return `output`, the result of `unit`, if it is one tensor; raise TypeError if not."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"block {unit.name!r} returned a {type(output).__name__}; accepted is one tensor. Wrap "
            "the block in a module that returns only the tensor"
        )
    return output
