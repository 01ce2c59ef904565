"""The speed of links, measured between their two ends."""

from __future__ import annotations

import time

import torch

from mpcomp.comm.channels import Channel, WireChannel
from mpcomp.comm.mesh import ProcessMesh

__all__ = ["measure_chain", "measure_link"]

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
    opened: list[WireChannel] = []
    with mesh.failing_together("measuring links"):
        for place in range(mesh.num_in_pipeline - 1):
            groups = [mesh.pair(place, place + 1) for _ in range(2)]
            sends = mesh.place == place
            peer = mesh.rank_at(place + 1 if sends else place)
            channels = [
                WireChannel(
                    group,
                    peer,
                    name=f"link {place}",
                    device=mesh.device,
                    timeout_s=mesh.wait_s,
                    waits=mesh.waits,
                    at=lambda: "measuring links",
                )
                for group in groups
                if group is not None
            ]
            own.append(measure_link(*channels, sends=sends) if channels else None)
            opened += channels
    found = mesh.all_gather_object(own, "measured links")
    for channel in opened:  # whose last messages have arrived by now
        channel.close()
    return [next(filter(None, of_link)) for of_link in zip(*found, strict=True)]


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
