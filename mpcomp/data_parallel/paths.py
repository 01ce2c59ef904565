"""The ways from many replicas' gradients to their mean, each as a generator.

A path begins its collectives, yields them, and goes on once they are done; an `Exchange` starts the
paths of one group of gradients while backward computes the next, and drives all of them to their
end together::

    works = next(path)          # encode, begin to send
    ...                         # other paths
    wait for the works, next(path), ... until it returns

So everything is begun, and waited for, in one thread and in the same order on every rank. Each
replica adds up what all have sent in the order of ranks, in fp32, so that all get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mpcomp.compressors import Compressor
from mpcomp.compressors.base import Encoded
from mpcomp.core.context import TensorMeta, cast_saturating
from mpcomp.core.wire import Payload, aligned_length, pack
from mpcomp.data_parallel.base import Controller, Draw, Factored, Static, matrix_of
from mpcomp.data_parallel.network import Peers, ReplicaNetwork, Works
from mpcomp.data_parallel.plan import RESIDUAL_STREAM, Context, GradientPlan, shape_for
from mpcomp.feedback.memory import NO_MEMORY
from mpcomp.feedback.state import EndState

__all__ = [
    "PATH_OF",
    "Path",
    "broadcast",
    "dense_sum",
    "gather",
    "mean_inside",
    "payload_sum",
    "routes",
    "two_phase",
]

Path = Iterator[Works]


def dense_sum(plans: Sequence[GradientPlan], context: Context) -> Path:
    """The mean of the targets, uncompressed, in the gradients' own dtype or a narrower one."""
    peers = context.peers
    works, sums = [], []
    for dtype in _in_order(plan.uncompressed_meta.dtype for plan in plans):
        alike = [plan for plan in plans if plan.uncompressed_meta.dtype == dtype]
        parts = []
        for plan in alike:
            part = cast_saturating(plan.target, dtype)
            if plan.end.keeps:
                plan.sent(partial(torch.sub, other=part.to(torch.float32)))
            parts.append(part)
        flat = _share(torch.cat(parts), peers.size)
        context.traffic.count_part(flat.nbytes, flat.nbytes / 4)
        sums.append((alike, flat))
        works.append(peers.all_reduce(flat))
    yield works
    for alike, flat in sums:
        means = torch.split(flat.to(torch.float32), [plan.numel for plan in alike])
        for plan, mean in zip(alike, means, strict=True):
            plan.finish(mean)


def payload_sum(plans: Sequence[GradientPlan], context: Context) -> Path:
    """Payloads that may be added elementwise: one sum for all of them of a dtype."""
    peers = context.peers
    sent = [plan.encode(context) for plan in plans]
    parts = [part for encoded in sent for part in encoded.payload]
    works, sums = [], {}
    for dtype in _in_order(part.dtype for part in parts):
        flat = torch.cat([part.reshape(-1) for part in parts if part.dtype == dtype])
        sums[dtype] = _share(flat, peers.size)
        works.append(peers.all_reduce(sums[dtype]))
    yield works
    ends = dict.fromkeys(sums, 0)
    for plan, encoded in zip(plans, sent, strict=True):
        summed = []
        for part in encoded.payload:
            start, ends[part.dtype] = ends[part.dtype], ends[part.dtype] + part.numel()
            summed.append(sums[part.dtype][start : ends[part.dtype]].reshape(part.shape))
        mean = plan.target.new_zeros(plan.numel)
        encoded.coding.add_to(mean, tuple(summed), positions=encoded.positions)
        plan.finish(mean)


def _share(x: Tensor, num_replicas: int) -> Tensor:
    """One replica's part of a mean, in place of ``x``.

    It is divided before it is added, as in DDP, so that half precision does not overflow; nor does
    it where all parts are as large as they can be, and rounded up.
    """
    x.div_(num_replicas)
    if x.dtype == torch.float16:
        limit = torch.finfo(x.dtype).max / num_replicas * (1 - num_replicas / 2048)
        x.clamp_(-limit, limit)
    return x


def gather(plans: Sequence[GradientPlan], context: Context) -> Path:
    """Every replica gets the messages of all others and adds them up."""
    peers = context.peers
    sent = [plan.encode(context) for plan in plans]
    gathered, work = peers.all_gather(pack(encoded.payload for encoded in sent))
    yield [work]
    means = [plan.target.new_zeros(plan.numel) for plan in plans]
    for message in gathered:
        start = 0
        for encoded, mean in zip(sent, means, strict=True):
            payload, start = encoded.coding.unpack(message, start)
            encoded.coding.add_to(mean, payload, scale=1 / peers.size)
    for plan, mean in zip(plans, means, strict=True):
        plan.finish(mean)


