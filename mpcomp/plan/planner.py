"""Planned steps: a model's step with any methods, on hosts and links that need not be here.

A `Planner` has a model's profile, the pipeline's hosts and its schedule; it measures what each pair
of methods takes at each cut (once a shape), tries the cuts it is given, and keeps the fastest.

Where a profile says so, the first host has the last stage as well, and both uses of a weight. A
step ends with what comes after the last backward: the gradients of tied weights that two hosts have
copies of, which these send each other, and the exchange with replicas.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from mpcomp.core.account import NOTHING, Account, agreed_in_step
from mpcomp.core.context import TensorMeta
from mpcomp.core.sent import Sent
from mpcomp.links.auto import BEFORE_HEAD, TIE_COMP
from mpcomp.links.build import MethodLike, boundaries_of
from mpcomp.links.state import state_bytes_of
from mpcomp.plan.coding import CutCost, measure_coding
from mpcomp.plan.known_quality import Known, known_of
from mpcomp.plan.network import Network
from mpcomp.plan.prediction import Compute, Prediction, predict
from mpcomp.plan.profile import Profile
from mpcomp.plan.timeline import Timeline
from mpcomp.plan.timing import Settle, typical

__all__ = ["BASELINE", "DENSE", "Pair", "PlannedStep", "Planner", "at_rate", "tie_cost", "tie_s"]

#: Methods of activations and gradients.
Pair = tuple[str, str]
#: What compression has to beat: nobody need send more than bf16.
BASELINE: Final[Pair] = ("bf16", "bf16")
DENSE: Final[Pair] = ("none", "none")
#: Numbers of a microbatch that are coded to see what coding takes; of more, fewer rows.
_LARGEST = 1 << 20
#: Channels from which on a message stands for a wider one: bases take their cube to be found.
_WIDEST = 1024
#: Shares of energy by which a sample's activation and gradient at a cut change from one epoch to
#: the next: what SmolLM2-135M showed when it was fine-tuned (docs/results), or a little more.
CHANGES: Final = (0.01, 0.1)


@dataclass(frozen=True)
class PlannedStep:
    """A step with one pair of methods.

    Attributes:
        pair: of methods; words in it may stand for others before a head.
        counts: blocks of each stage, as `stages.split` takes them.
        cuts: what each cut takes for a microbatch.
        account: of all that one pipeline sends in a step.
        tie_comp: method of tied weights' gradients.
        ties: what each tied weight takes that two hosts have: the first, the last, and the cost of
            its messages, one each way.
        prediction: of the microbatches.
        tie_s: seconds for tied weights.
        exchange_s: what replicas add.
        state_bytes: that the ends at one host keep, of the host that keeps most; None where that
            depends on the number of samples, which is not known.
        known: what the methods cost in quality, if that is known.
    """

    pair: Pair
    counts: tuple[int, ...]
    cuts: tuple[CutCost, ...]
    account: Account
    tie_comp: str
    ties: tuple[tuple[int, int, CutCost], ...]
    prediction: Prediction
    tie_s: float
    exchange_s: float
    state_bytes: int | None
    known: Known | None

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer's step."""
        return self.prediction.step_s + self.tie_s + self.exchange_s

    @property
    def wire_bytes(self) -> float:
        """Bytes of a step at all cuts, both ways."""
        return self.account.cuts.wire_bytes

    @property
    def uses(self) -> str | None:
        """The place of a weight of the first stage and the last: "together", "apart", or None."""
        if len(self.cuts) == len(self.counts):
            return "together"
        return "apart" if self.ties else None

    @property
    def tie_bytes(self) -> float:
        """Bytes of tied weights' messages in a step, both ways."""
        return self.account.ties.wire_bytes


