"""Feedback methods: a memory round a compressor, as a value that has a spec string.

A compressor forgets; a feedback method wraps one and remembers, per *slot* (a row of a microbatch,
a sample, a parameter), what earlier messages left out. Its two ends never talk about state: each
follows from the messages, and from contexts that both hold.

A new method is one class: its fields and formulas (`mpcomp.feedback.memory`), and a spec name. It
then works at a cut, on a tie and between replicas.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import ClassVar, Literal, Self, TypeAlias, get_args

from torch import Tensor

from mpcomp.compressors.base import Compressor, Identity, RoundCompressors, check_contractive
from mpcomp.core.context import Key, MessageContext, SampleIds, TensorMeta
from mpcomp.core.spec import shown
from mpcomp.feedback.memory import Memory, Residual, State
from mpcomp.feedback.store import StoragePlan

__all__ = ["EvalChoice", "Feedback", "row_keys"]

_EvalWord: TypeAlias = Literal["compressed", "first", "raw"]
#: What evaluation may send: see `Feedback.eval`.
EvalChoice: TypeAlias = _EvalWord | Compressor


class Feedback(RoundCompressors, Memory, ABC):
    """A memory round any compressor: a frozen dataclass with at least the field ``inner``.

    Attributes:
        inner: the compressor of targets.
        first: compressor of a slot that has no estimate yet, of methods that mirror a field
            (`mpcomp.feedback.memory.Field`); None sends it raw.
        storage: "fp32", "fp16", "bf16" or bits (1-8) of what is kept.
        location: where: "device", "cpu", or a folder for files.
        cap_bytes: slots are kept up to so many bytes at each end; None for no cap.
        eval: what evaluation sends: "compressed" (the inner compressor's C(x), without state),
            "first" (what a slot without an estimate sends), "raw" (the tensor itself), or a
            compressor of its own, as in ``eval=step/0.15``.
    """

    inner: Compressor
    first: Compressor | None = None
    storage: str | int = "fp32"
    location: str = "device"
    cap_bytes: int | None = None
    eval: EvalChoice = "compressed"
    spec_inner: ClassVar[str | None] = "inner"
    adaptable: ClassVar[bool] = True
    at_cuts: ClassVar[bool] = True
    between_replicas: ClassVar[bool] = True
    #: Whether what is kept of a row that is not sent may wait until it is, as nothing else that is
    #: kept follows from it. Then rows of a tied weight's gradient that are zero are left out.
    rows_wait: ClassVar[bool] = False
    #: Whether an activation's messages look at the estimates that the gradients' method keeps
    #: (`mpcomp.core.context.MessageContext.gradients`).
    looks_at_gradients: bool = False

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Whether the settings that all feedback methods have are valid.

        Raises:
            TypeError: inner or first is not a compressor.
            ValueError: a setting outside those accepted, or an inner compressor with unbiased=True.
        """
        inner = self.inner
        if not isinstance(inner, Compressor):
            raise TypeError(
                f"inner={shown(inner)}: {type(self).__name__} goes round a compressor such as "
                "TopK(0.1) or Quantize(4); one feedback method a link"
            )
        check_contractive(inner, "inside feedback")
        if self.first is not None and not isinstance(self.first, Compressor):
            raise TypeError(f"first={self.first!r}: expected a compressor, or None for raw")
        words = get_args(_EvalWord)
        if not isinstance(self.eval, Compressor) and self.eval not in words:
            raise ValueError(
                f"eval={self.eval!r}: evaluation is {', '.join(words)} or a compressor"
            )
        self.storage_plan  # noqa: B018  (raises for a bad storage or cap)

    def with_coders(self, change: Callable[[Compressor], Compressor]) -> Self:
        settings = [(each.name, getattr(self, each.name)) for each in fields(self)]  # type: ignore[arg-type]
        changed = {name: change(each) for name, each in settings if isinstance(each, Compressor)}
        return replace(self, **changed)  # type: ignore[type-var]

    @property
    def selects(self) -> bool:  # type: ignore[override]
        return len(self.coders) == 1 and self.inner.selects

    @property
    def storage_plan(self) -> StoragePlan:
        return StoragePlan(self.storage, self.location, self.cap_bytes)

    # -- slots of a cut -------------------------------------------------------------------------

    def slots(self, context: MessageContext, num_rows: int) -> Sequence[Key]:
        """The slot of each row of a microbatch: its place.

        Raises:
            ValueError: the context lacks what slots are found by.
        """
        return row_keys(context, num_rows)

    def keys_to_come(
        self, ids: SampleIds, known: Callable[[Sequence[Key]], list[bool]]
    ) -> Sequence[Key]:
        """Slots that a microbatch of these samples will find; none by place.

        Args:
            ids: of the microbatch.
            known: whether there is anything in each slot.
        """
        return ()

    # -- the message ----------------------------------------------------------------------------

    @property
    def evaluation(self) -> Compressor:
        """Compressor of evaluation, in which nothing is remembered."""
        if isinstance(self.eval, Compressor):
            return self.eval
        if self.eval == "compressed":
            return self.inner
        return (self.first if self.eval == "first" else None) or Identity()

    @property
    def coders(self) -> tuple[Compressor, ...]:
        """The compressors whose payloads make up a message, which says their sum."""
        return (self.inner,)

    def coders_of(
        self, keys: Sequence[Key], context: MessageContext, meta: TensorMeta
    ) -> tuple[Compressor, ...]:
        """`coders` for the message of some slots that have an estimate.

        Args:
            keys: of the slots.
            context: of the message.
            meta: of the rows.
        """
        return self.coders

    def part(
        self, index: int, x: Tensor, target: Tensor, said: Sequence[Tensor], state: State
    ) -> Tensor:
        """Input of the compressor of this number in `coders`, [rows, n].

        Args:
            index: its number.
            x: what is due, in its own dtype.
            target: of `compensate`.
            said: what the compressors before it have said, in the dtype of ``x``.
            state: of the message's slots.
        """
        return target

    # -- where it has a place -------------------------------------------------------------------

    def check_place(self, argument: str) -> None:
        if self.lr_scaled and argument == "act_comp":
            raise ValueError(
                f"act_comp={self}: lr_scaled is for gradients; activations have no learning rate"
            )

    def check_replicas(self) -> None:
        """Raises ValueError for settings that have no place between replicas."""
        if self.first is not None:
            raise ValueError(
                f"dp_comp={self}: between replicas estimates begin at zero, so there is no first "
                "message to compress in another way; leave first out"
            )

    def second_stage_memory(self) -> Memory:
        # It is formed of messages, of which formulas of a gradient know nothing; what is left out
        # of it must come later.
        return Residual(self.storage_plan)


def row_keys(context: MessageContext, num_rows: int) -> list[Key]:
    """Slots by place: row ``r`` of microbatch ``m``. A shorter batch uses the leading rows."""
    return [(context.microbatch, row) for row in range(num_rows)]
