"""EF21 and AQ-SGD: both ends keep the same estimate of a tensor and send what corrects it.

    d = C(x - h),  h <- h + d,  the receiver works with h

One algorithm with two ways to find the slot of a row: EF21 by its place (microbatch, row), AQ-SGD
by the sample it is. The estimate is advanced by the *decoded payload* alone, with the same
operations at both ends, so the two stay equal bit for bit. A row without an estimate is sent by
itself (raw, or with a milder compressor); a microbatch may mix both kinds, and because both ends
hold the flags, the layout is known without a message. Between replicas each sender has an estimate
of its own, and all receivers one of the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.along import AlongVectors
from mpcomp.compressors.base import Compressor
from mpcomp.core.context import Key, MessageContext, SampleIds, TensorMeta
from mpcomp.core.spec import SpecValue, shown
from mpcomp.feedback.base import EvalChoice, Feedback, row_keys
from mpcomp.feedback.memory import Field, Sent, Side, State

__all__ = ["AQSGD", "EF21"]


@dataclass(frozen=True)
class EF21(Feedback):
    """d = C(x - h), h <- h + d, the receiver uses h. Spec ``ef21+topk:0.1``.

    Between replicas h begins at zero: every replica i keeps h_i of its own gradient, and H, the
    mean of all of them, which is the same on all.

    * Source: Richtarik, Sokolov, Fatkhullin, NeurIPS 2021, algorithm 2; Rudakov et al., 2023, for
      cuts.
    * State: the estimate h, equal bit for bit at both ends: of each row of a microbatch at a cut;
      of each parameter on each replica, beside the mean H of all, which is the result.
    * Theory: gradients of all data, with a contraction C, and without the bound on gradients that
      `ErrorFeedback`'s assumes; gradients of small batches may keep it from converging
      (Fatkhullin, Tyurin, Richtarik, NeurIPS 2023). For a fixed input h converges to it
      geometrically. None that we know of for activations.

    Args:
        inner: compressor of the difference.
        first: compressor of a row that has no estimate yet; None sends it raw (exact start).
            ``first=inner`` is the start from h = 0.
        storage: "fp32", "fp16", "bf16" or bits (1-8) of the stored estimate, at both ends.
        location: "device", "cpu", or a folder for files.
        cap_bytes: estimates are kept up to so many bytes at each end; rows beyond it are always
            sent as first ones. None for no cap.
        eval: "compressed", "first" or "raw".

    Raises:
        TypeError: inner or first is not a compressor.
        ValueError: a setting outside those, or a compressor with unbiased=True.
    """

    inner: Compressor
    first: Compressor | None = None
    storage: str | int = "fp32"
    location: str = "device"
    cap_bytes: int | None = None
    eval: EvalChoice = "compressed"
    spec: ClassVar[str] = "ef21"

    def fields(self, slot: TensorMeta) -> Mapping[str, Field]:
        return {"own": Field(Side.SENDER, mirrors="mean"), "mean": Field(Side.RECEIVER)}

    def compensate(self, x: Tensor, state: State) -> Tensor:
        return x - state["own"]

    def sent(self, sent: Sent, state: State) -> None:
        state["own"] = sent.x - sent.left

    def received(self, mean: Tensor, state: State) -> Tensor:
        total = state["mean"] + mean
        state["mean"] = total
        return total

    def dense(self, x: Tensor, state: State) -> None:
        state["mean"] = x


@dataclass(frozen=True)
class AQSGD(EF21):
    """The estimate of each training sample, from its last visit. Spec ``aqsgd+quant:4``.

    The first visit of a sample goes raw, later ones send Q(a - m), m <- m + Q(a - m). Every
    training step needs ``sample_ids``. A sample that the first epoch left out (``drop_last``) has
    its first visit when it comes, and goes raw then.

    With ``along=bf16`` a number a token goes besides: what Q leaves out along the gradient g of a
    that came back at the sample's last visit. Both ends have it if ``grad_comp`` is such a memory,
    too::

        e = a - m - Q(a - m),    c = <e, g> / <g, g>,    m <- m + Q(a - m) + c g

    Compression changes the loss by <g, m - a> to first order, which then is nearly zero: what the
    stages before have learned about the sample arrives. What they have learned of others does not
    where Q has a dead zone, and over many steps the run then fits its samples alone.

    Each end of each cut keeps a row for every training sample: num_samples x elements of a
    sample's activation x bytes of an element (4 "fp32", 2 "fp16" and "bf16", bits / 8 and a scale
    a row), and a stage between two cuts is an end of both. 20 000 samples of GPT-2-XL (1024 x
    1600) in "fp16" are 61 GiB an end; ``pipe.state_bytes(batch, num_samples)`` says it for a
    pipeline before the run. What memory does not hold goes to ``location=``, "cpu" or a folder on
    a local disk; ``pipe.prefetch(ids)`` then reads the rows of the next batch while this one is
    trained on. ``cap_bytes=`` bounds an end instead: samples that find it full go raw for ever,
    which the report's wire bytes show. Rows have one shape: pad all batches to one length, as a
    batch of another starts all of them anew.

    * Source: Wang et al., NeurIPS 2022, algorithm 1; ``along`` is this project's own.
    * State: the estimate m of each training sample, equal bit for bit at both ends of each cut.
    * Theory: SGD, with an unbiased Q of ||x - Q(x)|| <= c ||x||, c < sqrt(1/2); the bound grows
      with the number of samples. Neither `TopK` nor rounding to the nearest is unbiased, and
      augmentation moves a sample between two visits.

    Args:
        key: what a slot is found by: "sample" (``sample_ids`` [b]), "augmented" (``sample_ids``
            [b, 2]: id and augmentation seed), or "batch" (``sample_ids`` the index of a batch
            whose composition is fixed).
        along: compressor of the numbers c, [tokens, 1]; for ``act_comp``. None for no such part.

    Other arguments and errors as for `EF21`.
    """

    key: str = "sample"
    along: Compressor | None = None
    spec: ClassVar[str] = "aqsgd"
    by_sample: ClassVar[bool] = True
    adaptable: ClassVar[bool] = False
    between_replicas: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        if self.key not in ("sample", "augmented", "batch"):
            raise ValueError(f"key={self.key!r}: AQSGD knows sample, augmented, batch")
        if self.along is not None and not isinstance(self.along, Compressor):
            raise TypeError(f"along={shown(self.along)}: expected a compressor, or None")

    def check_place(self, argument: str) -> None:
        super().check_place(argument)
        if argument != "act_comp" and self.looks_at_gradients:
            raise ValueError(
                f"{argument}={self}: along= looks at the gradients of an activation, so it is for "
                "act_comp"
            )

    def check_beside(self, other: SpecValue, boundary: int) -> None:
        alike = isinstance(other, AQSGD) and other.key == self.key
        if self.looks_at_gradients and not alike:
            raise ValueError(
                f"act_comp={self} at boundary {boundary} with grad_comp={other}: along= needs the "
                "gradients of a sample's last visit, so grad_comp must be an aqsgd with the same "
                "key="
            )

    @property
    def looks_at_gradients(self) -> bool:  # type: ignore[override]
        return self.along is not None

    @property
    def selects(self) -> bool:  # type: ignore[override]
        return self.along is None and super().selects

    def coders_of(
        self, keys: Sequence[Key], context: MessageContext, meta: TensorMeta
    ) -> tuple[Compressor, ...]:
        if self.along is None:
            return self.coders

        def vectors() -> Tensor:
            if context.gradients is None:
                return torch.zeros(meta.shape, dtype=torch.float32)
            return meta.unflatten(context.gradients(keys))

        return (*self.coders, AlongVectors(vectors, self.along))

    def part(
        self, index: int, x: Tensor, target: Tensor, said: Sequence[Tensor], state: State
    ) -> Tensor:
        return target - said[0] if index else target

    def slots(self, context: MessageContext, num_rows: int) -> Sequence[Key]:
        ids = context.sample_ids
        if self.key == "batch":
            if not isinstance(ids, int):
                raise ValueError(
                    "AQSGD(key='batch') needs sample_ids=<index of the batch>, a whole number, "
                    f"in every training step; got {_described(ids)}"
                )
            return [(ids, *key) for key in row_keys(context, num_rows)]
        width = {"sample": 1, "augmented": 2}[self.key]
        if not isinstance(ids, tuple) or any(len(key) != width for key in ids):
            form = "[batch]" if width == 1 else "[batch, 2] (id, augmentation seed)"
            raise ValueError(
                f"AQSGD(key={self.key!r}) needs sample_ids {form} in every training step; "
                f"got {_described(ids)}"
            )
        assert len(ids) == num_rows
        return ids

    def keys_to_come(
        self, ids: SampleIds, known: Callable[[Sequence[Key]], list[bool]]
    ) -> Sequence[Key]:
        if not isinstance(ids, int):
            return ids or ()
        # Of a batch by number all microbatches; their rows were stored in ascending order.
        keys: list[Key] = []
        key = (ids, 0, 0)
        while known([key])[0]:
            keys.append(key)
            key = (ids, key[1], key[2] + 1)
            if not known([key])[0]:
                key = (ids, key[1] + 1, 0)
        return keys


def _described(ids: object) -> str:
    if isinstance(ids, tuple):
        return f"ids of {len(ids[0]) if ids else 0} numbers each"
    return "none" if ids is None else repr(ids)
