"""ConEF: error feedback whose memory is compressed too.

With p = g + (1 - beta) e the error after a message Delta is beta e + p - Delta = e + (g - Delta):
whatever beta is, the error is all that was not sent so far, and only a part of it is added to the
next gradient. A count sketch is linear, so that

    S <- S + sketch(g - Delta)

holds exactly that sum, and is never decoded to be sketched again, which would multiply each cell by
the number of its elements (`load`) and diverge within ten steps. What is decoded is noisy: an
element comes back with all others of its cell. So a row of which everything is sent multiplies a
cell by 1 - (1 - beta) load, and there is no bound on the error unless (1 - beta) load < 2.

The second memory of iConEF holds C of what the first one lost: its error is e + d - first, where d
= g - Delta, and changes by d - (first, new) + (first, old). What the first memory takes over from a
sketch is as noisy as what is sent, so it takes the same part of it, 1 - beta: all of it would
multiply a cell by 1 - load, and diverge.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Coding, Compressor
from mpcomp.core.context import Key, TensorMeta, zero_padding
from mpcomp.core.spec import shown
from mpcomp.core.wire import Payload
from mpcomp.feedback.base import EvalChoice, Feedback
from mpcomp.feedback.memory import Field, FieldState, FieldStorage, Memory, Sent, Side, Slots, State
from mpcomp.feedback.sketch import HASHES, VectorSketch
from mpcomp.feedback.state import Rows
from mpcomp.feedback.store import SlotStore, StoragePlan

__all__ = ["IMPROVED", "ConEF"]

#: iConEF: what the first of two error memories is compressed with.
IMPROVED = ("v1", "v2")


#: The memories, the first of which holds the error, the second what the first has lost of it.
_ERRORS = ("error", "second_error")


@dataclass(frozen=True)
class ConEF(Feedback):
    """Contracted error feedback. Spec ``conef:0.2+randomblock:0.1``.

    m = Q(p), p = g + (1 - beta) e, e <- C(beta e + p - m): partial error feedback whose error e is
    kept compressed by an unbiased C, a count sketch (`mpcomp.feedback.sketch`) of ``fraction``
    cells per element. "60 % of the memory saved" is fraction=0.4.

    The theory keeps the error of eta g; here that is so with ``lr_scaled=True``, and otherwise, as
    in the authors' code, an error is as large as the gradients were, also after the rate has
    fallen.

    * Source: Li et al., "Contractive error feedback for gradient compression", 2023, with the
      incremental update of the authors' code.
    * State: the sketch S, at the sender: with cells of its own for each row of a parameter [first
      dim, all others] on each replica; at a cut for each row of a microbatch.
    * Theory: SGD and smooth functions, with E||Q(x) - x||^2 <= delta ||x||^2, delta < 1, and an
      unbiased C; nothing of Adam, LAMB or momentum in the optimizer, with which it is used all the
      same.

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
    eval: EvalChoice = "compressed"
    spec: ClassVar[str] = "conef"
    adaptable: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
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
        elif not self.error.is_unbiased:
            raise ValueError(
                f"error={self.error}: what it loses is not zero on average, and would add up; use "
                "QSGD(8), Quantize(8, rounding='stochastic'), or None for a count sketch"
            )
        elif self.error.variable_length:
            raise ValueError(
                f"error={self.error}: what is kept has room for as much as it is given, so its "
                "length cannot vary; use QSGD(8), or None for a count sketch"
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
                stacklevel=5,
            )

    def sketch(self, slot: TensorMeta) -> VectorSketch:
        """The sketch of a slot, with cells of its own for each row of a parameter."""
        columns = slot.row_numel if slot.num_rows > 1 else None
        return VectorSketch(slot.numel, self.fraction, columns=columns, hash=self.hash)

    def check_place(self, argument: str) -> None:
        super().check_place(argument)
        if self.error is not None or self.improved is not None:
            raise ValueError(
                f"{self}: error and improved are for gradients between replicas (dp_comp); at a "
                "cut the error is kept as one count sketch, so leave them out"
            )

    # -- formulas -------------------------------------------------------------------------------

    def fields(self, slot: TensorMeta) -> Mapping[str, Field]:
        coders = [self.inner if self.improved == "v2" else self.error]
        if self.improved is not None:
            coders.append(self.error)
        return {
            name: Field(Side.SENDER, kept=self._kept(coder, slot), merge="owed")
            for name, coder in zip(_ERRORS, coders, strict=False)
        }

    def _kept(self, coder: Compressor | None, slot: TensorMeta) -> FieldStorage:
        if coder is None:
            return _Sketched(self.sketch(slot))
        return _Payloads(coder, slot if coder.by_matrix else TensorMeta((1, slot.numel)))

    @property
    def _errors(self) -> tuple[str, ...]:
        return _ERRORS[: 1 if self.improved is None else 2]

    def compensate(self, x: Tensor, state: State) -> Tensor:
        if not any(name in state for name in self._errors):
            return x
        known = [state[name] for name in self._errors]
        return x + (1 - self.beta) * sum(known[1:], known[0])

    def sent(self, sent: Sent, state: State) -> None:
        rest = 1 - self.beta
        before = [state[name] for name in self._errors]
        known = sum(before[1:], before[0])
        change = sent.missing(rest * known)  # g - Delta
        error = known + change
        if self.error is None:  # a sketch last, which goes by the change alone
            error = sum((rest * later for later in before[1:]), before[0]) + change
        for name, was in zip(self._errors, before, strict=True):
            now = state.put(name, error, change)
            error, change = error - now, change - (now - was)

    def dense(self, x: Tensor, state: State) -> None:
        for name in self._errors:
            state.clear(name)

    def second_stage_memory(self) -> Memory:
        return self


