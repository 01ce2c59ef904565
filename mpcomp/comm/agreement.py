"""A block of code that fails on all ranks if it fails on one, where all can go on from that.

It is for work that needs no other rank, such as reading a file. There are two more such guards, as
ranks cannot tell each other in the same way at all times:

* before they are connected through the store, without waiting for anybody
  (`mpcomp.comm.handshake.announcing_failure`);
* while messages are under way by closing the connections, which ends the pipeline
  (`mpcomp.comm.mesh.Mesh.abort_all_on_error`).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from mpcomp.comm.failures import PeerError
from mpcomp.comm.mesh import Mesh

__all__ = ["SharedOutcome"]

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (OSError, ValueError, TypeError, FloatingPointError, RuntimeError)
}


class SharedOutcome:
    """Runs a block on every rank; when it is left, all ranks have left it.

        with SharedOutcome(mesh) as outcome:
            outcome.value = read(file)     # of this rank
        outcome.values                     # of all ranks, by rank

    The block must not itself need other ranks. In one process it is an ordinary block.

    Args:
        mesh: the ranks.

    Raises:
        OSError, ValueError, TypeError, FloatingPointError, RuntimeError: on every rank, what the
            block raised on the first rank on which it did; the message names that rank.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        #: For the other ranks: anything JSON can hold.
        self.value: Any = None
        self.values: list[Any] = []

    def __enter__(self) -> SharedOutcome:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # this process is ending, which the others will notice
        if isinstance(error, PeerError):
            return  # which ends all ranks anyway
        own = None if error is None else [_kind_of(error), str(error)]
        gathered = self._mesh.all_gather_object([own, self.value])
        if self._mesh.num_ranks > 1:
            for rank, (failure, _) in enumerate(gathered):
                if failure is not None:
                    raise _KINDS[failure[0]](f"rank {rank}: {failure[1]}") from error
        self.values = [value for _, value in gathered]


def _kind_of(error: Exception) -> str:
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
