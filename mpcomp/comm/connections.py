"""The number of connections that gloo makes between two ranks of a group."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Final

from mpcomp.comm.reach import INTERFACES, gloo_address

__all__ = ["CONNECTIONS", "several_connections"]

#: Of each link, where one is too few.
CONNECTIONS: Final = 4


@contextlib.contextmanager
def several_connections(number: int) -> Iterator[None]:
    """A context in which groups of gloo have so many connections between two ranks.

    Gloo makes one over each interface that ``GLOO_SOCKET_IFNAME`` names, also where that is one
    several times; where it names several, these are taken in turn.

    Raises:
        ValueError: no interface is named, and that of the machine's own name is not known.
    """
    if number == 1:
        yield
        return
    before = os.environ.get(INTERFACES)
    names = [name for name in (before or "").split(",") if name] or [gloo_address()[0]]
    if names == ["?"]:
        raise ValueError(
            f"connections={number}: the interface of this machine's name is not known; export "
            f"{INTERFACES}, the one that leads to the other machines"
        )
    os.environ[INTERFACES] = ",".join(itertools.islice(itertools.cycle(names), number))
    try:
        yield
    finally:
        if before is None:
            del os.environ[INTERFACES]
        else:
            os.environ[INTERFACES] = before
