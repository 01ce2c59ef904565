"""Answers of the rendezvous' store, which may never come.

A client of torch's store waits for an answer without end, and hears no signals meanwhile. Its other
end may be a machine that is off, or a process that hangs. So it is asked in a thread.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

__all__ = ["NoAnswer", "answered", "let_go", "port_of"]

_T = TypeVar("_T")

#: Seconds between two looks at whether an answer is still wanted.
_LOOK_S: Final = 0.2
#: Seconds that a thread is given to end, once its connection is shut.
_END_S: Final = 2.0


class NoAnswer(Exception):
    """The store has not answered in time.

    Args:
        thread: which still waits.
    """

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__("no answer")
        self.thread = thread


def answered(
    ask: Callable[[], _T], timeout_s: float, *, unless: Callable[[], bool] = lambda: False
) -> _T:
    """The result of ``ask``, which needs the store.

    Args:
        ask: called in a thread; what it raises is raised here.
        timeout_s: seconds in which it must have returned.
        unless: says that the answer is not wanted any more.

    Raises:
        NoAnswer: it has not returned by then.
    """
    answers: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            errors.append(error)

    # A daemon: the end of the process does not wait for what never comes.
    thread = threading.Thread(target=run, name="mpcomp-store", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < deadline and not unless():
        thread.join(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
    if errors:
        raise errors[0]
    if not answers:
        raise NoAnswer(thread)
    return answers[0]


def port_of(store: Any) -> int | None:
    """The port of a store's other end; None where it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def let_go(thread: threading.Thread, port: int | None) -> None:
    """Ends a thread that still waits for the store.

    Within torch's code a thread that outlives the interpreter is unwound where it must not be, and
    the process aborts. What it waits for is no longer of use to anybody, so its socket is shut.

    Args:
        thread: of a `NoAnswer`.
        port: of the store.
    """
    sockets = Path("/proc/self/fd")
    if not thread.is_alive() or port is None or not sockets.exists():
        return
    # No others: a copy of one that is no socket would stay open, and they double with each call.
    for number in [int(entry.name) for entry in sockets.iterdir() if entry.is_socket()]:
        # A copy of the descriptor; none of those that are closed meanwhile, or no connections.
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.getpeername()[1:2] == (port,):
                connection.shutdown(socket.SHUT_RDWR)
    thread.join(_END_S)
