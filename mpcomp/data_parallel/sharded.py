"""One rank's part in sharded training: compressed reduce-scatter, and all-gather of few bits.

In ZeRO-3 (FSDP2) each rank owns a piece of every parameter. After a block's backward each rank
sends the piece of its gradient that belongs to a peer to that peer alone, who forms the mean::

    gradient of a block [ranks, n]  --row p, compressed-->  rank p: mean of all rows p [n]

so a parameter's gradient has as many plans as there are ranks, with a memory each: together as much
as the whole gradient on every rank, where the optimizer's state is only a piece. That is why a
compressed memory (`ConEF`) belongs here. Before a block runs, its parameters are gathered; those
messages are twice the gradients', and are compressed without a memory, as what is sent is the same
weights each time and not a sum over time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpcomp.compressors import Compressor, Identity
from mpcomp.compressors.base import Coding
from mpcomp.core.context import TensorMeta, cast_saturating
from mpcomp.core.randomness import generator_for
from mpcomp.core.traffic import ReplicaTraffic
from mpcomp.core.wire import Payload, aligned_length, pack, packed_length
from mpcomp.data_parallel.base import Factored, ReplicaMethod, RunInfo, matrices
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.plan import GradientPlan, shape_for

__all__ = ["ShardedExchange", "ShardedParameter"]

#: At the front of a message: whether the sender's gradient was finite.
_STATUS = TensorMeta((16,), torch.uint8)


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter among those that travel together.

    Attributes:
        name: of the parameter.
        pieces: what belongs to each rank, as a matrix; of no elements where there is nothing left.
        padded: the piece that is exchanged uncompressed, equal on all ranks; [first dim, others].
        dims: of the whole parameter.
    """

    name: str
    pieces: tuple[TensorMeta, ...]
    padded: TensorMeta
    dims: int

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return sum(piece.numel for piece in self.pieces)

    def key(self, rank: int) -> str:
        """Under which a piece counts as a parameter of its own."""
        return f"{self.name}/{rank}"


