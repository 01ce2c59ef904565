"""The gain that is measured by the loss: what compressing one link more or less makes of it.

Where a link decides for itself, all others are dense. Where links share a budget, the others send
as they do: what a byte is worth to one depends on what the others leave out, and a model that has
been trained through compression may be far from anything it has learned without any.

Forward passes of one microbatch beside training, in training mode: with the step's own dropout, on
copies of BatchNorm's statistics, without gradients. Nothing but the loss is kept of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from mpcomp.core.loss import LossFn, num_terms
from mpcomp.core.microbatch import map_tensors, num_rows
from mpcomp.core.step import Probe, Step
from mpcomp.engines.base import Engine
from mpcomp.engines.stage_runner import frozen_buffers
from mpcomp.links.adaptation import Adaptation

__all__ = ["measure_losses"]


def measure_losses(
    adaptation: Adaptation,
    engine: Engine,
    stages: Iterable[nn.Module],
    microbatches: Sequence[Any],
    targets: Sequence[Any],
    step: Step,
    loss_fn: LossFn,
    *,
    compares: bool,
) -> None:
    """Measures, for links that want it in this step; every rank makes the same passes.

    Args:
        adaptation: of the pipeline.
        engine: runs the passes.
        stages: those of this rank.
        microbatches: of the step; one of them is used.
        targets: of these.
        step: the step to come.
        loss_fn: of training.
        compares: whether all ranks have the batch, and compare it.
    """
    due = adaptation.measuring(step)
    if not due:
        return
    chosen = step.index % len(microbatches)
    batch, target = microbatches[chosen], targets[chosen]
    beside = replace(
        step,
        train=False,
        num_microbatches=1,
        sample_ids=(),
        valid=(step.valid[chosen],) if step.valid else (),
    )

    @cache  # most links share the pass in which nothing is changed
    def loss_with(probe: Probe) -> float:
        same = (batch,) if compares else ()
        outputs = engine.forward([batch], replace(beside, probe=probe), same)
        if not outputs or not num_terms(loss_fn, target, num_rows(batch)):
            return 0.0  # the mean over nothing is NaN
        on_device = map_tensors(target, lambda t: t.to(outputs[0].device))
        return float(loss_fn(outputs[0], on_device))

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for stage in stages:
            stack.enter_context(frozen_buffers(stage))
        for link, state in due:
            alone = state.method.budget is None
            without = loss_with(Probe(alone=alone))
            losses = [loss_with(Probe(link.name, cf, alone)) for cf in state.cfs]
            state.note_losses(without, losses)
