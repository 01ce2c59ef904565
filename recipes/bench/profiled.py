"""Torch's profiler over a piece of work, without what it tells the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

__all__ = ["profiled"]


def profiled(work: Callable[[], Any], activities: list[ProfilerActivity], **settings: Any) -> Any:
    """The profile of a call of ``work``, a `torch.profiler.profile`.

    Args:
        work: called once.
        activities: that are noted.
        **settings: further ones of `torch.profiler.profile`.
    """
    with _quiet(), profile(activities=activities, **settings) as found:
        work()
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which nothing reaches standard error: the profiler of torch 2.13 names itself.

    An error of the work is an exception, and so is told all the same.
    """
    sys.stderr.flush()
    screen = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(screen, 2)
        os.close(screen)
