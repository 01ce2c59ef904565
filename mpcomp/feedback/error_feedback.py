"""Error feedback: what a message left out is added to the next one. State at the sender only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mpcomp.compressors.base import Compressor, Selecting
from mpcomp.feedback.base import EvalChoice, Feedback
from mpcomp.feedback.memory import ErrorMemory, State

__all__ = ["EFMixed", "ErrorFeedback"]


@dataclass(frozen=True)
class ErrorFeedback(ErrorMemory, Feedback):
    """m = C(x + d e), e <- x + d e - m. Spec ``ef+topk:0.1``.

    What a message leaves out is added to the next one.

    * Source: Seide et al., Interspeech 2014; Stich et al., NeurIPS 2018; Rudakov et al., 2023, for
      cuts; ``decay`` from SparseLoCo (Sarfi et al., 2025).
    * State: the residual e, at the sender: of each row of a microbatch at a cut, of each parameter
      on each replica.
    * Theory: SGD on gradients with a contraction C and d = 1 (Stich et al. 2018; Karimireddy et
      al., ICML 2019): nothing is lost, as over any number of steps the sum of what was sent plus
      the residual is the sum of what was to be sent. None that we know of for activations, for
      Adam, or for d < 1.

    Args:
        inner: compressor of x + d e.
        storage: "fp32", "fp16", "bf16" or bits (1-8) of the stored residual.
        location: "device", "cpu", or a folder for files.
        lr_scaled: keep the residual in units of learning rate times gradient, as the theory does,
            so that it follows a change of the learning rate (gradients only; the pipeline must
            know it: ``pipe.follow(optimizer)``).
        eval: "compressed" or "raw".
        decay: d, in (0, 1]: what waits longer counts less, as in SparseLoCo (0.95).

    Raises:
        TypeError: inner is not a compressor.
        ValueError: a setting outside those, or an inner compressor with unbiased=True.
    """

    inner: Compressor
    storage: str | int = "fp32"
    location: str = "device"
    lr_scaled: bool = False
    eval: EvalChoice = "compressed"
    decay: float = 1.0
    spec: ClassVar[str] = "ef"
    rows_wait: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        if not 0 < self.decay <= 1:
            raise ValueError(
                f"decay={self.decay}: expected a part of the residual in (0, 1]; 1 keeps it whole"
            )


@dataclass(frozen=True)
class EFMixed(ErrorFeedback):
    """Half of the budget for the tensor, half for the residual. Spec ``efmixed+topk:0.1``.

    ``second="residual"``: m = C_(k/2)(x) + C_(k/2)(e), e <- e + x - m: each selects from its own.
    An element selected by both halves is their sum. The plausible alternative,
    ``second="remainder"``: m1 = C_(k/2)(x), m = m1 + C_(k/2)(x - m1 + e).

    * Source: named by Rudakov et al., 2023, without a formula that could be verified; both formulas
      are this project's own reading.
    * State: as of `ErrorFeedback`, at cuts alone.
    * Theory: none; as with `ErrorFeedback` the sum of what was sent plus the residual is the sum of
      what was to be sent.

    Args:
        inner: a selecting compressor (topk, randomk, randomblock); each half keeps keep / 2.
        second: "residual" or "remainder".

    Other arguments and errors as for `ErrorFeedback`.
    """

    second: str = "residual"
    spec: ClassVar[str] = "efmixed"
    adaptable: ClassVar[bool] = False
    between_replicas: ClassVar[bool] = False
    rows_wait: ClassVar[bool] = False  # each half selects from a tensor of its own

    def check(self) -> None:
        super().check()
        if not isinstance(self.inner, Selecting):
            raise ValueError(
                f"inner={self.inner}: EFMixed halves the number of elements, so it goes round "
                "topk, randomk or randomblock"
            )
        if self.second not in ("residual", "remainder"):
            raise ValueError(f"second={self.second!r}: EFMixed knows residual, remainder")

    @property
    def coders(self) -> tuple[Compressor, ...]:
        assert isinstance(self.inner, Selecting)
        half = dataclasses.replace(self.inner, keep=self.inner.keep / 2)  # type: ignore[type-var]
        return (half, half)

    def part(
        self, index: int, x: Tensor, target: Tensor, said: Sequence[Tensor], state: State
    ) -> Tensor:
        if index == 0:
            return x
        error = self.due(state)
        return error if self.second == "residual" else error + (x - said[0])
