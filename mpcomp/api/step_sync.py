"""The end of a step: one decision, for all stages and all replicas.

What links noted in a step is stored if the step was finite everywhere, and else forgotten
everywhere. Ranks find out in one sum, which also takes the loss to all of them, and the counts of
bytes::

    [stopped, loss, its dtype, wire bytes, dense bytes, elements, a flag for each link that saw NaN
     or Inf, what adaptive links have measured, sums over copies that must be equal]
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpcomp.api.equal_copies import EqualCopies
from mpcomp.comm.mesh import Mesh
from mpcomp.core.checks import nonfinite_error, nonfinite_loss_error
from mpcomp.core.loss import StepLoss
from mpcomp.core.sent import Sent
from mpcomp.core.step import Step
from mpcomp.links.adaptation import Adaptation
from mpcomp.links.boundary import Boundary
from mpcomp.links.link import Link
from mpcomp.links.tied_weights import TiedWeights

__all__ = ["StepResult", "finish_step", "raise_if_nonfinite", "sent_by"]

#: Dtypes of a loss, by the number that ranks exchange.
_LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StepResult:
    """A finished step, as all ranks know it.

    Attributes:
        finite: whether its updates were stored.
        loss: the step's, over all replicas, 0-d; None if there was none to ask for.
        sent: in training so far, by all ranks.
    """

    finite: bool
    loss: Tensor | None
    sent: Sent


def finish_step(
    mesh: Mesh,
    boundaries: Sequence[Boundary | TiedWeights],
    step: Step,
    loss: StepLoss | None,
    overflowed: bool,
    adaptation: Adaptation,
    began: float,
    copies: EqualCopies,
) -> StepResult:
    """Ends a step: all ranks commit what links noted, or all discard it.

    Args:
        mesh: the ranks.
        boundaries: the cuts, and the ties.
        step: the step.
        loss: its loss, if it was computed here or elsewhere.
        overflowed: whether a loss scaler will skip it because of this rank's gradients.
        adaptation: of the adaptive links, which decide for the next step.
        began: when the step did, on the scale of `time.perf_counter`.
        copies: what must be the same in several places.

    Raises:
        RuntimeError: copies have come apart.
        FloatingPointError: NaN or Inf at a cut or in the loss (in a gradient, and in the loss, only
            without a loss scaler).
    """
    links = [link for boundary in boundaries for link in boundary.links]
    broken = [float(link.found_nonfinite(train=True)) for link in links]
    failed = any(boundary.failed for boundary in boundaries)  # and has raised its error
    total = loss.total if loss is not None else None
    alone = mesh.num_ranks == 1  # then nobody needs the loss as a number, which waits for a GPU
    own_loss = [0.0, 0.0]
    if total is not None and not alone:
        own_loss = [float(total), _LOSS_DTYPES.index(total.dtype)]
    measured = adaptation.figures(time.perf_counter() - began)
    compared = copies.figures(step)
    sums = mesh.all_reduce_sum(
        [float(failed or overflowed), *own_loss, *sent_by(links), *broken, *compared, *measured]
    )
    stopped, value, dtype, wire_bytes, dense_bytes, elements, *rest = sums
    flags, rest = rest[: len(links)], rest[len(links) :]
    compared, measured = rest[: len(compared)], rest[len(compared) :]
    copies.check(step, compared)
    found = [link for link, flag in zip(links, flags, strict=True) if flag]
    # Where the first stages are frozen, no gradient crosses a cut to show it.
    lost = loss is not None and not step.scaled and not _is_finite(total if alone else value)
    finite = not (found or stopped or lost)
    for boundary in boundaries:
        boundary.finish_step(finite)
    if found and not (step.scaled and all(link.direction != "act" for link in found)):
        raise nonfinite_error(_origin(found).name, step.index)
    if lost:
        raise nonfinite_loss_error(step.index)
    adaptation.finish_step(step, measured, finite=finite)
    if not step.index & (step.index + 1):  # after 1, 2, 4, ... steps, as an accelerator waits
        for link in links:
            link.warn_of_error(link.meter.train)
            link.warn_of_lag(link.meter.train)
    if loss is not None and not alone:
        replicas = mesh.num_replicas
        of_dtype = _LOSS_DTYPES[int(dtype) // replicas]
        total = torch.tensor(value / replicas, dtype=of_dtype, device=mesh.device)
    return StepResult(finite, total, Sent.of((wire_bytes, dense_bytes, elements)))


def raise_if_nonfinite(mesh: Mesh, links: Sequence[Link], step: int) -> None:
    """For inference, where one rank saw what all must raise, or an accelerator saw it later."""
    flags = [float(link.found_nonfinite(train=False)) for link in links]
    if mesh.num_ranks > 1:
        flags = mesh.all_reduce_sum(flags)
    for link, flag in zip(links, flags, strict=True):
        if flag:
            raise nonfinite_error(link.name, step)
    for link in links:
        link.warn_of_error(link.meter.eval)


def sent_by(links: Sequence[Link]) -> Sent:
    """All that this rank has sent in training."""
    return sum((link.meter.train.sent for link in links), Sent())


def _is_finite(loss: Tensor | float | None) -> bool:
    return loss is None or math.isfinite(float(loss))


def _origin(found: Sequence[Link]) -> Link:
    """The link where non-finite values began: activations take them on, gradients back."""
    activations = [link for link in found if link.direction == "act"]
    return activations[0] if activations else found[-1]
