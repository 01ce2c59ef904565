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

from mpcomp.comm.collectives import Peers, Works
from mpcomp.compressors import Compressor
from mpcomp.compressors.coding import Encoded
from mpcomp.core.tensor_meta import TensorMeta, narrow
from mpcomp.core.wire import Payload, aligned_length, pack
from mpcomp.data_parallel.base import Controller, Draw, Factored, Static, matrix_of
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.plan import OF_ERROR, Context, Item, shape_for
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


def dense_sum(items: Sequence[Item], context: Context) -> Path:
    """The mean of what is wanted, uncompressed, in the gradients' own dtype or a narrower one."""
    peers = context.peers
    works, sums = [], []
    for dtype in _in_order(item.uncompressed_meta.dtype for item in items):
        alike = [item for item in items if item.uncompressed_meta.dtype == dtype]
        parts = []
        for item in alike:
            part = narrow(item.target, dtype)
            if item.end.keeps:
                item.sent(partial(_less, part.to(torch.float32)))
            parts.append(part)
        flat = _share(torch.cat(parts), peers.size)
        context.traffic.count_part(flat.nbytes, flat.nbytes / 4)
        sums.append((alike, flat))
        works.append(peers.sum(flat))
    yield works
    for alike, flat in sums:
        means = torch.split(flat.to(torch.float32), [item.numel for item in alike])
        for item, mean in zip(alike, means, strict=True):
            item.finish(mean)


def payload_sum(items: Sequence[Item], context: Context) -> Path:
    """Payloads that may be added elementwise: one sum for all of them of a dtype."""
    peers = context.peers
    sent = [item.encode(context) for item in items]
    parts = [part for encoded in sent for part in encoded.payload]
    works, sums = [], {}
    for dtype in _in_order(part.dtype for part in parts):
        flat = torch.cat([part.reshape(-1) for part in parts if part.dtype == dtype])
        sums[dtype] = _share(flat, peers.size)
        works.append(peers.sum(sums[dtype]))
    yield works
    ends = dict.fromkeys(sums, 0)
    for item, encoded in zip(items, sent, strict=True):
        summed = []
        for part in encoded.payload:
            start, ends[part.dtype] = ends[part.dtype], ends[part.dtype] + part.numel()
            summed.append(sums[part.dtype][start : ends[part.dtype]].reshape(part.shape))
        mean = item.target.new_zeros(item.numel)
        encoded.coding.add_to(mean, tuple(summed), positions=encoded.positions)
        item.finish(mean)


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


def gather(items: Sequence[Item], context: Context) -> Path:
    """Every replica gets the messages of all others and adds them up."""
    peers = context.peers
    sent = [item.encode(context) for item in items]
    gathered, work = peers.gather(pack(encoded.payload for encoded in sent))
    yield [work]
    means = [item.target.new_zeros(item.numel) for item in items]
    for message in gathered:
        start = 0
        for encoded, mean in zip(sent, means, strict=True):
            payload, start = encoded.coding.unpack(message, start)
            encoded.coding.add_to(mean, payload, scale=1 / peers.size)
    for item, mean in zip(items, means, strict=True):
        item.finish(mean)


def two_phase(items: Sequence[Item], context: Context) -> Path:
    """Replica i forms the mean of the i-th piece of each parameter, and tells it compressed."""
    peers = context.peers
    # Of each parameter the codings of its pieces: how many elements each has, and of what shape.
    codings = []
    for item in items:
        codec = context.compressor_of(item.name)
        metas = _pieces(codec, item.meta, peers.size)
        codings.append([context.coding(codec, m, item.name, i) for i, m in enumerate(metas)])
    messages: list[list[Payload]] = [[] for _ in range(peers.size)]
    for item, of_pieces in zip(items, codings, strict=True):
        pieces, start = [], 0
        for i, coding in enumerate(of_pieces):
            piece = slice(start, start + coding.meta.numel)
            x = narrow(item.target[piece], coding.meta.dtype).reshape(coding.meta.shape)
            encoded = context.controller.encode(item.name, x, coding)
            pieces.append(_Sent(piece, encoded))
            context.count(encoded)
            messages[i].append(encoded.payload)
            start = piece.stop
        if item.end.keeps:
            item.sent(partial(_without, pieces), _positions(pieces))
    own = peers.rank
    own_layout = sum((of_pieces[own].layout for of_pieces in codings), ())
    gathered, work = peers.scatter(
        [pack(message) for message in messages], aligned_length(own_layout)
    )
    yield [work]

    means, again = [], []
    for item, of_pieces in zip(items, codings, strict=True):
        means.append(item.target.new_zeros(of_pieces[own].meta.numel))
    for message in gathered:
        start = 0
        for of_pieces, mean in zip(codings, means, strict=True):
            payload, start = of_pieces[own].unpack(message, start)
            of_pieces[own].add_to(mean, payload, scale=1 / peers.size)
    # What is drawn for a mean is drawn for no piece that it is formed of.
    of_means = [
        [
            context.coding(piece.compressor, piece.meta, item.name, peers.size + i)
            for i, piece in enumerate(of_pieces)
        ]
        for item, of_pieces in zip(items, codings, strict=True)
    ]
    for item, of_pieces, mean in zip(items, of_means, means, strict=True):
        coding = of_pieces[own]
        meta = coding.meta
        start = sum(before.meta.numel for before in of_pieces[:own])
        end = context.end_of_mean(item.name, start, meta.numel)
        due = context.compensated(end, mean, item.name, OF_ERROR - own - 1)
        encoded = coding.encode(narrow(due.target, meta.dtype).reshape(meta.shape))
        if due.keeps:
            due.sent(encoded.without, encoded.positions)
        context.count(encoded)
        again.append(encoded.payload)
    lengths = [
        aligned_length(sum((of_pieces[i].layout for of_pieces in of_means), ()))
        for i in range(peers.size)
    ]
    message = pack(again)
    padded = message.new_zeros(max(lengths))
    padded[: message.numel()] = message
    gathered, work = peers.gather(padded)
    yield [work]

    results = [item.target.new_zeros(item.numel) for item in items]
    starts = [0] * len(items)
    for i, message in enumerate(gathered):
        start = 0
        for j, of_pieces in enumerate(of_means):
            stop = starts[j] + of_pieces[i].meta.numel
            payload, start = of_pieces[i].unpack(message, start)
            of_pieces[i].add_to(results[j][starts[j] : stop], payload)
            starts[j] = stop
    for item, result in zip(items, results, strict=True):
        item.finish(result)


