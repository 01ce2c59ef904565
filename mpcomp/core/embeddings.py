"""Embeddings with a mode that not every training can have.

``sparse=True`` gives gradients that are no dense tensors; ``max_norm`` has the forward pass change
the weights, those rows that the batch looks up; ``scale_grad_by_freq=True`` counts rows in a batch.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

__all__ = ["check_dense_gradients", "check_max_norm", "check_whole_batches"]


def _embeddings(module: nn.Module) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    kinds = nn.Embedding | nn.EmbeddingBag
    return [(name, each) for name, each in module.named_modules() if isinstance(each, kinds)]


def check_dense_gradients(
    module: nn.Module, what: str, names: Collection[str] | None = None
) -> None:
    """Refuses embeddings whose gradients are sparse.

    Args:
        module: has them.
        what: takes dense gradients alone, in words.
        names: of the weights that matter; None for all.

    Raises:
        ValueError: there is one that trains.
    """
    for name, each in _embeddings(module):
        concerned = names is None or _weight(name) in names
        if each.sparse and each.weight.requires_grad and concerned:
            raise ValueError(
                f"{name or 'the model'} is an {type(each).__name__}(sparse=True), and {what} takes "
                "dense gradients alone: write sparse=False"
            )


def check_max_norm(module: nn.Module, what: str, names: Collection[str] | None = None) -> None:
    """Refuses embeddings whose forward pass changes their weights.

    Args:
        module: has them.
        what: would come of it, in words.
        names: as of `check_dense_gradients`.

    Raises:
        ValueError: there is one.
    """
    for name, each in _embeddings(module):
        if each.max_norm is not None and (names is None or _weight(name) in names):
            raise ValueError(
                f"{name or 'the model'} has max_norm, by which its forward pass changes the rows "
                f"that it looks up: {what}. Leave max_norm out, and bound the norm of rows after "
                "the optimizer's step: torch.renorm(weight, 2, 0, max_norm)"
            )


def check_whole_batches(module: nn.Module, parts: int) -> None:
    """Refuses embeddings whose gradients depend on how often the batch has a row.

    Args:
        module: has them.
        parts: of a batch, each of which would count for itself.

    Raises:
        ValueError: there is one that trains.
    """
    for name, each in _embeddings(module):
        if each.scale_grad_by_freq and each.weight.requires_grad:
            raise ValueError(
                f"{name or 'the model'} has scale_grad_by_freq=True, and each of {parts} parts of "
                "a batch would count its own rows: leave it out, or train with chunks=1 and "
                "replicas=1"
            )


def _weight(name: str) -> str:
    return f"{name}.weight" if name else "weight"
