"""The workers of a `DataLoader`: they end with the process that they load for, and not before.

torchrun and terminals send a signal to end to a rank's process group: to it and to its workers. The
rank may still take a step and save, for which it needs its workers; torch's die at once, which is
an error of the rank. When a rank is killed, on the other hand, its workers notice that after 5 s.
Being forks, they hold its connections open as long, and no other rank can see that it is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import Any, Final

from torch.utils.data._utils import worker

__all__ = ["attend_to_the_rank_alone"]

#: Seconds between two looks at whether the rank is there.
_LOOK_S: Final = 0.2

#: torch's own.
_worker_loop = worker._worker_loop


def attend_to_the_rank_alone() -> None:
    """Has workers that begin from now on end with this process, and at its word alone.

    Those on Windows end as ever.
    """
    if hasattr(os, "setpgid"):
        worker._worker_loop = _attentive_loop  # torch offers no place for what comes first


def _attentive_loop(*args: Any, **kwargs: Any) -> None:
    """torch's loop of a worker; found by name where a worker begins as a new interpreter."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_rank, name="mpcomp-loader-worker", daemon=True).start()
    _worker_loop(*args, **kwargs)


def _end_with_rank() -> None:
    # The kernel could do it, but at the end of the thread that has started the worker.
    rank, parent = multiprocessing.parent_process(), os.getppid()
    assert rank is not None  # a worker is a process of multiprocessing
    # A fork server is the parent where there is one, and other forks may hold the rank's pipe. A
    # new interpreter may begin after its rank is gone, when only the pipe says so.
    while rank.is_alive() and os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(0)
