"""Signals that end a program the way an exception does, so that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Final

__all__ = ["ENDING", "ending_on_signals"]

#: What asks a program to end.
ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextlib.contextmanager
def ending_on_signals(saying: str = "") -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP end this process as Ctrl-C does: by an exception.

    Args:
        saying: what the process then says on the screen.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if saying:
            print(saying, file=sys.stderr)
        sys.exit(128 + number)

    before = [signal.getsignal(number) for number in ENDING]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in zip(ENDING, before, strict=True):
            signal.signal(number, handler)
