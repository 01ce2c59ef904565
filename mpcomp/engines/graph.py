"""Questions to the graph that autograd has recorded."""

from __future__ import annotations

from torch import Tensor

__all__ = ["depends"]


def depends(output: Tensor, value: Tensor) -> bool:
    """Whether a gradient of an output may reach a value.

    Args:
        output: with its graph.
        value: a leaf of it, or of another.
    """
    if not value.requires_grad:
        return False
    seen, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is value:  # that gathers its gradient
            return True
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return False
