"""ConEF: error feedback whose memory is compressed too.

With p = g + (1 - beta) e the error after a message Delta is beta e + p - Delta = e + (g - Delta):
whatever beta is, the error is all that was not sent so far, and only a part of it is added to the
next gradient. A count sketch is linear, so that

    S <- S + sketch(g - Delta)

holds exactly that sum, and is never decoded to be sketched again, which would multiply each cell by
the number of its elements (`load`) and diverge within ten steps. What is decoded is noisy: an
element comes back with all others of its cell. So a row of which everything is sent multiplies a
cell by 1 - (1 - beta) load, and there is no bound on the error unless (1 - beta) load < 2.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.compressors.identity import or_dense
from mpcomp.compressors.qsgd import QSGD
from mpcomp.core.packing import Payload
from mpcomp.core.padding import blanked, padded_positions
from mpcomp.core.spec import shown
from mpcomp.core.step import Visit
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.feedback.base import (
    Feedback,
    Receiver,
    Sender,
    check_inner,
    inner_positions,
    narrow,
    row_keys,
)
from mpcomp.feedback.error_feedback import ErrorFeedback
from mpcomp.feedback.sketch import HASHES, VectorSketch
from mpcomp.feedback.slots import SlotStore, StoragePlan

__all__ = ["IMPROVED", "ConEF"]

#: iConEF: what the first of two error memories is compressed with.
IMPROVED = ("v1", "v2")


@dataclass(frozen=True)
class ConEF(Feedback):
    """Contracted error feedback. Spec ``conef:0.2+randomblock:0.1``.

    m = Q(p), p = g + (1 - beta) e, e <- C(beta e + p - m): partial error feedback whose error e is
    kept compressed by an unbiased C, a count sketch (`mpcomp.feedback.sketch`) of ``fraction``
    cells per element. "60 % of the memory saved" is fraction=0.4. Li, Li & Giannakis, "Contractive
    error feedback for gradient compression", with the incremental update of the authors' code. The
    sketch has cells of its own for each row of a parameter [first dim, all others]; at a cut for
    each row of a microbatch.

    The theory is of SGD, with E||Q(x) - x||^2 <= delta ||x||^2, delta < 1, and of smooth functions;
    it says nothing of Adam, LAMB or momentum in the optimizer, with which it is used all the same.
    It keeps the error of eta g; here that is so with ``lr_scaled=True``, and otherwise, as in the
    authors' code, an error is as large as the gradients were, also after the rate has fallen.

    Args:
        inner: Q. A sum travels cheapest: `RandomBlock` is added up by an all-reduce.
        fraction: cells per element, in (0, 1]; not used where ``error`` is given.
        beta: part of the error that stays behind, in [0, 1). 0 is error feedback.
        error: another unbiased C, such as `QSGD` (between replicas alone).
        improved: iConEF, between replicas alone: a second memory keeps C of what the first one
            lost. "v1": both by C, which must be ``error``, as a sketch loses more than all; "v2":
            the first one by Q.
        hash: "balanced", or "murmur" as in the authors' code, whose fullest cells hold two to three
            times 1 / fraction elements: it needs more cells, or a larger beta, to be stable.
        storage: "fp32", "fp16", "bf16" or bits (1-8) of the cells.
        location: "device", "cpu", or a folder for files.
        lr_scaled: keep the error in units of learning rate times gradient.
        eval: "compressed" or "raw", at a cut.

    Raises:
        TypeError: inner or error is not a compressor.
        ValueError: a setting outside those, a biased ``error``, or a sketch that must diverge:
            (1 - beta) ceil(1 / fraction) of 2 or more.

    Warns:
        UserWarning: fraction below 1 - beta, below which the authors found no setting stable.
    """

    inner: Compressor
    fraction: float = 0.2
    beta: float = 0.9
    error: Compressor | None = None
    improved: str | None = None
    hash: str = "balanced"
    storage: str | int = "fp32"
    location: str = "device"
    lr_scaled: bool = False
    eval: str = "compressed"
    spec: ClassVar[str] = "conef"

    def __post_init__(self) -> None:
        check_inner(self)
        self.plan  # noqa: B018  (raises for a bad storage)
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta}: expected a number in [0, 1); 0 is error feedback")
        if self.improved not in (None, *IMPROVED):
            raise ValueError(f"improved={self.improved!r}: expected {' or '.join(IMPROVED)}")
        if self.improved == "v1" and self.error is None:
            raise ValueError(
                "improved='v1' with a count sketch diverges, as what a sketch loses is larger than "
                "what it keeps: give error=QSGD(8), or use improved='v2'"
            )
        if self.hash not in HASHES:
            raise ValueError(f"hash={self.hash!r}: expected {' or '.join(HASHES)}")
        if self.error is None:
            self._check_sketch()
        elif not isinstance(self.error, Compressor):
            raise TypeError(
                f"error={shown(self.error)}: expected an unbiased compressor such as QSGD(8), or "
                "None for a count sketch"
            )
        elif not _is_unbiased(self.error):
            raise ValueError(
                f"error={self.error}: what it loses is not zero on average, and would add up; use "
                "QSGD(8), Quantize(8, rounding='stochastic'), or None for a count sketch"
            )

    def _check_sketch(self) -> None:
        fraction, beta = self.fraction, self.beta
        if not 0 < fraction <= 1:
            raise ValueError(
                f"fraction={fraction}: a sketch has cells per element of the tensor, more than 0 "
                "and at most 1, where it is as large as the tensor"
            )
        load = math.ceil(1 / fraction - 1e-9)
        if (1 - beta) * load >= 2 - 1e-9:
            raise ValueError(
                f"beta={beta}, fraction={fraction}: a cell that holds {load} elements diverges "
                f"unless (1 - beta) * {load} < 2; use fraction={_least(1 - beta):g} or more, or a "
                f"beta above {1 - 2 / load:g}"
            )
        if fraction < 1 - beta - 1e-9:
            warnings.warn(
                f"ConEF with beta={beta}, fraction={fraction}: the sketch is smaller than 1 - beta "
                f"= {1 - beta:g} of the tensor, below which errors were seen to grow; look at the "
                "loss",
                stacklevel=4,
            )

    @property
    def plan(self) -> StoragePlan:
        """How the cells are stored."""
        return StoragePlan(self.storage, self.location)

    def sketch(self, numel: int, columns: int | None = None) -> VectorSketch:
        """The sketch of a vector, by rows of so many elements."""
        return VectorSketch(numel, self.fraction, columns=columns, hash=self.hash)

    def check_cut(self) -> None:
        if self.error is not None or self.improved is not None:
            raise ValueError(
                f"{self}: error and improved are for gradients between replicas (dp_comp); at a "
                "cut the error is kept as one count sketch, so leave them out"
            )

    def sender(self, meta: TensorMeta, device: torch.device) -> Sender:
        return _SketchSender(self, meta.row_numel, device)

    def receiver(self, meta: TensorMeta, device: torch.device) -> Receiver:
        return self._plain.receiver(meta, device)

    @property
    def _plain(self) -> ErrorFeedback:
        """The method with the same messages."""
        return ErrorFeedback(self.inner)


def _is_unbiased(compressor: Compressor) -> bool:
    stochastic = getattr(compressor, "rounding", None) == "stochastic"
    unbiased = bool(getattr(compressor, "unbiased", False))
    return isinstance(compressor, QSGD) or stochastic or unbiased


def _least(rest: float) -> float:
    """The smallest fraction 1 / n with n (1 - beta) < 2, rounded up to be written."""
    return math.ceil(1e4 / max(1, math.ceil(2 / rest - 1e-9) - 1)) / 1e4


class _SketchSender(Sender):
    """The sending end at a cut: a sketch for each row."""

    def __init__(self, method: ConEF, row_numel: int, device: torch.device) -> None:
        self._sketch = method.sketch(row_numel)
        super().__init__(SlotStore(self._sketch.cells, method.plan, device))
        self._method = method

    def layout(self, meta: TensorMeta, visit: Visit) -> tuple[TensorMeta, ...]:
        return or_dense(self._method.inner, meta).layout(meta)

    def positions(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor | None:
        if or_dense(self._method.inner, meta) != self._method.inner:
            return None
        return inner_positions(self._method.inner, payload, meta, visit, "0")

    def encode(self, x: Tensor, visit: Visit) -> Payload:
        meta = TensorMeta.of(x)
        keys = row_keys(visit, meta.num_rows)
        held = self._recall(visit, keys)
        padded = padded_positions(visit.valid, meta, x.device)
        error = blanked(self._sketch.estimate(held), padded)
        flat = meta.flatten(x).to(torch.float32)
        wanted = flat + (1 - self._method.beta) * error
        coder = or_dense(self._method.inner, meta)
        payload = coder.compress(narrow(meta.unflatten(wanted), x.dtype), visit.draw("0"))
        left = flat - meta.flatten(self.arrived(payload, meta, visit)).to(torch.float32)
        # What sits in a cell may be of padded positions too, which this message says nothing of.
        self._note(visit, keys, held + self._sketch.sketch(blanked(left, padded)))
        return payload

    def arrived(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor:
        coder = or_dense(self._method.inner, meta)
        return coder.decompress(payload, meta, visit.draw("0"))

    def observe_dense(self, x: Tensor, visit: Visit) -> None:
        assert self.store is not None
        keys = row_keys(visit, TensorMeta.of(x).num_rows)
        stale = [key for key, known in zip(keys, self.store.known(keys), strict=True) if known]
        if stale:  # an error that was never stored is zero as it is
            zeros = torch.zeros(len(stale), self.store.row_numel, device=x.device)
            self._note(visit, stale, zeros)
