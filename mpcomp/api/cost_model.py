"""Does compression pay here? An estimate from what a run has measured.

A link carries its messages while stages compute. Where it takes longer than they do it sets the
time of a step, else it is hidden. So, with the bytes of the busiest link in one direction::

    step without compression >= max(step with - coding, dense bytes / bandwidth)
    break-even bandwidth      = dense bytes / (busiest rank's computing + coding)

Above the break-even bandwidth a dense step could hide its links too, and compression gains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["CostModel", "RankTimes"]


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one step on one rank, on average.

    Attributes:
        step_s: from call to return.
        waited_s: of these, waiting for messages.
        coding_s: of these, encoding and decoding.
    """

    step_s: float
    waited_s: float
    coding_s: float


@dataclass(frozen=True)
class CostModel:
    """Time and bytes of a step, with compression and without.

    Attributes:
        step_s: measured, the slowest rank's.
        busy_s: computing and coding of the busiest rank.
        coding_s: the most that a rank spends encoding and decoding.
        wire_bytes: of the busiest link in one direction.
        dense_bytes: what that link would carry uncompressed.
        bandwidth_mbps: of the slowest link, measured; None if unknown.
        uncompressed_step_s: the least that a step without compression would take; None if the
            bandwidth is unknown.
        break_even_mbps: bandwidth above which compression gains nothing.
    """

    step_s: float
    busy_s: float
    coding_s: float
    wire_bytes: float
    dense_bytes: float
    bandwidth_mbps: float | None
    uncompressed_step_s: float | None
    break_even_mbps: float

    @classmethod
    def of(
        cls,
        ranks: Sequence[RankTimes],
        wire_bytes: float,
        dense_bytes: float,
        bandwidth_mbps: float | None,
    ) -> CostModel:
        """The estimate, from each rank's times and the busiest link's bytes a step."""
        step = max(times.step_s for times in ranks)
        coding = max(times.coding_s for times in ranks)
        busy = max(times.step_s - times.waited_s for times in ranks)
        without = None
        if bandwidth_mbps is not None:
            without = max(step - coding, dense_bytes * 8e-6 / bandwidth_mbps)
        return cls(
            step_s=step,
            busy_s=busy,
            coding_s=coding,
            wire_bytes=wire_bytes,
            dense_bytes=dense_bytes,
            bandwidth_mbps=bandwidth_mbps,
            uncompressed_step_s=without,
            break_even_mbps=dense_bytes * 8e-6 / busy,
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures under their names."""
        return asdict(self)

    def sentences(self) -> list[str]:
        """Sentences for a reader."""
        lines = [
            f"a step takes {_time(self.step_s)}, of which {_time(self.coding_s)} go into coding; "
            f"the busiest link carries {self.wire_bytes / 1e6:.3f} MB a step one way, "
            f"{self.dense_bytes / 1e6:.3f} MB dense"
        ]
        if self.bandwidth_mbps is not None and self.uncompressed_step_s is not None:
            gain = self.uncompressed_step_s / self.step_s
            verdict = "compression pays" if gain > 1 else "compression does not pay"
            lines.append(
                f"at the measured {_rate(self.bandwidth_mbps)} a step without compression would "
                f"take at least {_time(self.uncompressed_step_s)} ({gain:.2f} times as long): "
                f"{verdict}; it would gain nothing on links above {_rate(self.break_even_mbps)}"
            )
        return lines


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _rate(mbps: float) -> str:
    return f"{mbps / 1e3:.1f} Gbit/s" if mbps >= 1e3 else f"{mbps:.1f} Mbit/s"
