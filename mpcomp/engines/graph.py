"""Questions to the graph that autograd has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["depends", "leaves"]


def leaves(output: Tensor, until: Any = None) -> Iterator[Tensor]:
    """The tensors that gather a gradient of an output, each once.

    Args:
        output: with its graph.
        until: a node of the graph behind which nothing is looked at; None for none.
    """
    seen: set[Any] = {None, until}
    left: list[Any] = [output.grad_fn]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        left += [following for following, _ in node.next_functions]


def depends(output: Tensor, value: Tensor) -> bool:
    """Whether a gradient of an output may reach a value.

    Args:
        output: with its graph.
        value: a leaf of it, or of another.
    """
    return value.requires_grad and any(leaf is value for leaf in leaves(output))
