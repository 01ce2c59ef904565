"""Plain chains: `nn.Sequential`s that do nothing but call their children in turn.

These need no tracing: their finest units are the children, nested plain chains expanded.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from stages.containers import has_hooks
from stages.hints import nearest
from stages.stage import Piece, Stage, ancestors


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` is what torch.compile gives for one, or was compiled in place."""
    wrapped = isinstance(getattr(module, "_orig_mod", None), nn.Module)
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def is_plain(module: nn.Module) -> bool:
    """Whether `module` is a `nn.Sequential` that may be replaced by its children."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
        and len(module) > 0
        and not has_hooks(module)
        and not is_compiled(module)
    )


def expand(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the finest units of a plain chain with their qualified names."""
    # Not named_children(): that leaves out a module the second time it appears.
    for name, child in model._modules.items():
        assert child is not None
        if is_plain(child):
            yield from expand(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


class Chain:
    """A plain chain as `split` sees it: units, the places after them, pieces between places."""

    def __init__(self, model: nn.Module) -> None:
        self.units = [name for name, _ in expand(model)]
        #: The place after each unit but the last, at which the chain may be cut.
        self.places = list(range(1, len(self.units)))
        self.head_place: int | None = None

    def place(self, name: str) -> int:
        """Return the place after the unit or container of that qualified name.

        Raises:
            ValueError: There is none, or nothing comes after it.
        """
        inside = [i for i, unit in enumerate(self.units) if name in ancestors(unit)]
        if not inside:
            for unit in self.units:
                if unit in ancestors(name):
                    raise ValueError(
                        f"cannot cut after {name!r}: it lies inside block {unit!r}, which is one "
                        f"unit; cut after {unit!r} or make that block a plain nn.Sequential"
                    )
            known = [parent for unit in self.units for parent in ancestors(unit)]
            raise ValueError(f"the model has no block {name!r}; {nearest(name, known)}")
        if inside[-1] == len(self.units) - 1:
            raise ValueError(
                f"cannot cut after {name!r}: it is the end of the model and would leave an empty "
                "stage; leave it out"
            )
        return inside[-1] + 1

    def pieces(self, places: Sequence[int]) -> list[Piece]:
        """Cut at these increasing places."""
        bounds = [0, *places, len(self.units)]
        return [Piece(tuple(self.units[i:j]), (), run_chain) for i, j in pairwise(bounds)]


def run_chain(stage: Stage, *args: Any, **kwargs: Any) -> object:
    """Call the blocks of `stage` in turn."""
    first, *rest = (stage.get_submodule(name) for name in stage.block_names)
    value: object = first(*args, **kwargs)
    for block in rest:
        value = block(value)
    return value