def two_phase(plans: Sequence[GradientPlan], context: Context) -> Path:
    """Replica i forms the mean of the i-th piece of each parameter, and tells it compressed."""
    peers = context.peers
    # Of each parameter the codings of its pieces: how many elements each has, and of what shape.
    codings = []
    for plan in plans:
        codec = context.compressor_of(plan.name)
        metas = _pieces(codec, plan.meta, peers.size)
        codings.append([context.coding(codec, m, plan.name, i) for i, m in enumerate(metas)])
    messages: list[list[Payload]] = [[] for _ in range(peers.size)]
    for plan, of_pieces in zip(plans, codings, strict=True):
        pieces, start = [], 0
        for i, coding in enumerate(of_pieces):
            piece = slice(start, start + coding.meta.numel)
            x = cast_saturating(plan.target[piece], coding.meta.dtype).reshape(coding.meta.shape)
            encoded = context.controller.encode(plan.name, x, coding)
            pieces.append(_Sent(piece, encoded))
            context.count(encoded)
            messages[i].append(encoded.payload)
            start = piece.stop
        if plan.end.keeps:
            plan.sent(partial(_without, pieces), _positions(pieces))
    own = peers.rank
    own_layout = sum((of_pieces[own].layout for of_pieces in codings), ())
    gathered, work = peers.all_to_all(
        [pack(message) for message in messages], aligned_length(own_layout)
    )
    yield [work]

    means, again = [], []
    for plan, of_pieces in zip(plans, codings, strict=True):
        means.append(plan.target.new_zeros(of_pieces[own].meta.numel))
    for message in gathered:
        start = 0
        for of_pieces, mean in zip(codings, means, strict=True):
            payload, start = of_pieces[own].unpack(message, start)
            of_pieces[own].add_to(mean, payload, scale=1 / peers.size)
    # What is drawn for a mean is drawn for no piece that it is formed of.
    of_means = [
        [
            context.coding(piece.compressor, piece.meta, plan.name, peers.size + i)
            for i, piece in enumerate(of_pieces)
        ]
        for plan, of_pieces in zip(plans, codings, strict=True)
    ]
    for plan, of_pieces, mean in zip(plans, of_means, means, strict=True):
        coding = of_pieces[own]
        meta = coding.meta
        start = sum(before.meta.numel for before in of_pieces[:own])
        end = context.state.second_stage(plan.name, start, meta.numel)
        due = GradientPlan(plan.name, mean, end)
        due.load(context, stream=RESIDUAL_STREAM - own - 1)
        x = cast_saturating(due.target, meta.dtype).reshape(meta.shape)
        again.append(due.note(context, coding.encode(x)).payload)
    lengths = [
        aligned_length(sum((of_pieces[i].layout for of_pieces in of_means), ()))
        for i in range(peers.size)
    ]
    message = pack(again)
    padded = message.new_zeros(max(lengths))
    padded[: message.numel()] = message
    gathered, work = peers.all_gather(padded)
    yield [work]

    results = [plan.target.new_zeros(plan.numel) for plan in plans]
    starts = [0] * len(plans)
    for i, message in enumerate(gathered):
        start = 0
        for j, of_pieces in enumerate(of_means):
            stop = starts[j] + of_pieces[i].meta.numel
            payload, start = of_pieces[i].unpack(message, start)
            of_pieces[i].add_to(results[j][starts[j] : stop], payload)
            starts[j] = stop
    for plan, result in zip(plans, results, strict=True):
        plan.finish(result)


def mean_inside(
    plans: Sequence[GradientPlan],
    context: Context,
    peers: Peers,
    codec: Compressor | None,
    factor: float,
) -> Path:
    """Replaces gradients by their means over this machine's replicas.

    Args:
        plans: gradients.
        context: of the step between machines, whose counts this leaves alone.
        peers: the machine's replicas.
        codec: what large ones are sent with.
        factor: on this replica's gradients.
    """
    draw = context.draw

    def pieces(name: str, piece: int) -> Draw:
        return draw(name, -1 - piece)

    nothing = EndState(NO_MEMORY, TensorMeta(()), torch.device("cpu"))
    inside = Context(peers, Static(codec), context.state, 1.0, pieces)
    plain = [GradientPlan(plan.name, plan.gradient, nothing, plan.compressible) for plan in plans]
    for plan in plain:
        plan.load(inside, factor)
    small = [plan for plan in plain if not _worthwhile(plan, codec)]
    large = [plan for plan in plain if _worthwhile(plan, codec)]
    if small:
        yield from dense_sum(small, inside)
    if large:
        assert codec is not None
        yield from (payload_sum if codec.summable else gather)(large, inside)


