"""Two levels of replicas: mild compression inside a machine, strong compression between machines.

machine 0   replica 0 ── replica 1      means inside each machine first; then the first
                |                       replica of each exchanges with those of the others,
machine 1   replica 2 ── replica 3      and tells its machine the result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from mpcomp.comm.collectives import Peers
from mpcomp.compressors import Compressor
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.data_parallel.base import Draw, Static
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.paths import Path, dense_sum, gather, payload_sum
from mpcomp.data_parallel.plan import Context, Item
from mpcomp.feedback.memory import NO_MEMORY
from mpcomp.feedback.state import EndState

__all__ = ["broadcast", "mean_inside", "split_group"]


def split_group(
    group: dist.ProcessGroup,
    network: ReplicaNetwork,
    timeout: timedelta | None,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Peers | None, dist.ProcessGroup | None]:
    """The replicas on this one's machine, and those that exchange between machines.

    All ranks of ``group`` call this together.

    Returns:
        None and ``group`` for one level; None as the second where this rank is not the first of its
        machine.

    Raises:
        ValueError: the replicas cannot be shared out among such machines.
    """
    size, each = dist.get_world_size(group), network.per_machine
    if each == 1:
        return None, group
    network.check_replicas(size)
    ranks = dist.get_process_group_ranks(group)
    machines = [ranks[i : i + each] for i in range(0, size, each)]
    own, place = divmod(dist.get_rank(group), each)
    # The name that torch gives a group in this way has the number of a rank's groups in it, so
    # every rank has to make as many: the other places of the machines get groups as well.
    alike = [machine[place] for machine in machines]
    with waiting():
        inside = dist.new_group(machines[own], timeout=timeout, use_local_synchronization=True)
        between = dist.new_group(alike, timeout=timeout, use_local_synchronization=True)
    return Peers(inside), between if place == 0 else None


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


def _worthwhile(item: Item, codec: Compressor | None) -> bool:
    if codec is None or not item.compressible:
        return False
    return codec.wire_bytes(item.shaped(codec)) < item.meta.dense_bytes