def _least(rest: float) -> float:
    """The smallest fraction 1 / n with n (1 - beta) < 2, rounded up to be written."""
    return math.ceil(1e4 / max(1, math.ceil(2 / rest - 1e-9) - 1)) / 1e4


# -- how errors are kept ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sketched(FieldStorage):
    """As a count sketch of each row, which is told of changes alone."""

    sketch: VectorSketch

    def state(self, plan: StoragePlan, device: torch.device) -> FieldState:
        return _Sketches(self.sketch, SlotStore(self.sketch.cells, plan, device))


class _Sketches(Rows):
    """Cells in the precision of the storage plan; what is read is decoded from them."""

    def __init__(self, sketch: VectorSketch, store: SlotStore) -> None:
        super().__init__(store)
        self._sketch = sketch

    def read(self, slots: Slots) -> Tensor:
        return zero_padding(self._sketch.estimate(self.recall(slots)), slots.padded)

    def stage(self, slots: Slots, value: Tensor, change: Tensor | None) -> tuple[Any, Tensor]:
        assert change is not None, "a sketch that was decoded cannot be sketched again"
        # A cell may hold padded positions too, which this message says nothing of.
        cells = self.recall(slots) + self._sketch.sketch(zero_padding(change, slots.padded))
        return (cells if slots.unit == 1 else cells / slots.unit), self._sketch.estimate(cells)

    def cleared(self, slots: Slots) -> Any:
        shape = len(slots.keys), self.numel
        return torch.zeros(shape, dtype=torch.float32, device=self.store.device)


@dataclass(frozen=True)
class _Payloads(FieldStorage):
    """As the payload of a compressor, of one slot alone: between replicas.

    Attributes:
        compressor: an unbiased one.
        meta: the shape in which it is given the row.
    """

    compressor: Compressor
    meta: TensorMeta

    def state(self, plan: StoragePlan, device: torch.device) -> FieldState:
        return _Payload(self.compressor, self.meta, device)


class _Payload(FieldState):
    """The payload, and the seed of choices that decoding must draw again."""

    def __init__(self, compressor: Compressor, meta: TensorMeta, device: torch.device) -> None:
        self._compressor = compressor
        self._meta = meta
        self._device = device
        self._held: tuple[Payload, Tensor] | None = None

    @property
    def row_bytes(self) -> int:
        return self._compressor.wire_bytes(self._meta)

    def known(self, keys: Sequence[Key]) -> list[bool]:
        return [self._held is not None for _ in keys]

    def read(self, slots: Slots) -> Tensor:
        if self._held is None:
            return torch.zeros(1, self._meta.numel, dtype=torch.float32, device=self._device)
        return self._decoded(*self._held) * slots.unit

    def stage(self, slots: Slots, value: Tensor, change: Tensor | None) -> tuple[Any, Tensor]:
        assert slots.draw is not None and slots.padded is None
        seed = torch.tensor([slots.draw(False).initial_seed()])
        x = (value / slots.unit).reshape(self._meta.shape)
        payload = self._coding(seed).compress(x)
        return (payload, seed), self._decoded(payload, seed) * slots.unit

    def cleared(self, slots: Slots) -> Any:
        raise AssertionError("between replicas nothing is cleared")

    def write(self, keys: Sequence[Key], staged: Any) -> None:
        self._held = staged

    def _decoded(self, payload: Payload, seed: Tensor) -> Tensor:
        return self._coding(seed).decompress(payload).reshape(1, -1)

    def _coding(self, seed: Tensor) -> Coding:
        return Coding(self._compressor, self._meta, partial(_generator, seed))

    def state_dict(self, name: str) -> dict[str, Tensor]:
        if self._held is None:
            return {}
        payload, seed = self._held
        return {f"{name}:seed": seed, **{f"{name}:{i}": part for i, part in enumerate(payload)}}

    def load_state_dict(self, name: str, state: Mapping[str, Tensor]) -> None:
        layout = self._compressor.layout(self._meta)
        parts = tuple(state[f"{name}:{i}"] for i in range(len(layout)))
        for part, meta in zip(parts, layout, strict=True):
            if tuple(part.shape) != meta.shape:
                raise ValueError(
                    f"{name} is of shape {list(part.shape)}, here it has {list(meta.shape)}: use "
                    "the same model"
                )
        self._held = parts, state[f"{name}:seed"].cpu()


def _generator(seed: Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed))