def broadcast(plans: Sequence[GradientPlan], peers: Peers) -> Path:
    """Gives the gradients of a machine's first replica to the others."""
    works = []
    flats = []
    for plan in plans:
        flat = plan.meta.flatten(plan.gradient).reshape(-1).clone()
        flats.append(flat)
        works.append(peers.broadcast(flat))
    yield works
    for plan, flat in zip(plans, flats, strict=True):
        plan.gradient.copy_(plan.meta.unflatten(flat))


#: The paths by name, in the order in which they start. A module with one of its own adds it.
PATH_OF: dict[str, Callable[[Sequence[GradientPlan], Context], Path]] = {
    "dense": dense_sum,
    "sum": payload_sum,
    "gather": gather,
    "two-phase": two_phase,
}


def routes(
    plans: Sequence[GradientPlan], context: Context, network: ReplicaNetwork
) -> dict[str, list[GradientPlan]]:
    """The gradients by the name of their path, in the order of `PATH_OF`."""
    found: dict[str, list[GradientPlan]] = {}
    to_weigh: list[GradientPlan] = []
    for plan in plans:
        route = _route(plan, context.controller)
        if route is None:
            to_weigh.append(plan)
        else:
            found.setdefault(route, []).append(plan)
    if to_weigh:
        weighed = _weighed(to_weigh, context, network)
        found.setdefault(weighed, []).extend(to_weigh)
    return {name: found[name] for name in PATH_OF if name in found}


def _route(plan: GradientPlan, controller: Controller) -> str | None:
    """The path of one gradient; None where that depends on how much goes with it."""
    codec = controller.codec(plan.name) if plan.compressible else None
    if codec is None:
        return "dense"
    if isinstance(codec, Factored):
        return "factors" if codec.worthwhile(matrix_of(plan.meta)) else "dense"
    if codec.sends_dense or codec.wire_bytes(plan.shaped(codec)) >= plan.meta.dense_bytes:
        return "dense"
    return "sum" if codec.summable else None


def _weighed(plans: Sequence[GradientPlan], context: Context, network: ReplicaNetwork) -> str:
    wire = dense = 0
    for plan in plans:
        codec = context.compressor_of(plan.name)
        wire += codec.wire_bytes(plan.shaped(codec))
        dense += plan.meta.dense_bytes
    return network.choose(
        summable=False, wire_bytes=wire, dense_bytes=dense, num_replicas=context.peers.size
    )


def _worthwhile(plan: GradientPlan, codec: Compressor | None) -> bool:
    if codec is None or not plan.compressible:
        return False
    return codec.wire_bytes(plan.shaped(codec)) < plan.meta.dense_bytes


class _Sent(NamedTuple):
    """The message of a piece of a tensor."""

    piece: slice
    encoded: Encoded


def _without(sent: Sequence[_Sent], y: Tensor) -> Tensor:
    """A tensor [n] less what the messages of its pieces say."""
    return torch.cat([encoded.without(y[piece]) for piece, encoded in sent])


def _positions(sent: Sequence[_Sent]) -> Tensor | None:
    """Of the elements that the messages of all pieces carry; None where one does not say."""
    found = [
        positions + (piece.start or 0)
        for piece, encoded in sent
        if (positions := encoded.positions) is not None
    ]
    return torch.cat(found) if len(found) == len(sent) else None


def _pieces(codec: Compressor, meta: TensorMeta, num_pieces: int) -> list[TensorMeta]:
    """As many nearly equal pieces of a parameter, by rows for a codec that works by matrix."""
    whole = shape_for(codec, meta)
    along = whole.shape[0] if codec.by_matrix else whole.shape[1]
    sizes = [along // num_pieces + (i < along % num_pieces) for i in range(num_pieces)]
    if codec.by_matrix:
        return [TensorMeta((size, whole.shape[1]), meta.dtype) for size in sizes]
    return [TensorMeta((1, size), meta.dtype) for size in sizes]


def _in_order(dtypes: Iterator[torch.dtype]) -> list[torch.dtype]:
    """Each dtype once, in order of appearance."""
    return list(dict.fromkeys(dtypes))
