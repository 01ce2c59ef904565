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
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.wire import packed_length, unpack
from mpcomp.data_parallel.base import Draw, Encoded, encode_with
from mpcomp.data_parallel.item import OF_ERROR, Context, Item, count, shape_for
from mpcomp.data_parallel.messages import (
    add_message,
    compressor_of,
    encode_item,
    message_length,
    packed,
    without,
)
from mpcomp.feedback.base import narrow

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
    sent = [encode_item(item, context) for item in items]
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
        meta = item.shaped(encoded.compressor)
        encoded.compressor.add_to(
            mean,
            tuple(summed),
            meta,
            context.draw(item.name, 0)(True),
            positions=encoded.positions,
        )
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
    sent = [encode_item(item, context) for item in items]
    gathered, work = peers.gather(packed(sent))
    yield [work]
    means = [item.target.new_zeros(item.numel) for item in items]
    for message in gathered:
        start = 0
        for item, encoded, mean in zip(items, sent, means, strict=True):
            start = add_message(
                mean, item.name, 0, item.meta, encoded.compressor, message, start, context
            )
    for item, mean in zip(items, means, strict=True):
        item.finish(mean)


def two_phase(items: Sequence[Item], context: Context) -> Path:
    """Replica i forms the mean of the i-th piece of each parameter, and tells it compressed."""
    peers = context.peers
    codecs = [compressor_of(item, context) for item in items]
    # Of each parameter its pieces: how many elements each has, and of what shape it is.
    cuts = [_pieces(c, item.meta, peers.size) for c, item in zip(codecs, items, strict=True)]
    messages: list[list[Encoded]] = [[] for _ in range(peers.size)]
    for item, metas in zip(items, cuts, strict=True):
        pieces, start = [], 0
        for i, meta in enumerate(metas):
            piece = slice(start, start + meta.numel)
            draw = context.draw(item.name, i)
            x = narrow(item.target[piece], meta.dtype).reshape(meta.shape)
            encoded = context.controller.encode(item.name, x, draw)
            pieces.append(_Sent(piece, encoded, meta, draw))
            count(context.traffic, encoded)
            messages[i].append(encoded)
            start = piece.stop
        if item.end.keeps:
            item.sent(partial(_without, pieces), _positions(pieces))
    own = peers.rank
    own_layouts = [c.layout(metas[own]) for c, metas in zip(codecs, cuts, strict=True)]
    gathered, work = peers.scatter(
        [packed(message) for message in messages], message_length(sum(own_layouts, ()))
    )
    yield [work]

    means, again = [], []
    for item, metas in zip(items, cuts, strict=True):
        means.append(item.target.new_zeros(metas[own].numel))
    for message in gathered:
        start = 0
        for item, codec, metas, mean in zip(items, codecs, cuts, means, strict=True):
            start = add_message(mean, item.name, own, metas[own], codec, message, start, context)
    for item, codec, metas, mean in zip(items, codecs, cuts, means, strict=True):
        meta = metas[own]
        start = sum(before.numel for before in metas[:own])
        end = context.end_of_mean(item.name, start, meta.numel)
        due = context.compensated(end, mean, item.name, OF_ERROR - own - 1)
        draw = context.draw(item.name, peers.size + own)
        encoded = encode_with(codec, narrow(due.target, meta.dtype).reshape(meta.shape), draw)
        if due.keeps:
            due.sent(
                partial(_without, [_Sent(slice(None), encoded, meta, draw)]), encoded.positions
            )
        count(context.traffic, encoded)
        again.append(encoded)
    lengths = [
        message_length(sum((c.layout(metas[i]) for c, metas in zip(codecs, cuts, strict=True)), ()))
        for i in range(peers.size)
    ]
    message = packed(again)
    padded = message.new_zeros(max(lengths))
    padded[: message.numel()] = message
    gathered, work = peers.gather(padded)
    yield [work]

    results = [item.target.new_zeros(item.numel) for item in items]
    starts = [0] * len(items)
    for i, message in enumerate(gathered):
        start = 0
        for j, (item, codec, metas) in enumerate(zip(items, codecs, cuts, strict=True)):
            stop = starts[j] + metas[i].numel
            part = results[j][starts[j] : stop]
            layout = codec.layout(metas[i])
            payload = unpack(message, layout, start)
            generator = context.draw(item.name, peers.size + i)(codec.shares_choice)
            codec.add_to(part, payload, metas[i], generator)
            start, starts[j] = packed_length(layout, start), stop
    for item, result in zip(items, results, strict=True):
        item.finish(result)


class _Sent(NamedTuple):
    """The message of a piece of a tensor."""

    piece: slice
    encoded: Encoded
    meta: TensorMeta
    draw: Draw


def _without(sent: Sequence[_Sent], y: Tensor) -> Tensor:
    """A tensor [n] less what the messages of its pieces say."""
    return torch.cat([without(y[s.piece], s.encoded, s.meta, s.draw) for s in sent])


def _positions(sent: Sequence[_Sent]) -> Tensor | None:
    """Of the elements that the messages of all pieces carry; None where one does not say."""
    found = [
        positions + (piece.start or 0)
        for piece, encoded, *_ in sent
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
