"""RedSync: as Deep Gradient Compression, by thresholds that are searched otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpcomp.compressors import RedSyncTopK, SameSign
from mpcomp.data_parallel.base import Codec, RunInfo
from mpcomp.data_parallel.methods.dgc import MomentumMethod

__all__ = ["RedSync"]

#: From so many elements on (4 MB of fp32) RedSync searches its threshold by bisection.
_LARGE = 1 << 20


@dataclass(frozen=True)
class RedSync(MomentumMethod):
    """RedSync: thresholds by trimming or bisection. Spec ``redsync:0.001``.

    The formulas of `DGC`, with the selection of `RedSyncTopK`. Momentum as there: **the optimizer
    must have none**.

    * Source: Fang et al., J. Parallel Distrib. Comput. 2019; momentum with masking as in the
      author's code.
    * State: as of `DGC`.
    * Theory: as of `DGC`.

    Args:
        keep: fraction of the elements to send, in (0, 1].
        momentum: m, in [0, 1).
        nesterov: Nesterov's momentum.
        masking: clear the momentum of what was sent.
        clip: as for `DGC`.
        search: "trimmed", "binary", or "auto": trimmed up to 4 MB of fp32, binary above.
        same_sign: send indices and one mean, of the largest positive and negative elements by
            turns. As in the paper not for the output layer: name it in ``plain``.
        plain: name of a parameter whose values are sent as they are, with ``same_sign``.

    Raises:
        ValueError: a setting outside those.
    """

    search: str = "auto"
    same_sign: bool = False
    plain: str | None = None
    spec: ClassVar[str] = "redsync"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search != "auto":
            RedSyncTopK(self.keep, search=self.search)  # raises for another
        if self.plain is not None and not self.same_sign:
            raise ValueError(f"plain={self.plain!r} without same_sign=True: leave it out")

    def check(self, run: RunInfo) -> None:
        if self.plain is not None and self.plain not in run.metas:
            raise ValueError(
                f"plain={self.plain!r}: no parameter of two dimensions or more has this name"
            )

    def codec(self, step: int, name: str, run: RunInfo) -> Codec:
        if self.same_sign and name != self.plain:
            return SameSign(self.keep, sign=("positive", "negative")[step % 2])
        search = self.search
        if search == "auto":
            search = "trimmed" if run.metas[name].numel <= _LARGE else "binary"
        return RedSyncTopK(self.keep, search=search)
