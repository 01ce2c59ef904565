"""Embeddings that a pipeline cannot train as the plain model does: refused when it is built."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import stages as staging
from mpcomp.core.embeddings import check_dense_gradients, check_max_norm, check_whole_batches

__all__ = ["check_embeddings"]


def check_embeddings(
    model: nn.Module, cut: Sequence[staging.Stage], *, chunks: int, replicas: int
) -> None:
    """Raises ValueError for an embedding that would not train as in the plain model.

    Args:
        model: that was cut.
        cut: all stages.
        chunks: microbatches.
        replicas: number of them.
    """
    tied = {name for tie in staging.ties(cut) for _, name in tie}
    shared = {name for names in staging.shared_parameters(model) for name in names} - tied
    check_dense_gradients(model, "the exchange of a weight that two stages share", tied)
    check_max_norm(
        model, "two stages share its weight, and the other copy would stay as it was", tied
    )
    if chunks > 1:
        check_max_norm(
            model,
            "another layer has its weight too, and would find rows that later microbatches look up "
            "as they were; chunks=1 is right",
            shared,
        )
    if chunks * replicas > 1:
        check_whole_batches(model, chunks * replicas)
    if replicas > 1:
        check_dense_gradients(model, "the mean over replicas")
        check_max_norm(model, "replicas look up different rows, and would come apart")
