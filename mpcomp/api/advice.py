"""Advice at the start: warnings of a cut, of threads, of layers that are probably not meant so.

Nothing here is an error. Each warning names its numbers and what to do about them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn

import stages as staging
from mpcomp.core.threads import num_cores
from stages.hints import listing

__all__ = [
    "advise_on_cut",
    "advise_on_sequences",
    "advise_on_threads",
    "advise_on_ties",
    "advise_on_weights",
    "num_cores",
]

#: Times its share of the parameters that a stage may hold without a word; of two stages, 7/8.
_SHARE = 1.75


def advise_on_cut(model: nn.Module, cut: Sequence[staging.Stage]) -> None:
    """Warns if one stage has far more than its share of the parameters.

    It is for cuts that were chosen by a number of stages: whoever names blocks has chosen.

    Args:
        model: that was cut.
        cut: all stages.
    """
    sizes = [sum(p.numel() for p in stage.parameters()) for stage in cut]
    if cut[0].together:  # the last stage is where the first is
        sizes[0] += sizes.pop()
    total, largest = sum(sizes), max(sizes)
    if largest * len(sizes) <= _SHARE * total:
        return
    stage = cut[sizes.index(largest)]
    units = [unit.name for unit in staging.blocks(model)]
    warnings.warn(
        f"{stage.name} has {largest / total:.0%} of all parameters, where {1 / len(sizes):.0%} "
        f"would be its share of {len(sizes)} stages: the other stages will wait for it. This model "
        f"can be cut after {listing(units[:-1])}; what lies between is one unit. Cut it into fewer "
        "stages, name blocks inside the large one (split=[...]), rewrite that as an "
        "nn.Sequential, or balance by measured time (split='time', sample=x)",
        stacklevel=4,
    )


def advise_on_ties(cut: Sequence[staging.Stage]) -> None:
    """Warns if two stages have copies of a weight whose both uses could not be put on one rank.

    Args:
        cut: all stages.
    """
    if not cut[0].why_apart:
        return
    names = " and ".join(name for _, name in staging.ties(cut)[0])
    warnings.warn(
        f"{names} are one weight that two stages use. They exchange its gradient in each step, as "
        f"both uses cannot be on one rank: {cut[0].why_apart}. See tie_comp for fewer bytes; "
        "ties='apart' says that you know",
        stacklevel=4,
    )


def advise_on_threads(local_ranks: int) -> None:
    """Warns if this machine's cores have more threads to run than they can.

    Threads of one operation wait for each other: where cores are shared, a step can take a hundred
    times as long. Whoever has set OMP_NUM_THREADS has chosen, and one thread waits for no other.

    Args:
        local_ranks: processes of this run on this machine.
    """
    threads, cores = torch.get_num_threads(), num_cores()
    if "OMP_NUM_THREADS" in os.environ or threads == 1:
        return
    share = max(1, cores // local_ranks)
    cure = (
        "Set OMP_NUM_THREADS={} before the start, or call torch.set_num_threads({}): threads "
        "that wait for each other on shared cores can make a step many times slower"
    )
    if local_ranks > 1 and threads * local_ranks > cores:
        warnings.warn(
            f"{local_ranks} ranks of {threads} threads each on {cores} cores. "
            + cure.format(share, share),
            stacklevel=4,
        )
        return
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores:
        warnings.warn(
            f"other processes keep this machine busy (load {load:.0f} on {cores} cores), and torch "
            f"would run {threads} threads here. " + cure.format(1, 1),
            stacklevel=4,
        )


def advise_on_sequences(model: nn.Module) -> None:
    """Warns if the model has a recurrent or attention layer that takes sequences first.

    It is torch's default, ``batch_first=False``. Such a model is right if it transposes before the
    layer, which nobody can tell from outside, and so this is no error.

    Args:
        model: to be cut.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
    }
    if not found:
        return
    name, module = next(iter(found.items()))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    warnings.warn(
        f"{name or 'the model'} ({type(module).__name__}){more} has batch_first=False: its dim 0 "
        "is time, and microbatches are cut along dim 0, whose entries must be samples. Pass "
        "batch_first=True and batches [rows, time, features]. If the model transposes before "
        "this layer, and takes rows first itself, all is well",
        stacklevel=4,
    )


def advise_on_weights(of_ranks: Sequence[Mapping[str, int | None]]) -> None:
    """Warns if ranks of a pipeline have built models with other weights.

    Data parallel scripts may load a checkpoint on one rank alone, as its weights are sent to the
    others. Here each rank trains stages of the model that it has built itself.

    Args:
        of_ranks: of each rank, a number for the weights of each stage, by the stage's name; None
            where the rank has no values.
    """
    for name in of_ranks[0] if of_ranks else ():
        known = {rank: each[name] for rank, each in enumerate(of_ranks) if each[name] is not None}
        other = [rank for rank, number in known.items() if number != next(iter(known.values()))]
        if other:
            warnings.warn(
                f"rank {next(iter(known))} and rank {other[0]} have built different models: {name} "
                "has other weights. Each rank trains its stages of its own model. Load weights "
                "on all ranks, not on one, and call torch.manual_seed with the same number on all "
                "of them before the model is made",
                stacklevel=4,
            )
            return