class ShardedExchange(Exchange):
    """Averages gradients over ranks that own a piece of each, compressed.

    Args:
        parts: all parameters.
        method: between replicas.
        group: the ranks.
        device: of the gradients.
        network: how they are connected; its path is that of this kind of training.
        seed: of all random choices.
        param_comp: compressor of parameters that are gathered; None for none.
        connections: to other ranks, as for `Exchange`: all_reduce_sum, waiting, timeout.

    Raises:
        ValueError, TypeError: the method does not suit sharded gradients, or these parameters.
    """

    rounds = 1.0  # a reduce-scatter is half of an all-reduce

    def __init__(
        self,
        parts: Sequence[ShardedParameter],
        method: ReplicaMethod,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        network: ReplicaNetwork | None = None,
        seed: int = 0,
        param_comp: Compressor | None = None,
        **connections: Any,
    ) -> None:
        network = network or ReplicaNetwork()
        one = torch.zeros(1, dtype=torch.float32, device=device)
        pieces = {
            part.key(rank): one.expand(meta.shape if part.dims > 1 else (meta.numel,))
            for part in parts
            for rank, meta in enumerate(part.pieces)
            if meta.numel
        }
        # By the whole, so that the same parameters go compressed however many ranks share them.
        sizes = {part.key(rank): part.numel for part in parts for rank in range(len(part.pieces))}
        metas = matrices(pieces, network, sizes)
        _check_method(method, network, metas, dist.get_world_size(group))
        super().__init__(
            pieces, method, group, network=network, seed=seed, sizes=sizes, **connections
        )
        self.param_comp = param_comp
        self.gathered = ReplicaTraffic()  # of parameters
        self.rank = dist.get_rank(group)
        self._group = group

    # -- gradients ------------------------------------------------------------------------------

    def reduce(
        self, blocks: Tensor, parts: Sequence[ShardedParameter], out: Tensor, *, mean: bool
    ) -> None:
        """Exchanges the gradient of parameters that travel together.

        Args:
            blocks: [ranks, n]; row p is what belongs to rank p, parameter by parameter.
            parts: those parameters.
            out: [n], set to this rank's row of the mean, or of the sum, over all ranks; NaN where
                some rank's gradient was not finite.
            mean: whether it is the mean.
        """
        step, peers = self._under_way, self._connections.everyone
        with self.totals.timed("encode_s"):
            finite = bool(blocks.sum(dtype=torch.float32).isfinite())
            step.found_nonfinite(not finite)
            status = torch.full(_STATUS.shape, int(not finite), dtype=torch.uint8)
            status_part = (status.to(blocks.device),)
            plans = [self._plans_of(row, parts, peer) for peer, row in enumerate(blocks)]
            messages = [pack([status_part, *map(self._encode, row)]) for row in plans]
            own = plans[self.rank]
            codings = [self._coding(plan) for plan in own]
            length = aligned_length(sum((coding.layout for coding in codings), (_STATUS,)))
            gathered, work = peers.all_to_all(messages, length)
        with self.totals.timed("wait_s"), peers.waiting():
            work.wait()
        with self.totals.timed("decode_s"):
            means = [plan.target.new_zeros(plan.numel) for plan in own]
            first = packed_length((_STATUS,))
            for message in gathered:
                start = first
                for coding, total in zip(codings, means, strict=True):
                    payload, start = coding.unpack(message, start)
                    coding.add_to(total, payload, scale=1 / peers.size)
            for plan, total in zip(own, means, strict=True):
                plan.finish(total)  # overwrites this rank's row of blocks
            torch.mul(blocks[self.rank], 1 if mean else peers.size, out=out)
            if any(bool(message[0]) for message in gathered):
                out.fill_(torch.nan)

    def leave_alone(self, names: Collection[str]) -> None:
        pieces = {f"{name}/{rank}" for name in names for rank in range(self.num_replicas)}
        super().leave_alone(pieces)

    def _plans_of(
        self, row: Tensor, parts: Sequence[ShardedParameter], peer: int
    ) -> list[GradientPlan]:
        """The pieces of a row, loaded."""
        plans, start = [], 0
        for part in parts:
            meta = part.pieces[peer]
            if meta.numel:
                name = part.key(peer)
                gradient = row[start : start + meta.numel].view(meta.shape)
                plans.append(self._under_way.plan(name, gradient))
            start += part.padded.numel
        assert start == row.numel(), "parts are those of this gradient"
        self._under_way.load(plans)
        return plans

    def _codec(self, plan: GradientPlan) -> Compressor:
        """The compressor that a piece is sent with, known to both ends."""
        codec = self.controller.codec(plan.name) if plan.compressible else None
        if not isinstance(codec, Compressor):
            return Identity()
        smaller = codec.wire_bytes(plan.shaped(codec)) < plan.meta.dense_bytes
        return codec if smaller else Identity()

    def _coding(self, plan: GradientPlan) -> Coding:
        """The coding of a piece, likewise."""
        codec = self._codec(plan)
        meta = plan.uncompressed_meta if codec.sends_dense else plan.meta
        return self._under_way.coding(codec, shape_for(codec, meta), plan.name, 0)

    def _encode(self, plan: GradientPlan) -> Payload:
        step = self._under_way
        if not self._codec(plan).sends_dense:
            step.count_route("scatter")
            return plan.encode(step).payload
        step.count_route("dense")
        sent = cast_saturating(plan.target, plan.uncompressed_meta.dtype)
        if plan.end.keeps:
            plan.sent(partial(torch.sub, other=sent.to(torch.float32)))
        encoded = self._coding(plan).encode(sent.reshape(1, -1))
        step.count(encoded)
        return encoded.payload

    # -- parameters -----------------------------------------------------------------------------

    def gather(
        self, own: Tensor, parts: Sequence[ShardedParameter], out: Tensor, *, compress: bool
    ) -> None:
        """Collects parameters that travel together.

        What was rounded is what every rank gets, its owner too, so all compute with equal weights.

        Args:
            own: [n], this rank's pieces, padded.
            parts: those parameters.
            out: [ranks, n], set to the pieces of all ranks.
            compress: if not, they go as they are.
        """
        with self.gathered.timed("seconds"):
            self._gather(own, parts, out, compress=compress)

    def _gather(
        self, own: Tensor, parts: Sequence[ShardedParameter], out: Tensor, *, compress: bool
    ) -> None:
        sent, start = [], 0
        for part in parts:
            coding = self._param_coding(part, own.dtype, compress, self.rank)
            x = own[start : start + part.padded.numel].clone()  # own may be a row of out
            start += part.padded.numel
            sent.append(coding.encode(x.reshape(coding.meta.shape)).payload)
        message = pack(sent)
        gathered = torch.empty(out.shape[0], message.numel(), dtype=torch.uint8, device=own.device)
        with self._connections.everyone.waiting():
            dist.all_gather(list(gathered), message, group=self._group)
        for rank, (row, received) in enumerate(zip(out, gathered, strict=True)):
            start = at = 0
            for part in parts:
                coding = self._param_coding(part, own.dtype, compress, rank)
                payload, at = coding.unpack(received, at)
                row[start : start + coding.meta.numel] = coding.decompress(payload).reshape(-1)
                start += coding.meta.numel
        wire_bytes = sum(wire.nbytes for payload in sent for wire in payload)
        self.gathered.count(wire_bytes, own.nbytes, own.numel())
        self.gathered.traffic_bytes += (out.shape[0] - 1) * message.numel()

    @staticmethod
    def _padded(part: ShardedParameter, dtype: torch.dtype) -> TensorMeta:
        return TensorMeta(part.padded.shape, dtype)

    def _param_codec(
        self, part: ShardedParameter, dtype: torch.dtype, compress: bool
    ) -> Compressor:
        """Matrices go compressed, where that makes them smaller; the same on all ranks."""
        codec, meta = self.param_comp, self._padded(part, dtype)
        if codec is None or not compress or part.dims < 2:
            return Identity()
        if part.numel < self.network.smallest:
            return Identity()
        return codec if codec.wire_bytes(shape_for(codec, meta)) < meta.dense_bytes else Identity()

    def _param_coding(
        self, part: ShardedParameter, dtype: torch.dtype, compress: bool, rank: int
    ) -> Coding:
        """The coding of a rank's piece.

        Backward gathers what forward has: what is drawn depends on the step alone.
        """
        codec = self._param_codec(part, dtype, compress)
        who = -1 if codec.shares_choice else rank
        draw = partial(generator_for, "parameters", self._seed, part.name, self.step, who)
        return Coding(codec, shape_for(codec, self._padded(part, dtype)), draw)

    def report(self) -> dict[str, Any]:
        return {**super().report(), "parameters": self.gathered.of_parameters()}


