"""The number of microbatches under way at once: within a memory bound, chosen by measurement.

A deeper pipeline hides more of a slow link and keeps more activations. Results do not depend on the
depth, so it can be tried out while training: the first steps measure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mpcomp.comm.mesh import Mesh
from mpcomp.engines.saved_bytes import SavedBytes
from mpcomp.engines.schedules import InFlight1F1B, warmup_of
from mpcomp.engines.torch_stage import CutStage

__all__ = ["Depth", "DepthSearch", "deepest_within"]

#: Steps that measure each depth, after one that does not count.
_TRIALS = 3
#: A deeper pipeline must be faster by so much to be worth its memory.
_WORTH = 0.03


class Depth:
    """Sets how deep a schedule goes.

    Args:
        schedule: whose depth it is.
        stages: of this rank.
        chunks: microbatches a step, beyond which no depth goes.
        in_flight: the depth wanted; "auto" to search, None for twice the stages less one.
        bound: bytes of activations that this rank may keep; None for no bound.
        mesh: the ranks.
    """

    def __init__(
        self,
        schedule: InFlight1F1B,
        stages: Sequence[CutStage],
        chunks: int,
        in_flight: int | str | None,
        bound: int | None,
        mesh: Mesh,
    ) -> None:
        self._mesh = mesh
        self._schedule = schedule
        self._stages = stages
        self._chunks = chunks
        self._num_stages = stages[0].num_stages
        self._wanted = in_flight
        self._bound = bound
        self._search: DepthSearch | None = None
        # With a bound one microbatch at a time, until it is known what one keeps.
        self._limit(chunks if bound is None else 1)

    def _limit(self, limit: int) -> None:
        if self._wanted == "auto":
            self._search = DepthSearch(
                self._num_stages, self._chunks, limit, self._mesh.all_reduce_sum
            )
            self._schedule.in_flight = self._search.depth
            return
        wanted = 2 * self._num_stages - 1 if self._wanted is None else int(self._wanted)
        self._schedule.in_flight = max(1, min(wanted, self._chunks, limit))

    @property
    def counts_bytes(self) -> bool:
        """Whether the step to come counts what a microbatch keeps."""
        return self._bound is not None

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Runs a step, on every rank; measures it as long as there is something to find out.

        Raises:
            ValueError: not even one microbatch fits into the bound.
        """
        bound, self._bound = self._bound, None
        if bound is not None:
            for stage in self._stages:
                stage.saved = SavedBytes()
        begin = time.perf_counter()
        yield
        if bound is not None:
            self._limit(self._deepest(bound))
        if self._search is not None:
            self._search.note(time.perf_counter() - begin)
            self._schedule.in_flight = self._search.depth

    def _deepest(self, bound: int) -> int:
        kept = {}
        for stage in self._stages:
            assert stage.saved is not None
            kept[stage.stage_index] = stage.saved.total
            stage.saved = None
        deepest = deepest_within(bound, kept, self._num_stages, self._chunks)
        found = self._mesh.all_gather_object([deepest, sum(kept.values())])
        limit, needed = min(d for d, _ in found), max(size for _, size in found)
        if limit == 0:
            raise ValueError(
                f"in_flight_bytes={bound}: one microbatch keeps {needed} bytes; allow more, use "
                "more chunks, or recompute=True"
            )
        return int(limit)


class DepthSearch:
    """Tries depths in turn, then keeps one.

    Args:
        num_stages: of the pipeline.
        chunks: microbatches a step, beyond which no depth goes.
        limit: the deepest that memory allows.
        total: sums numbers over all ranks, so that all choose alike.
    """

    def __init__(
        self,
        num_stages: int,
        chunks: int,
        limit: int,
        total: Callable[[Sequence[float]], list[float]],
    ) -> None:
        tried = {num_stages, 2 * num_stages - 1, (2 * num_stages - 1 + chunks) // 2, chunks}
        self.candidates = sorted({max(1, min(depth, chunks, limit)) for depth in tried})
        self._total = total
        self._seconds: list[list[float]] = [[] for _ in self.candidates]
        self._trying = 0

    @property
    def finished(self) -> bool:
        """Whether the choice is made."""
        return self._trying == len(self.candidates) or len(self.candidates) == 1

    @property
    def depth(self) -> int:
        """The depth for the next step."""
        return self.candidates[0 if self.finished else self._trying]

    def note(self, seconds: float) -> None:
        """Takes down how long a step took at `depth`; on every rank, after the same steps."""
        if self.finished:
            return
        times = self._seconds[self._trying]
        times.append(seconds)
        if len(times) <= _TRIALS:
            return
        self._trying += 1
        if self._trying == len(self.candidates):
            sums = self._total([statistics.median(times[1:]) for times in self._seconds])
            best = min(sums)
            chosen = next(i for i, s in enumerate(sums) if s <= best * (1 + _WORTH))
            self.candidates = [self.candidates[chosen]]


def deepest_within(bound: int, kept: dict[int, int], num_stages: int, chunks: int) -> int:
    """The largest depth with which a rank keeps at most ``bound`` bytes of activations.

    Args:
        bound: bytes.
        kept: by each stage of this rank, bytes that one microbatch keeps there.
        num_stages: of the pipeline.
        chunks: microbatches a step.

    Returns:
        0 if not even one microbatch fits.
    """
    fitting = [
        depth
        for depth in range(1, chunks + 1)
        if sum(warmup_of(stage, num_stages, depth) * size for stage, size in kept.items()) <= bound
    ]
    return max(fitting, default=0)
