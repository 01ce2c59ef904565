"""The network between replicas, and the cheapest way over it for a message of so many bytes.

With n replicas, latency a (s) and bandwidth b (bytes/s) of each one's link, a dense gradient of D
bytes and a message of B bytes take about

===========  =====================================================  ==============================
path         seconds                                                for
===========  =====================================================  ==============================
sum          min(2 (n-1) a, 2 ceil(log2 n) a) + 2 (n-1)/n B/b       payloads that may be added
gather       (n-1) a + (n-1) B/b                                    few replicas
two-phase    2 (n-1) a + 2 (n-1)/n B/b                              many replicas
dense        as for a sum, of D bytes                               what compresses too little
===========  =====================================================  ==============================

The two terms of a sum's latency are those of a ring and of recursive halving and doubling, of which
a backend takes the better one. A gathered message goes to all others, so its traffic grows with n,
and the sum of n selections is up to n times as dense as one. On the two-phase path replica i forms
the mean of the i-th piece of every parameter, compresses it again (what that leaves out is
remembered there) and sends it to all: traffic and density stay those of one message. But what is
compressed twice arrives later, which costs quality, so this path is only taken where it is less
than half as expensive as to gather: from five replicas on, or so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from mpcomp.compressors import Compressor

__all__ = ["PATHS", "ReplicaNetwork"]

PATHS: Final = ("auto", "sum", "gather", "two-phase")
#: What weighs on the path that compresses twice.
TWICE: Final = 2.0


@dataclass(frozen=True)
class ReplicaNetwork:
    """Latency, bandwidth and layout of the links between replicas.

    Args:
        path: "auto" for the cheapest; "gather" or "two-phase" for all payloads that cannot be
            added ("sum" insists on methods whose payloads can).
        latency_ms: of a message between two replicas.
        bandwidth_mbps: megabits a second of each replica's link.
        per_machine: replicas on one machine, neighbours in rank; above 1 gradients are averaged
            inside each machine first, and only the first replica of each takes part in the
            compressed exchange between machines.
        inside: compressor inside a machine; None averages as it is.
        smallest: number of elements from which on a parameter is compressed, if it has two
            dimensions or more; all others go together, uncompressed.
        small: 16-bit type that those others are rounded to on their way, ``Cast("bf16")`` or
            ``Cast("fp16")`` (which clips beyond 65504, a loss scale included); None for their own.
            Where much is compressed they are much of what is left to send.

    Raises:
        ValueError: a setting outside those.
        TypeError: ``inside`` is no compressor, or ``small`` no such type.
    """

    path: str = "auto"
    latency_ms: float = 0.1
    bandwidth_mbps: float = 1000.0
    per_machine: int = 1
    inside: Compressor | None = None
    smallest: int = 1024
    small: Compressor | None = None

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise ValueError(f"path={self.path!r}: expected one of {', '.join(PATHS)}")
        if not (self.latency_ms >= 0 and math.isfinite(self.latency_ms)):
            raise ValueError(f"latency_ms={self.latency_ms}: expected milliseconds, 0 or more")
        if not (self.bandwidth_mbps > 0 and math.isfinite(self.bandwidth_mbps)):
            raise ValueError(
                f"bandwidth_mbps={self.bandwidth_mbps}: expected megabits a second, more than 0"
            )
        if self.per_machine < 1:
            raise ValueError(f"per_machine={self.per_machine}: expected 1 replica or more")
        if self.smallest < 1:
            raise ValueError(f"smallest={self.smallest}: expected 1 element or more")
        if self.small is not None and not _two_bytes(self.small):
            raise TypeError(f"small={self.small!r}: expected Cast('bf16') or Cast('fp16')")
        if self.inside is not None and not isinstance(self.inside, Compressor):
            raise TypeError(f"inside={self.inside!r}: expected a compressor such as Cast('bf16')")
        if self.inside is not None and self.per_machine == 1:
            raise ValueError(f"inside={self.inside} with per_machine=1: give per_machine as well")

    def check_replicas(self, num_replicas: int) -> None:
        """Raises ValueError if so many replicas cannot be shared out among such machines."""
        if num_replicas % self.per_machine:
            raise ValueError(
                f"per_machine={self.per_machine} with {num_replicas} replicas: expected a divisor "
                f"of {num_replicas}, as every machine holds as many"
            )

    def check_path(self, summable: bool) -> None:
        """Raises ValueError for ``path="sum"`` and a payload that cannot be added."""
        if self.path == "sum" and not summable:
            raise ValueError(
                "path='sum' for a method whose messages cannot be added elementwise: use randomk, "
                "randomblock, fp16 or powersgd, or path='gather'"
            )

    def seconds(self, path: str, num_bytes: float, num_replicas: int) -> float:
        """The time of a path for messages of so many bytes a replica; see the module's table."""
        n = num_replicas
        latency = self.latency_ms / 1000
        transfer = num_bytes * 8 / (self.bandwidth_mbps * 1e6)
        if path in ("sum", "dense"):
            rounds = min(2 * (n - 1), 2 * math.ceil(math.log2(n))) if n > 1 else 0
            return rounds * latency + 2 * (n - 1) / n * transfer
        if path == "gather":
            return (n - 1) * latency + (n - 1) * transfer
        assert path == "two-phase"
        return 2 * (n - 1) * latency + 2 * (n - 1) / n * transfer

    def choose(
        self, *, summable: bool, wire_bytes: float, dense_bytes: float, num_replicas: int
    ) -> str:
        """The path for one message: "sum", "gather", "two-phase", or "dense" if that is cheaper.

        Raises:
            ValueError: ``path="sum"`` for a payload that cannot be added.
        """
        self.check_path(summable)
        if summable:
            return "sum"
        if self.path != "auto":
            return self.path
        gather = self.seconds("gather", wire_bytes, num_replicas)
        two_phase = self.seconds("two-phase", wire_bytes, num_replicas)
        dense = self.seconds("dense", dense_bytes, num_replicas)
        if gather > dense:
            return "two-phase" if two_phase < dense else "dense"
        return "two-phase" if TWICE * two_phase < gather else "gather"


def _two_bytes(small: object) -> bool:
    """Whether it rounds to a 16-bit type and does no more."""
    dtype = small.wire_dtype if isinstance(small, Compressor) else None
    return dtype is not None and dtype.itemsize == 2
