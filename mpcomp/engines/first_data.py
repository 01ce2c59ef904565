"""Data on the first rank of each pipeline alone, which has inputs, targets and the loss.

It tells the others what they need (`mpcomp.engines.outline`), and they call without a batch. One
message goes with the agreement that a step begins with, and takes no latency besides::

    first rank   batch ─> outline, record ─> first microbatch ─> others' records ─> message ...
    the others            record ─> outline ─> others' records ─> receives posted ─> ...

Inference agrees once, and then each batch, or token, has an outline. Where the first rank has no
batch, it says so in both ways, and all ranks can go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import stages as staging
from mpcomp.comm.failures import PeerError
from mpcomp.core.context import Step
from mpcomp.engines.distributed import DistributedEngine
from mpcomp.engines.outline import Outline

__all__ = ["FirstData"]

#: Messages that are no outlines: no batch follows (yet), and none could be made.
_NOTHING: Final = b""
_FAILED: Final = b"failed"


class FirstData:
    """One rank's part in it.

    Args:
        engine: of this rank.
        elsewhere: the stages that are not on the first rank.

    Attributes:
        tells: whether this rank is the first of its pipeline.
    """

    def __init__(self, engine: DistributedEngine, elsewhere: Sequence[staging.Stage]) -> None:
        self._engine = engine
        self._elsewhere = list(elsewhere)
        self.tells = engine.mesh.place == 0

    # -- on the first rank ----------------------------------------------------------------------

    def tell(
        self, batch: Any, sizes: Sequence[int], parts: Sequence[Any], sample_ids: Any = None
    ) -> int:
        """Tells the other ranks of a batch; returns the bytes sent.

        Args:
            batch: what the first stage is called with.
            sizes: rows of its microbatches.
            parts: these.
            sample_ids: of its rows.

        Raises:
            TypeError, ValueError, RuntimeError: as the engine's `plan`; nothing is sent then.
        """
        metas = self._engine.plan(parts)
        outline = Outline.of(batch, sizes, metas, self._elsewhere, sample_ids)
        return self._tell(outline.to_bytes())

    @contextmanager
    def telling_step(self, step: Step, same: tuple[Any, ...]) -> Iterator[None]:
        """A block that makes a batch and tells of it; if it fails, no rank takes the step."""
        try:
            yield
        except Exception:
            self._tell(_FAILED)
            self._engine.announce(step, same, failed=True)
            with suppress(ValueError):  # it says that there is no batch, and the error why
                self._engine.agree(step)
            raise

    @contextmanager
    def telling(self, step: Step, what: str) -> Iterator[None]:
        """A block that infers, and tells of each batch; at its end the others are told of that.

        Args:
            step: of inference.
            what: is done, the same on all ranks.

        Raises:
            ValueError: ranks do not do the same; on all of them.
        """
        self._tell(_NOTHING)
        self._engine.announce(step, settings=what)
        self._engine.agree(step)
        try:
            yield
        except Exception:
            with suppress(PeerError):  # the pipeline has ended, and they know
                self._tell(_FAILED)
            raise
        self._tell(_NOTHING)

    # -- on the others --------------------------------------------------------------------------

    def hear_step(self, step: Step, same: tuple[Any, ...], *, announce: bool) -> Outline:
        """The outline of a training step's batch.

        Args:
            step: as far as it is known.
            same: what must be the same on all ranks of a replica.
            announce: send this rank's record first; else nothing but the step itself does.

        Raises:
            ValueError: ranks do not take the same step, or the first has no batch; on all of them.
        """
        if announce:
            self._engine.announce(step, same)
        message = self._hear()
        if message not in (_NOTHING, _FAILED):
            return Outline.from_bytes(message)
        if not announce:
            self._engine.announce(step, same)
        self._engine.agree(step)
        raise AssertionError("the first rank takes a step without a batch")

    def heard(self, step: Step, what: str) -> Iterator[Outline]:
        """Outlines of all batches to infer; arguments and errors are those of `telling`."""
        self._engine.announce(step, settings=what)
        self._hear()  # which the agreement judges
        self._engine.agree(step)
        while message := self._hear():
            if message == _FAILED:
                first = self._engine.mesh.rank_at(0)
                raise ValueError(f"{what} ended early on rank {first}: its own error says why")
            yield Outline.from_bytes(message)

    def refuse(self, what: str, *given: Any) -> None:
        """Ends the pipeline, on all ranks, where a rank has data that should have none.

        Args:
            what: is called.
            given: what it was given.

        Raises:
            ValueError: something.
        """
        mesh = self._engine.mesh
        if all(value is None for value in given):
            return
        with mesh.abort_all_on_error(what):
            raise ValueError(
                f"rank {mesh.rank} was given a batch in {what}, and with data='first' rank "
                f"{mesh.rank_at(0)} alone has data: call {what}() without any on the other ranks, "
                "as pipe.has_data says, or build the pipeline with data='all'"
            )

    def _tell(self, message: bytes) -> int:
        return self._engine.mesh.tell(message, "outline of a batch")

    def _hear(self) -> bytes:
        return self._engine.mesh.hear("outline of a batch")
