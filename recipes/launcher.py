"""The launcher of this process, torchrun: where it has its store, how often it began, when it ends.

A launcher that is killed cannot end its processes, and they would train on beside those of the next
one; a store whose machine is gone answers nothing, for as long as one waits.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import mpcomp
from mpcomp.comm.answers import NoAnswer, answered
from mpcomp.comm.mesh import ATTEMPT
from mpcomp.comm.parent import die_with_parent

T = TypeVar("T")


def num_restarts() -> int:
    """Attempts before this one, of torchrun and of `mpcomp.heal`."""
    by_torchrun = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return by_torchrun + int(os.environ.get(ATTEMPT, "0"))


def may_restart() -> bool:
    """Whether all processes are started once more if one fails."""
    return heals() or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def heals() -> bool:
    """Whether this process is one that `mpcomp.heal` replaces if it fails."""
    return ATTEMPT in os.environ


def rendezvous() -> str:
    """Address of the store by which processes find each other, in words."""
    host = os.environ.get("MASTER_ADDR", "an unknown machine")
    return f"{host}, port {os.environ.get('MASTER_PORT', 'unknown')}"


def end_with_launcher() -> None:
    """Has this process die with torchrun, however that ends (`mpcomp.comm.parent`).

    Raises:
        OSError: the kernel refuses.
    """
    die_with_parent(os.getppid())


def reach_store(timeout_s: float) -> None:
    """Waits until the store's machine answers.

    Raises:
        PeerError: it has not within ``timeout_s`` seconds.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection(address, timeout=max(0.1, left)):
                return
        except OSError as error:
            if time.monotonic() + 0.5 >= deadline:
                raise mpcomp.PeerError(
                    f"the rendezvous at {rendezvous()} cannot be reached within {timeout_s:g} s "
                    f"({error}): check that torchrun has been started there, that --rdzv-endpoint "
                    "(or --master-addr and --master-port) names it, and that no firewall is "
                    "between; --timeout gives it longer"
                ) from error
            time.sleep(min(0.5, max(0.0, left)))


def within(timeout_s: float, work: Callable[[], T]) -> T:
    """The result of work that asks the store, which may never answer.

    Raises:
        PeerError: it has not within ``timeout_s`` seconds.
    """
    try:
        return answered(work, timeout_s)
    except NoAnswer as silence:
        raise mpcomp.PeerError(
            f"the rendezvous at {rendezvous()} has not answered within {timeout_s:g} s: its "
            "machine or the network to it is gone; start again with --resume once it is back"
        ) from silence
