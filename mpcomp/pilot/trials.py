"""A pilot: methods tried at the cuts of a user's own pipeline, on its own data, and all undone.

Every method begins from the same weights and runs over the same batches, with the same dropout, so
that losses can be compared batch by batch. Its links are new ones, put in the place of the
pipeline's; where these have been put back, nothing is left of it (`mpcomp.pilot.undoing`).
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mpcomp.core.account import Account
from mpcomp.core.loss import pair_of
from mpcomp.core.traffic import Traffic
from mpcomp.engines.base import Engine
from mpcomp.links.boundary import Boundary
from mpcomp.links.build import boundaries_of
from mpcomp.monitor.payoff import CutTimes, RankTimes, Simulation
from mpcomp.monitor.step_costs import cut_times, stage_times
from mpcomp.pilot.comparison import Comparison, Trial, pairs_in_order
from mpcomp.pilot.undoing import Start, undone
from mpcomp.plan.known_quality import methods_of
from mpcomp.plan.network import FIRST_WINDOW, Network
from mpcomp.plan.planner import Pair

__all__ = ["MethodPair", "Pilot", "compare"]

#: A method for both directions, or one for activations and one for gradients.
MethodPair = str | tuple[str, str]


@dataclass(frozen=True)
class Pilot:
    """A pipeline, as a pilot needs it.

    Attributes:
        model: this rank's stages.
        boundaries: the cuts.
        engine: runs the stages.
        scaler: of losses, if any.
        is_language_model: whether it is a causal language model.
        forward_backward: as of the pipeline.
        swapped_links: gives a context in which other boundaries' links carry what crosses the cuts.
        step_times: of the last steps on this rank: seconds, and of these waiting.
        account: of all that the links which are there now have sent.
    """

    model: nn.Module
    boundaries: Sequence[Boundary]
    engine: Engine
    scaler: torch.amp.GradScaler | None
    is_language_model: bool
    forward_backward: Callable[..., Tensor]
    swapped_links: Callable[[Sequence[Boundary]], AbstractContextManager[None]]
    step_times: Callable[[], Iterable[tuple[float, float]]]
    account: Callable[[], Account]

    def new_boundaries(self, pair: Pair) -> list[Boundary]:
        """Boundaries with these methods that have sent nothing.

        Raises:
            ValueError, TypeError: no such methods, or two that do not go together.
        """
        names = [str(i) for i in range(len(self.boundaries))]
        return boundaries_of(*pair, names, seed=0, replica=0, warmup_steps=0)


@dataclass(frozen=True)
class _Run:
    """A run of one method, as all ranks have seen it.

    Attributes:
        losses: of each batch.
        failure: in words, if it was not finite.
        traffic: of each link of the cuts, activations and gradients by turns, all ranks together.
        account: of all batches.
        cuts: costs of a microbatch; None if nothing was sent.
        ranks: of each, seconds of a step, of these waiting and coding.
        chunks: microbatches of a step.
    """

    losses: tuple[float, ...]
    failure: str
    traffic: list[Traffic]
    account: Account
    cuts: list[CutTimes] | None
    ranks: list[list[float]]
    chunks: int


def compare(
    pilot: Pilot,
    methods: Sequence[MethodPair] | None,
    *,
    data: Iterable[Any],
    batches: int,
    optimizer: torch.optim.Optimizer | None,
    mbps: float | None,
    latency_ms: float,
    floor: float,
    seconds: float,
    show: bool,
) -> Comparison:
    """The pilot of `mpcomp.Pipeline.compare`, where arguments and errors are described."""
    mesh, engine = pilot.engine.mesh, pilot.engine
    _check(mesh.num_replicas, batches, optimizer, mbps, latency_ms, seconds)
    pairs = pairs_in_order(_pairs(pilot, methods))
    for pair in pairs:  # before any of them runs
        pilot.new_boundaries(pair)
    network = None
    if mbps is not None:
        network = Network.alike(
            len(pilot.boundaries) + 1 - engine.together,
            mbps,
            latency_ms / 1e3,
            window_bytes=FIRST_WINDOW,
            connections=engine.connections,
        )
    trials: list[Trial] = []
    with (
        undone(mesh, pilot.model, optimizer, pilot.scaler, data) as start,
        warnings.catch_warnings(),
        tqdm(
            total=len(pairs), unit="method", leave=False, disable=mesh.rank > 0 or not show
        ) as bar,
    ):
        # A link's own warning of a large error: the table has it.
        warnings.filterwarnings("ignore", message=".*what arrives is wrong by")
        taken = list(itertools.islice(iter(data), batches))
        if not taken:
            raise ValueError("compare: data yielded no batch; pass a loader, or [(x, y), ...]")
        _run(pilot, pairs[0], start, taken[:1], optimizer)  # before the clock
        until = time.perf_counter() + seconds / len(pairs)
        true: list[Tensor | None] = []
        stages: list[RankTimes] = []
        for pair in pairs:
            bar.set_postfix_str(pair[0])
            run = _run(pilot, pair, start, taken, optimizer, None if trials else until)
            if not trials:
                if run.failure:
                    raise FloatingPointError(
                        f"compare: without compression already, {run.failure}: lower the learning "
                        "rate, or look at the data"
                    )
                taken = taken[: len(run.losses)]
                stages = _stages(engine, run)
                if network is not None and not stages:
                    raise ValueError(
                        f"mbps={mbps}: a step cannot be predicted on accelerators in one process, "
                        "whose stages are not timed one by one, nor with several stages on a rank; "
                        "start a process for each stage with torchrun, or leave mbps out"
                    )
            wrong = None
            if optimizer is None:
                own = [parameter.grad for parameter in pilot.model.parameters()]
                wrong = _gradient_error(engine, own, true or own)
                true = true or own
            trials.append(_trial(engine, pair, run, wrong, network, stages))
            bar.update()
    found = Comparison(
        tuple(trials), len(taken), optimizer is not None, floor, mbps, float(latency_ms)
    )
    if show and mesh.rank == 0:
        print("", found.table(), "", "* recommended", *found.summary(), sep="\n")
    return found


def _check(
    num_replicas: int,
    batches: int,
    optimizer: torch.optim.Optimizer | None,
    mbps: float | None,
    latency_ms: float,
    seconds: float,
) -> None:
    if num_replicas > 1:
        raise ValueError(
            f"compare with replicas={num_replicas}: a pilot is of one pipeline; build one with "
            "replicas=1, on as many ranks as stages or in one process"
        )
    if batches < 1:
        raise ValueError(f"batches={batches}: expected 1 or more")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}: expected one of torch's, or None"
        )
    if mbps is not None and not mbps > 0:
        raise ValueError(f"mbps={mbps}: expected a rate above 0, or None")
    if not 0 <= latency_ms < math.inf:
        raise ValueError(f"latency_ms={latency_ms}: expected a number from 0 up")
    if latency_ms and mbps is None:
        raise ValueError(f"latency_ms={latency_ms} without mbps: pass the rate of the links, too")
    if not seconds > 0:
        raise ValueError(f"seconds={seconds}: expected a number above 0")


def _pairs(pilot: Pilot, methods: Sequence[MethodPair] | None) -> list[Pair]:
    """The methods as pairs of specs; by default those of the project's studies of such models."""
    if methods is None:
        tasks = ("scratch", "finetune") if pilot.is_language_model else ("images",)
        known = [pair for task in tasks for pair in methods_of(task)]
        # Those with a memory of samples show nothing before the samples come again.
        return [pair for pair in known if not _needs_ids(pilot, pair)]
    if isinstance(methods, str):
        raise TypeError(f"methods={methods!r}: expected a list, as in [{methods!r}]")
    pairs = []
    for given in methods:
        act, grad = (given, given) if isinstance(given, str) else given
        pairs.append((act, grad))
    return pairs


