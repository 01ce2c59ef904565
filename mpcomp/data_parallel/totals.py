"""Counts and times of a rank's exchange with its replicas."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mpcomp.data_parallel.item import Item, Tally

__all__ = ["Totals", "density"]


@dataclass
class Totals:
    """Counts and times of this rank since it began.

    Attributes:
        steps: that were exchanged, skipped ones counted.
        wire_bytes: bytes of its messages.
        dense_bytes: what they would have been uncompressed.
        floats: numbers of 32 bits in its messages, without indices.
        traffic_bytes: what went over its link, with the messages' copies to several others.
        dense_traffic_bytes: what uncompressed gradients would have put on its link.
        encode_s: seconds of encoding (and of beginning to send).
        wait_s: seconds of waiting for other replicas and the network.
        decode_s: seconds of decoding.
    """

    steps: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    floats: float = 0.0
    traffic_bytes: float = 0.0
    dense_traffic_bytes: float = 0.0
    encode_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0

    def count(self, tally: Tally, *, traffic_bytes: float, dense_traffic_bytes: float) -> None:
        """Counts a step."""
        self.steps += 1
        self.wire_bytes += tally.wire_bytes
        self.dense_bytes += tally.dense_bytes
        self.floats += tally.floats
        self.traffic_bytes += traffic_bytes
        self.dense_traffic_bytes += dense_traffic_bytes

    @property
    def ratio(self) -> float:
        """Wire bytes over dense bytes; NaN before the first step."""
        return self.wire_bytes / self.dense_bytes if self.dense_bytes else math.nan

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds of a block to one of the three times."""
        start = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)


def density(items: Sequence[Item]) -> float:
    """Elements that are not zero in the results of parameters that may go compressed."""
    looked = [item for item in items if item.compressible]
    total = sum(item.numel for item in looked)
    if not total:
        return math.nan
    return sum(int(item.gradient.count_nonzero()) for item in looked) / total
