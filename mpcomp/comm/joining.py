"""Joining torchrun's other processes.

gloo connects all processes as soon as there is a group. What it says of a failure names no rank,
and no cure; so through the store alone each first says that it has come, and where it will wait.
"""

from __future__ import annotations

import itertools
import os
import platform
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from mpcomp.comm import reach
from mpcomp.comm.devices import backend_of, device_of_rank, identity_of
from mpcomp.comm.failures import PeerError, first_line
from mpcomp.comm.handshake import announcing_failure, exchange, show_secret
from mpcomp.comm.mesh import connecting, meet
from mpcomp.comm.secret import Secret

__all__ = ["Ranks", "join"]

#: Times that this process has joined others: all ranks do so as often.
_counter = itertools.count()


@dataclass
class Ranks:
    """The ranks before they are connected: all of them reach the store (`handshake.Meeting`)."""

    store: Store
    rank: int
    num_ranks: int
    timeout_s: float
    secret: Secret | None = None


def join(
    device: torch.device, timeout_s: float, *, patience_s: float = 300.0, shares: bool = True
) -> None:
    """Joins torchrun's other processes, unless that has been done.

    Args:
        device: of this rank; a GPU becomes torch's current one.
        timeout_s: of a wait for another rank.
        patience_s: the least that ranks may take to come, as some have more to load than others.
        shares: whether two ranks may have one GPU, as where somebody has said so.

    Raises:
        ValueError: this process was not started by torchrun; or, on every rank, one shows no
            secret, waits where no other machine finds it, or has another's GPU.
        PeerError: a rank failed or did not come, or the store does not answer.
    """
    if device.type == "cuda":
        if device.index is None:
            device = device_of_rank(None)
        torch.cuda.set_device(device)  # or what asks for the current one would go to another's
    if dist.is_initialized():
        return
    seconds = max(timeout_s, patience_s)
    try:
        store, rank, size = meet(seconds)
    except dist.DistError as error:
        raise PeerError(
            f"not all processes have met at the rendezvous, {_rendezvous()}, within {seconds:g} s "
            f"({first_line(str(error))}): one was not started, the rendezvous' machine has failed, "
            "or the way to it is closed"
        ) from error
    ranks = Ranks(PrefixStore(f"join/{next(_counter)}", store), rank, size, seconds)
    show_secret(ranks)
    _check_addresses(ranks)
    identities = _identities(ranks, device, shares)
    with connecting(rank, seconds):
        dist.init_process_group(
            backend_of(identities),
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )


def _identities(ranks: Ranks, device: torch.device, shares: bool) -> list[str]:
    """Names of all ranks' GPUs; raises ValueError on all if two have one that must not."""
    found = exchange(ranks, "device", [identity_of(device), shares])
    for rank, said in enumerate(found):
        if not (isinstance(said, list) and [type(each) for each in said] == [str, bool]):
            raise ValueError(f"rank {rank} says {said!r:.80} in place of its device")
    identities = [identity for identity, _ in found]
    for rank, (identity, may) in enumerate(found):
        first = identities.index(identity)
        if identity and first != rank and not (may and found[first][1]):
            raise ValueError(
                f"devices: ranks {first} and {rank} see one GPU alone, the same one ({identity}): "
                "let each process see another (CUDA_VISIBLE_DEVICES), or pass devices='cuda:0' for "
                "all to share it"
            )
    return identities


def _rendezvous() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _check_addresses(ranks: Ranks) -> None:
    """Raises ValueError on all ranks if one would wait where no other machine finds it."""
    with announcing_failure(ranks, ["address"]):
        interface, address = reach.gloo_address()
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    towards = reach.towards(host, int(port)) if host and port.isdecimal() else None
    better = towards if towards and towards != interface else "INTERFACE"
    own = [_network_stack(), platform.node(), address, better]
    found = exchange(ranks, "address", own)
    for rank, words in enumerate(found):
        if not (isinstance(words, list) and [type(word) for word in words] == 4 * [str]):
            raise ValueError(f"rank {rank} says {words!r:.80} in place of its address")
    if len({stack for stack, *_ in found}) == 1:
        return
    hidden = [
        f"rank {rank} ({name}) waits for the others at {address}: export "
        f"{reach.INTERFACES}={better} there"
        for rank, (_, name, address, better) in enumerate(found)
        if reach.is_loopback(address)
    ]
    if hidden:
        with suppress(PeerError):  # none leaves, perhaps with the store, before all know
            exchange(ranks, "address heard", True)
        raise ValueError(
            f"{'; '.join(hidden)}. At such an address no other machine finds it: the machine's "
            "name leads there, as by 127.0.1.1 in Debian's /etc/hosts. Name the interface that "
            "leads to the other machines (`ip -br addr` lists all), or write the machine's own "
            "address beside its name in /etc/hosts"
        )


def _network_stack() -> str:
    """Name of what processes share whose loopback is the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"