def mean_inside(
    items: Sequence[Item],
    peers: Peers,
    codec: Compressor | None,
    draw: Callable[[str, int], Draw],
    factor: float,
) -> Path:
    """Replaces gradients by their means over this machine's replicas.

    Args:
        items: gradients.
        peers: the machine's replicas.
        codec: what large ones are sent with.
        draw: makes generators.
        factor: on this replica's gradients.
    """

    def pieces(name: str, piece: int) -> Draw:
        return draw(name, -1 - piece)

    def kept(name: str, start: int, numel: int) -> EndState:
        return nothing

    nothing = EndState(NO_MEMORY, TensorMeta(()), torch.device("cpu"))
    context = Context(peers, Static(codec), 1.0, pieces, kept, {})
    plain = [Item(item.name, item.gradient, nothing, item.compressible) for item in items]
    for item in plain:
        item.load(context, factor)
    small = [item for item in plain if not _worthwhile(item, codec)]
    large = [item for item in plain if _worthwhile(item, codec)]
    if small:
        yield from dense_sum(small, context)
    if large:
        assert codec is not None
        yield from (payload_sum if codec.summable else gather)(large, context)


def broadcast(items: Sequence[Item], peers: Peers) -> Path:
    """Gives the gradients of a machine's first replica to the others."""
    works = []
    flats = []
    for item in items:
        flat = item.meta.flatten(item.gradient).reshape(-1).clone()
        flats.append(flat)
        works.append(peers.broadcast(flat))
    yield works
    for item, flat in zip(items, flats, strict=True):
        item.gradient.copy_(item.meta.unflatten(flat))


#: The paths by name, in the order in which they start. A module with one of its own adds it.
PATH_OF: dict[str, Callable[[Sequence[Item], Context], Path]] = {
    "dense": dense_sum,
    "sum": payload_sum,
    "gather": gather,
    "two-phase": two_phase,
}


def routes(
    items: Sequence[Item], controller: Controller, network: ReplicaNetwork, num_replicas: int
) -> dict[str, list[Item]]:
    """The gradients by the name of their path, in the order of `PATH_OF`."""
    found: dict[str, list[Item]] = {}
    to_weigh: list[Item] = []
    for item in items:
        route = _route(item, controller)
        if route is None:
            to_weigh.append(item)
        else:
            found.setdefault(route, []).append(item)
    if to_weigh:
        weighed = _weighed(to_weigh, controller, network, num_replicas)
        found.setdefault(weighed, []).extend(to_weigh)
    return {name: found[name] for name in PATH_OF if name in found}


def _route(item: Item, controller: Controller) -> str | None:
    """The path of one gradient; None where that depends on how much goes with it."""
    codec = controller.codec(item.name) if item.compressible else None
    if codec is None:
        return "dense"
    if isinstance(codec, Factored):
        return "factors" if codec.worthwhile(matrix_of(item.meta)) else "dense"
    if codec.sends_dense or codec.wire_bytes(item.shaped(codec)) >= item.meta.dense_bytes:
        return "dense"
    return "sum" if codec.summable else None


def _weighed(
    items: Sequence[Item], controller: Controller, network: ReplicaNetwork, num_replicas: int
) -> str:
    wire = dense = 0
    for item in items:
        codec = controller.codec(item.name)
        assert isinstance(codec, Compressor)
        wire += codec.wire_bytes(item.shaped(codec))
        dense += item.meta.dense_bytes
    return network.choose(
        summable=False, wire_bytes=wire, dense_bytes=dense, num_replicas=num_replicas
    )


def _worthwhile(item: Item, codec: Compressor | None) -> bool:
    if codec is None or not item.compressible:
        return False
    return codec.wire_bytes(item.shaped(codec)) < item.meta.dense_bytes


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


def _less(said: Tensor, y: Tensor) -> Tensor:
    return y - said


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