def _needs_ids(pilot: Pilot, pair: Pair) -> bool:
    return any(
        link.method.by_sample for boundary in pilot.new_boundaries(pair) for link in boundary.links
    )


def _run(
    pilot: Pilot,
    pair: Pair,
    start: Start,
    data: Sequence[Any],
    optimizer: torch.optim.Optimizer | None,
    until: float | None = None,
) -> _Run:
    """Runs over the batches with a pair of methods, from the start.

    Args:
        pilot: the pipeline.
        pair: methods.
        start: of weights and all else.
        data: batches.
        optimizer: that steps after each, if any.
        until: time at which no other batch is begun, on the scale of `time.perf_counter`.
    """
    mesh = pilot.engine.mesh
    start.begin()
    boundaries = pilot.new_boundaries(pair)
    ids = _needs_ids(pilot, pair)
    losses: list[float] = []
    failure = ""
    with pilot.swapped_links(boundaries):
        links = [link for boundary in pilot.boundaries for link in boundary.links]
        begun = pilot.account()
        coded = [[link.meter.train.seconds for link in links]]
        for number, item in enumerate(data):
            batch, target = pair_of(item, "compare")
            given = item[2] if ids and not isinstance(item, Mapping) and len(item) > 2 else None
            if ids and given is None:
                raise ValueError(
                    f"{' / '.join(pair)} needs sample ids: let data yield (batch, target, ids), "
                    "with samples that come again"
                )
            try:
                losses.append(float(pilot.forward_backward(batch, target, sample_ids=given)))
            except FloatingPointError as error:  # the same on all ranks, and what a pilot is for
                failure = f"diverged in batch {number}"
                warnings.warn(f"{' / '.join(pair)} {failure}: {error}", stacklevel=4)
                break
            coded.append([link.meter.train.seconds for link in links])
            if optimizer is not None:
                _step(optimizer, pilot.scaler)
            late = until is not None and time.perf_counter() > until
            if until is not None and any(mesh.all_reduce_sum([float(late)])):
                break
        times = list(pilot.step_times())
        states = [link.meter.train.to_state() for link in links]
        account = pilot.account() - begun
    own = _own_figures(states, coded, times)
    found = mesh.all_gather_object(own, "figures of a pilot")
    by_link = [[rank["links"][i] for rank in found] for i in range(len(links))]
    steps = max(1, len(losses))
    return _Run(
        tuple(losses),
        failure,
        [Traffic.merged(states) for states in by_link],
        account,
        cut_times(by_link, [None] * len(boundaries)),
        [rank["times"] for rank in found],
        max(1, round(max(state["messages"] for state in by_link[0]) / steps)),
    )


