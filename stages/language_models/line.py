"""A model of transformers as a line of blocks, cut between them without tracing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from stages.hints import nearest
from stages.language_models.buffers import fill_buffers
from stages.language_models.layout import Layout, layout_of, unwrapped
from stages.stage import Piece, Run, Stage


class BlockLine(ABC):
    """A model of transformers as `split` sees it: units are its blocks.

    The first has the embeddings with it, the last the final norm and the head.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout: Layout = self._lay_out()
        self.units = list(self.layout.blocks)
        self.places = list(range(1, len(self.units)))
        #: Before the final norm and the head.
        self.head_place: int | None = len(self.units)

    def _lay_out(self) -> Layout:
        """Places in the model."""
        return layout_of(self.model)

    @property
    def read_by_all(self) -> list[str]:
        """Parameters that all blocks read, and that are trained in each stage's copy."""
        return [
            f"{module}.{name}"
            for module in self.layout.read_by_all
            for name, parameter in self.model.get_submodule(module).named_parameters()
            if parameter.requires_grad
        ]

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
        layout, bounds = self.layout, [0, *places, len(self.units)]
        pieces: list[Piece] = []
        for start, stop in pairwise(bounds):
            first, last = start == 0, len(pieces) == len(places)
            names = (
                *((*layout.before, *layout.read_by_all) if first else ()),
                *layout.blocks[start:stop],
                *(layout.after if last else ()),
            )
            run = self.run(start, stop, first=first, last=last)
            copied = (*layout.everywhere, *(() if first else layout.read_by_all))
            pieces.append(Piece(names, (), run, copied=copied))
        return pieces

    @abstractmethod
    def run(self, start: int, stop: int, *, first: bool, last: bool) -> Run:
        """The code of a stage with blocks ``start`` to ``stop`` - 1."""

    @abstractmethod
    def check(self, stages: Sequence[Stage]) -> None:
        """Raise ValueError if the stages do not give what the model gives."""

    def fill_buffers(self) -> None:
        """Give a model on "meta" the buffers that its configuration says; no file has them."""
        fill_buffers(unwrapped(self.model)[1])


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


def difference(
    stages: Sequence[Stage], batch: Mapping[str, Tensor], expected: Tensor
) -> Exception | None:
    """Why stages do not give the expected output for a batch; None if they do."""
    try:
        value = stages[0](**batch)
        for stage in stages[1:]:
            value = stage(value, **stage.takes(batch))
    except Exception as error:  # anything at all: the code was not written to be run in parts
        return error
    return None if torch.equal(value, expected) else ValueError("other numbers")
