"""The speed of links, measured between their two ends."""

from __future__ import annotations

import math
import time
import warnings
from typing import Final

import torch

from mpcomp.comm.all_gather import num_rounds
from mpcomp.comm.channels import Channel
from mpcomp.comm.connections import CONNECTIONS
from mpcomp.comm.gloo import Gloo
from mpcomp.comm.mesh import Mesh, ProcessMesh
from mpcomp.comm.nccl import NCCL
from mpcomp.comm.paced import Paced, slow_link
from mpcomp.comm.reach import INTERFACES, gloo_address
from mpcomp.comm.transport import Transport

__all__ = ["choose_connections", "measure_chain", "measure_link", "transport_for"]

#: Latency from which on a message waits longer for windows than stripes cost it.
_LONG_LATENCY_S: Final = 0.01
#: Exchanges of all ranks, of which the shortest counts: others had to wait for a processor.
_EXCHANGES: Final = 6

#: Messages grow until one takes so long that latency and what buffers swallow hardly matter.
_LONG_S = 0.1
_SIZES = tuple(1 << bits for bits in range(14, 27, 2))
#: Above all numbers of microbatches.
_TAG = 1 << 20


def measure_link(there: Channel, back: Channel, *, sends: bool) -> tuple[float, float] | None:
    """Sends growing messages one way, each answered by one byte.

    Args:
        there: channel of the messages.
        back: channel of the answers.
        sends: whether this rank sends; the other calls this at the same time.

    Returns:
        (Mbit/s, seconds of an empty round trip) where messages are sent, None at the other end.
    """
    begin = _exchange(there, back, _TAG, 1, sends)
    for i, size in enumerate(_SIZES, start=1):
        seconds = _exchange(there, back, _TAG + 2 * i, size, sends)
        enough = _tell(there, _TAG + 2 * i + 1, seconds - begin > _LONG_S, sends)
        if enough:
            break
    return (size * 8e-6 / max(seconds - begin, 1e-9), begin) if sends else None


def choose_connections(mesh: Mesh) -> int:
    """The number of connections between two ranks that suits the links; the same on all ranks.

    It is `CONNECTIONS` where the slowest exchange of all ranks takes as long as a long link's, and
    else 1. Ranks whose links are short find out in three exchanges.

    Args:
        mesh: of connected ranks, which all call this.

    Raises:
        PeerError: a rank failed, or did not come.
    """
    able = gloo_address()[0] != "?"
    taken, shortest = 0, math.inf
    for number in range(_EXCHANGES + 2):
        begin = time.perf_counter_ns()
        found = mesh.all_gather([taken, able], "latency of links")
        taken = time.perf_counter_ns() - begin
        if number > 1:  # in the first one ranks have come when they could
            slowest = max(nanoseconds for nanoseconds, _ in found) * 1e-9
            shortest = min(shortest, slowest / max(1, num_rounds(mesh.num_ranks)))
        if shortest < _LONG_LATENCY_S:
            return 1
    if not all(known for _, known in found):
        if not able:
            warnings.warn(
                f"links take {1e3 * shortest:.0f} ms, where {CONNECTIONS} connections would be "
                "faster, but the interface of this machine's name is not known: export "
                f"{INTERFACES}, the one that leads to the other machines, or pass connections=1",
                stacklevel=2,
            )
        return 1
    return CONNECTIONS


def transport_for(mesh: ProcessMesh, connections: int | str) -> Transport:
    """The transport of these ranks; all of them call it.

    Args:
        mesh: of connected ranks.
        connections: of gloo between two of them; "auto" has the ranks choose.

    Raises:
        ValueError: slow links between accelerators.
        PeerError: a rank failed, or did not come.
    """
    slow = slow_link()
    if slow is None and mesh.backend == "nccl":
        return NCCL(mesh)  # which has connections of its own
    number = choose_connections(mesh) if isinstance(connections, str) else connections
    return Gloo(mesh, number) if slow is None else Paced(mesh, number, *slow)


def measure_chain(mesh: ProcessMesh) -> list[tuple[float, float]]:
    """Measures the links between neighbours, one after the other; all ranks call it.

    Args:
        mesh: of connected ranks.

    Returns:
        (Mbit/s, seconds of an empty round trip) from each rank to the next.

    Raises:
        PeerError: a rank failed, or did not come.
    """
    own: list[tuple[float, float] | None] = []
    opened: list[Channel] = []
    transport = transport_for(mesh, 1)
    with mesh.abort_all_on_error("measuring links"):
        for place in range(mesh.pp_size - 1):
            both = [
                transport.open(place, place + 1, f"link {place}", varies=False, at=_measuring)
                for _ in range(2)
            ]
            channels = [channel for channel in both if channel is not None]
            sends = mesh.place == place
            own.append(measure_link(*channels, sends=sends) if channels else None)
            opened += channels
    found = mesh.all_gather_object(own, "measured links")
    for channel in opened:  # whose last messages have arrived by now
        channel.close()
    return [next(filter(None, of_link)) for of_link in zip(*found, strict=True)]


def _measuring() -> str:
    return "measuring links"


def _exchange(there: Channel, back: Channel, tag: int, size: int, sends: bool) -> float:
    start = time.perf_counter()
    if sends:
        back.post(tag, 1)
        there.send(tag, torch.zeros(size, dtype=torch.uint8, device=there.device))
        back.receive(tag)
        there.release()
    else:
        there.post(tag, size)
        there.receive(tag)
        back.release()  # the answer before this one, without which nothing more would have come
        back.send(tag, torch.zeros(1, dtype=torch.uint8, device=back.device))
    return time.perf_counter() - start


def _tell(there: Channel, tag: int, flag: bool, sends: bool) -> bool:
    if sends:
        there.send(tag, torch.tensor([flag], dtype=torch.uint8, device=there.device))
        return flag
    there.post(tag, 1)
    return bool(there.receive(tag))
