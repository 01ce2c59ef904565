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

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mpcomp.comm.collectives import Works
from mpcomp.compressors import Compressor
from mpcomp.compressors.coding import Encoded
from mpcomp.core.tensor_meta import TensorMeta, narrow
from mpcomp.core.wire import Payload, aligned_length, pack
from mpcomp.data_parallel.plan import OF_ERROR, Context, Item, shape_for

__all__ = ["Path", "dense_sum", "gather", "payload_sum", "two_phase"]

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