def _check_method(
    method: ReplicaMethod, network: ReplicaNetwork, metas: Mapping[str, TensorMeta], num_ranks: int
) -> None:
    """Raises ValueError for what sharded gradients cannot be sent with."""
    if method.sync_schedule is not None:
        raise ValueError(
            f"{method} with sharded parameters: replicas that train alone need all of them each; "
            "use DDP, or a pipeline without shard=True, or another method such as conef+topk:0.1"
        )
    controller = method.controller(RunInfo(num_ranks, metas))
    controller.begin(0, None)
    problem = None
    if controller.waits:
        problem = "exact=True wants all gradients before the first is sent; leave it out"
    elif method.clip is not None:
        problem = (
            "clip wants the norm of all gradients before the first is sent; leave it out, and clip "
            "after backward"
        )
    elif any(isinstance(controller.codec(name), Factored) for name in metas):
        problem = "factors of a matrix are sums over all ranks; use LowRank(rank) in their place"
    if problem is not None:
        raise ValueError(f"{method} with FSDP2: a block's gradient is sent at once; {problem}")
    if network.per_machine > 1 or network.path != "auto":
        raise ValueError(
            f"path={network.path!r}, per_machine={network.per_machine} with FSDP2: every piece of "
            "a gradient has one owner to go to, so leave both out"
        )