class Planner:
    """Predicts steps of one model on one pipeline's hosts.

    Args:
        profile: of the model, for a microbatch.
        network: of the hosts, one for each stage but a last one that is on the first host.
        chunks: microbatches of a step.
        cuts: ways to cut the model, block counts each; the fastest is taken.
        task: in `known_quality.TASKS`.
        computes: of each host, what it takes for each block, where hosts are not alike; None gives
            all of them the profile's.
        tie_comp: method of tied weights' gradients where cuts are compressed; where they are not,
            nor are these, and bf16 goes with bf16.
        in_flight: microbatches under way on the first stage; None for the engine's own choice.
        num_cores: that all stages share; None where each host has its own.
        exchange_s: what replicas add to a step.
        replicas: what this pipeline sends others in a step.
        num_samples: of the training set, for methods that keep a row for each.
        settle: what repeats of one message stand for when coding is measured.

    Raises:
        ValueError: cuts that do not fit the model or the hosts.
    """

    def __init__(
        self,
        profile: Profile,
        network: Network,
        *,
        chunks: int,
        cuts: Sequence[Sequence[int]],
        task: str,
        computes: Sequence[Sequence[Compute]] | None = None,
        tie_comp: str = TIE_COMP,
        in_flight: int | None = None,
        num_cores: int | None = None,
        exchange_s: float = 0.0,
        replicas: Sent = NOTHING,
        num_samples: int | None = None,
        settle: Settle = typical,
    ) -> None:
        num_hosts = len(network.host_mbps)
        for counts in cuts:
            if len(counts) != num_hosts:
                raise ValueError(f"{len(counts)} stages for {num_hosts} hosts: each has one stage")
            profile.stages(counts)
        self.profile, self.network, self.chunks = profile, network, chunks
        alike = [[block.compute for block in profile.blocks]] * num_hosts
        self._computes = alike if computes is None else computes
        self._cuts, self._task = [tuple(counts) for counts in cuts], task
        self._tie_comp = tie_comp
        self._in_flight, self._num_cores = in_flight, num_cores
        self._exchange_s, self._replicas = exchange_s, replicas
        self._num_samples = num_samples
        self._settle = settle
        self._costs: dict[tuple[Pair, TensorMeta], CutCost] = {}
        self._tie_costs: dict[tuple[str, TensorMeta, int], CutCost] = {}

    def step(self, pair: Pair) -> PlannedStep:
        """The fastest step with a pair of methods.

        Raises:
            ValueError: no such methods, or two that do not go together.
        """
        return min(
            (self._step(pair, counts) for counts in self._cuts), key=lambda step: step.step_s
        )

    def on(self, network: Network, step: PlannedStep) -> float:
        """Seconds that a planned step takes on other links."""
        prediction = self._predict(step.counts, step.cuts, network)
        exchanged_s = tie_s(step.ties, network, prediction.timeline)
        return prediction.step_s + exchanged_s + step.exchange_s

    def asynchronous_s(self, step: PlannedStep, updates: int) -> float | None:
        """Seconds that a planned step takes where the pipeline does not drain between so many.

        None where it must, for copies of a weight on two hosts or replicas.
        """
        if step.ties or step.exchange_s:
            return None
        return self._predict(step.counts, step.cuts, self.network, updates).step_s

    def _step(self, pair: Pair, counts: tuple[int, ...]) -> PlannedStep:
        blocks = self.profile.blocks
        metas = [blocks[own][-1].output for own in self.profile.stages(counts)][:-1]
        pairs = _pairs(pair, len(metas), len(counts))
        cuts = tuple(self._cost(own, meta) for own, meta in zip(pairs, metas, strict=True))
        tie_comp = pair[0] if pair in (DENSE, BASELINE) else self._tie_comp
        apart = list(self._apart(counts))
        ties = tuple(
            (first, last, self._tie_cost(tie_comp, meta, num_rows))
            for first, last, meta, num_rows in apart
        )
        account = Account(
            cuts=2 * self.chunks * _dense(metas),
            ties=2 * _dense([meta for *_, meta, _ in apart]),
            replicas=self._replicas,
            agreements=agreed_in_step(len(counts), 2 * (len(metas) + len(ties))),
        )
        account = replace(
            account,
            cuts=replace(
                account.cuts, wire_bytes=self.chunks * sum(sum(cut.messages) for cut in cuts)
            ),
            ties=replace(account.ties, wire_bytes=sum(sum(cost.messages) for *_, cost in ties)),
        )
        prediction = self._predict(counts, cuts, self.network)
        return PlannedStep(
            pair=pair,
            counts=counts,
            cuts=cuts,
            account=account,
            tie_comp=tie_comp,
            ties=ties,
            prediction=prediction,
            tie_s=tie_s(ties, self.network, prediction.timeline),
            exchange_s=self._exchange_s,
            state_bytes=self._state_bytes(pairs, metas),
            known=known_of(self._task, *pair),
        )

    def _predict(
        self, counts: Sequence[int], cuts: Sequence[CutCost], network: Network, updates: int = 1
    ) -> Prediction:
        return predict(
            self._stage_compute(counts),
            cuts,
            network,
            chunks=self.chunks,
            updates=updates,
            in_flight=self._in_flight,
            num_cores=self._num_cores,
        )

    def _stage_compute(self, counts: Sequence[int]) -> list[Compute]:
        return [
            Compute(*map(sum, zip(*self._computes[i % len(counts)][own], strict=True)))
            for i, own in enumerate(self.profile.stages(counts))
        ]

    def _cost(self, pair: Pair, meta: TensorMeta) -> CutCost:
        if (pair, meta) not in self._costs:
            part = _part(meta)
            activation, gradient = (tensor[part] for tensor in self.profile.samples[meta])
            measured = measure_coding(
                *pair, activation, gradient, repeats=4, changes=CHANGES, settle=self._settle
            )
            self._costs[pair, meta] = measured.times(meta.numel / activation.numel())
        return self._costs[pair, meta]

    def _apart(self, counts: Sequence[int]) -> Iterator[tuple[int, int, TensorMeta, int]]:
        """The hosts of each tied weight that have copies, it, and rows of the first's gradient.

        How many tokens of a step differ is not known: as many as may.
        """
        host_of = [
            stage % len(counts)
            for stage, own in enumerate(self.profile.stages(counts))
            for _ in self.profile.blocks[own]
        ]
        for tie in self.profile.ties:
            first, last = host_of[tie.first], host_of[tie.last]
            if first != last:
                num_rows, output = tie.meta.num_rows, self.profile.blocks[tie.first].output
                if tie.by_token:
                    num_rows = min(num_rows, self.chunks * output.numel // output.last_dim)
                yield first, last, tie.meta, num_rows

    def _tie_cost(self, method: str, meta: TensorMeta, num_rows: int) -> CutCost:
        key = method, meta, num_rows
        if key not in self._tie_costs:
            self._tie_costs[key] = tie_cost(method, meta, num_rows, settle=self._settle)
        return self._tie_costs[key]

    def _state_bytes(self, pairs: Sequence[Pair], metas: Sequence[TensorMeta]) -> int | None:
        """Bytes that the host between two cuts keeps at most, or that at the only one."""
        num_hosts = len(self.network.host_mbps)
        names = [str(i) for i in range(len(metas))]
        acts, grads = map(list, zip(*pairs, strict=True))
        boundaries = boundaries_of(acts, grads, names, seed=0, replica=0, warmup_steps=0)
        kept = [0] * num_hosts
        for boundary, meta in zip(boundaries, metas, strict=True):
            batch = meta.with_rows(self.chunks * meta.shape[0])
            for link in boundary.links:
                if link.method.by_sample and not self._num_samples:
                    return None
                for stage in (link.sender_stage, link.receiver_stage):
                    entries = state_bytes_of(link, batch, self._num_samples, (stage,))
                    kept[stage % num_hosts] += sum(entry["bytes"] for entry in entries)
        return max(kept)


def _pairs(pair: Pair, num_cuts: int, num_hosts: int) -> list[Pair]:
    """The methods of each cut; the one before a head on the first host may have its own."""
    pairs = [pair] * num_cuts
    if num_cuts == num_hosts:
        act, grad = pair
        pairs[-1] = (
            BEFORE_HEAD.get(act, {}).get("act_comp", act),
            BEFORE_HEAD.get(grad, {}).get("grad_comp", grad),
        )
    return pairs


def _dense(metas: Sequence[TensorMeta]) -> Sent:
    """Tensors that go as they are, without what messages have besides."""
    num_bytes = sum(meta.dense_bytes for meta in metas)
    return Sent(num_bytes, num_bytes, sum(meta.numel for meta in metas))


def _part(meta: TensorMeta) -> tuple[slice, ...]:
    """The part of a tensor that is coded in place of all of it: fewer rows, channels of tokens."""
    rows, *rest = meta.shape
    part = [slice(None)] * len(meta.shape)
    if len(meta.shape) == 3:
        part[2] = slice(min(rest[1], _WIDEST))
        rest[1] = min(rest[1], _WIDEST)
    part[0] = slice(max(1, min(rows, _LARGEST // math.prod(rest))))
    return tuple(part)


def tie_cost(
    method: MethodLike, meta: TensorMeta, num_rows: int, *, settle: Settle = typical
) -> CutCost:
    """The cost of the gradients of a tied weight: of the first copy's, and of the last one's.

    Args:
        method: what is done to them.
        meta: of the weight.
        num_rows: rows of the first copy's gradient that are not zero.
        settle: what repeats stand for.

    Raises:
        ValueError: no such method.
    """
    width = min(meta.row_numel, _LARGEST)
    some = max(1, min(meta.num_rows, _LARGEST // width))
    generator = torch.Generator().manual_seed(0)
    last = torch.randn(some, width, generator=generator).to(meta.dtype)
    first = last.clone()
    first[torch.randperm(some, generator=generator)[some * num_rows // meta.num_rows :]] = 0
    rows = [each.reshape(1, -1) for each in (first, last)]
    measured = measure_coding(
        method, method, *rows, repeats=4, num_rows=some if some > 1 else None, settle=settle
    )
    return measured.times(meta.numel / last.numel())


def tie_s(ties: Sequence[tuple[int, int, CutCost]], network: Network, timeline: Timeline) -> float:
    """Seconds for tied weights after the last backward, one after the other.

    A host sends its gradient as soon as it has done its own work: the last one does so while the
    others' backwards are on their way to the first.

    Args:
        ties: of each the hosts that have copies, and what its messages cost.
        network: of all hosts.
        timeline: of the microbatches, each stage on a host of its own.
    """
    ready = timeline.ends_s
    for first, last, (coding, messages) in ties:
        sent = ready[first] + coding.encode_act_s, ready[last] + coding.encode_grad_s
        arrived = (
            sent[0] + network.between_s(first, last, messages.act_bytes),
            sent[1] + network.between_s(last, first, messages.grad_bytes),
        )
        ready[first] = max(sent[0], arrived[1]) + coding.decode_grad_s
        ready[last] = max(sent[1], arrived[0]) + coding.decode_act_s
    return max(ready) - timeline.step_s


def at_rate(network: Network, mbps: float) -> Network:
    """The network with one rate on all hosts and links."""
    return dataclasses.replace(network, host_mbps=(mbps,) * len(network.host_mbps), link_mbps=None)
