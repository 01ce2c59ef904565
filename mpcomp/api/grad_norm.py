"""The norm of all stages' gradients, which no rank knows alone."""

from __future__ import annotations

import torch
from torch import Tensor

from mpcomp.api.pipeline import Pipeline

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    pipe: Pipeline, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clips the gradients of all stages by their common norm, in place, and returns the norm.

    Clipping acts on what the optimizer sees, after decompression; links' residuals stay in
    unclipped units. With a loss scaler call ``scaler.unscale_(optimizer)`` before. With several
    processes every rank calls it, and each gets the norm over all stages.

    Args:
        pipe: a pipeline.
        max_norm: largest norm allowed, above 0.
        norm_type: of the p-norm.
        error_if_nonfinite: raise if the norm is NaN or Inf.

    Raises:
        TypeError: something else than a pipeline.
        ValueError: max_norm is not positive; or it is called in an update within a step, in which
            no rank waits for another.
        RuntimeError: the norm is not finite, and that was to be an error.
        PeerError: another rank failed.
    """
    if not isinstance(pipe, Pipeline):
        raise TypeError(
            f"clip_grad_norm_ got a {type(pipe).__name__}: pass the pipeline itself, "
            "mpcomp.clip_grad_norm_(pipe, max_norm), as the norm is one over the stages of all "
            "ranks; a plain model's parameters are for torch.nn.utils.clip_grad_norm_"
        )
    if pipe.updating:
        raise ValueError(
            "clip_grad_norm_ in an update within a step: the norm over all stages would take every "
            "rank to the same point; clip each stage by its own norm, for stage in pipe.stages: "
            "torch.nn.utils.clip_grad_norm_(stage.parameters(), max_norm)"
        )
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}: expected a positive number")
    again = {name for tie in pipe.ties for _, name in tie.copies[1:]}  # counted once
    norms = {
        name: pipe.mesh.whole(
            torch.linalg.vector_norm(_values(parameter.grad), norm_type),
            "norms of other replicas' pieces",
        )
        for name, parameter in pipe.with_loss.named_parameters()
        if parameter.grad is not None and name not in again
    }
    names = [name for stage in pipe.cut_stages for name, _ in stage.named_parameters()]
    # Between two updates of `LocalSGD` each replica has gradients of its own.
    apart = pipe.exchange is not None and pipe.exchange.method.sync_schedule is not None
    # One norm of all norms, in the model's order: the same bits however the model is cut.
    found = pipe.mesh.gather_scalars(norms, names, apart=apart)
    norm: Tensor = torch.linalg.vector_norm(found, norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is non-finite ({norm.item()}): the "
            "model has diverged or overflowed; pass error_if_nonfinite=False to go on"
        )
    torch.nn.utils.clip_grads_with_norm_(pipe.with_loss.parameters(), max_norm, norm)
    pipe.note_gradients()
    return norm


def _values(grad: Tensor) -> Tensor:
    """The numbers of a gradient, of a sparse one those that are not zero."""
    return grad.coalesce().values() if grad.is_sparse else grad