def _own_figures(
    states: Sequence[dict[str, Any]],
    coded: Sequence[Sequence[float]],
    times: Sequence[tuple[float, float]],
) -> dict[str, Any]:
    """This rank's figures of a run; times are medians over steps, as the first make tables."""
    of_step = [
        [after - before for before, after in zip(*pair, strict=True)]
        for pair in itertools.pairwise(coded)
    ]
    num_steps = max(1, len(of_step))
    medians = [statistics.median(seconds) for seconds in zip(*of_step, strict=True)]
    medians = medians or [0.0] * len(states)
    waited = statistics.median([seconds for _, seconds in times] or [0.0])
    step = statistics.median([seconds for seconds, _ in times] or [0.0])
    return {
        "links": [
            {**state, "seconds": num_steps * seconds}
            for state, seconds in zip(states, medians, strict=True)
        ],
        "times": [step, waited, sum(medians)],
    }


def _step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def _stages(engine: Engine, run: _Run) -> list[RankTimes]:
    """Times of the stages of an uncompressed run; none where they are not known."""
    shares = engine.mesh.all_gather_object(engine.stage_shares(), "shares of stages")
    if run.cuts is None or not all(shares):
        return []
    return stage_times(run.ranks, shares, run.cuts, run.chunks, together=engine.together)


def _trial(
    engine: Engine,
    pair: Pair,
    run: _Run,
    gradient_error: float | None,
    network: Network | None,
    stages: Sequence[RankTimes],
) -> Trial:
    steps = max(1, len(run.losses))
    step_s = None
    if network is not None and run.cuts is not None and not run.failure:
        simulation = Simulation(stages, run.cuts, run.chunks, engine.in_flight)
        step_s = simulation.seconds(network, simulation.compressed)
    return Trial(
        pair=pair,
        act_error=_error(run.traffic[::2]),
        grad_error=_error(run.traffic[1::2]),
        losses=run.losses,
        gradient_error=gradient_error,
        account=(1 / steps) * run.account,
        coding_s=sum(traffic.seconds for traffic in run.traffic) / steps,
        step_s=step_s,
        failure=run.failure,
    )


def _error(parts: Sequence[Traffic]) -> float:
    """The relative error at all cuts together."""
    return Traffic.merged(part.to_state() for part in parts).relative_error


def _gradient_error(
    engine: Engine, own: Sequence[Tensor | None], true: Sequence[Tensor | None]
) -> float:
    """||g - g0|| / ||g0|| over the parameters of all ranks."""
    sums = [0.0, 0.0]
    for grad, other in zip(own, true, strict=True):
        if other is None:
            continue
        meant = other.detach().double()
        got = torch.zeros_like(meant) if grad is None else grad.detach().double()
        sums[0] += float((got - meant).square().sum())
        sums[1] += float(meant.square().sum())
    wrong, whole = engine.mesh.all_reduce_sum(sums)
    return math.sqrt(wrong / whole) if whole else math.sqrt(wrong)
