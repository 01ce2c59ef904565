"""The contract of an endpoint: what a link keeps of its method, at the ends of it that are here.

A link asks its endpoint, and nothing else, what becomes of a tensor. Each message has a *plan*.
Both ends make it from what both hold, so that its layout is known before there is data::

    sender     plan ─> encode ─> observe          (─> crossed, of the cut's other direction)
    receiver   plan ────────────> decode ─> hear  (─> crossed)
    both       copies ─> commit, or discard, once the step is known to be finite or not

An endpoint names the class of methods that it is for, ``class Learned(Endpoint, of=KLT)``, and is
found by that. So a method that remembers in a new way is a value with a spec and an endpoint, with
no change to a link. The simplest one is here: a compressor alone, which remembers nothing.
"""

# ruff: noqa: B027  (an endpoint overrides what its method needs)

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mpcomp.compressors.base import Coding, Compressor, Identity, or_dense
from mpcomp.compressors.rows import InRows
from mpcomp.core.context import (
    MessageContext,
    SampleIds,
    Step,
    TensorMeta,
    padded_positions,
    zero_padding,
)
from mpcomp.core.spec import SpecValue, import_all, of_inner
from mpcomp.core.wire import COMPRESSED, DENSE, Form, Header, Payload
from mpcomp.feedback.memory import Side
from mpcomp.feedback.state import EndState

__all__ = [
    "Endpoint",
    "PlainEndpoint",
    "PlainPlan",
    "Plan",
    "Plans",
    "StateSize",
    "WrappingEndpoint",
    "endpoint_of",
]


class Plan(ABC):
    """One message of a tensor, at one end: its payload, and what both ends know of it ahead.

    Attributes:
        meta: the tensor.
        context: of the message.
        layout: of the payload.
        check: a number that is equal at both ends as long as they agree about slots.
        dense: whether the tensor goes as it is.
        variable: whether the message may end before the layout does, known once it is coded.
        on_host: whether it is coded on the host, so that `decode` is given a payload of the host.
        cf: compression factor that both ends have agreed on, where that changes; else 0.
        lags: of the message that was encoded here, as `mpcomp.core.traffic.Traffic.lags`; None
            unless its microbatch is sampled, and samples came again to a memory.
        status: of the message that was encoded here, for its header; None for an all-clear.
    """

    meta: TensorMeta
    context: MessageContext
    layout: tuple[TensorMeta, ...]
    check: int = 0
    dense: bool = False
    variable: bool = False
    on_host: bool = False
    cf: float = 0.0
    lags: Tensor | None = None
    status: Tensor | None = None

    @cached_property
    def form(self) -> Form:
        """The form of the message."""
        return Form(self.layout, variable=self.variable, checked=self.context.checked)

    @property
    def header(self) -> Header:
        """The header of the message, if nothing in the tensor is NaN or Inf."""
        return Header(
            DENSE if self.dense else COMPRESSED,
            check=self.check ^ self.form.check,
            step=self.context.step & 0xFFFFFFFF,
            cf=self.cf,
            checked=self.context.checked,
        )

    @abstractmethod
    def encode(self, x: Tensor, *, asked: bool = False) -> Payload:
        """The payload of ``x``, exactly as `layout` says; once.

        Args:
            x: like `meta`.
            asked: whether `arrived` will be, which a method may know without decoding.
        """

    @abstractmethod
    def decode(self, payload: Payload) -> Tensor:
        """The receiver's tensor, like `meta` and zero where padded; once."""

    @abstractmethod
    def arrived(self, payload: Payload) -> Tensor:
        """The other end's tensor for the payload that was encoded here."""

    def as_told(self, payload: Payload) -> Tensor:
        """The tensor of `arrived`, all NaN if this end saw NaN or Inf."""
        x = self.arrived(payload)
        return x if self.status is None else x.masked_fill(self.status.bool(), torch.nan)

    def without_padding(self, x: Tensor) -> Tensor:
        """A tensor like `meta` in memory order, [rows, n], with zeros where it is padded."""
        padded = padded_positions(self.context.valid, self.meta, x.device)
        return zero_padding(self.meta.flatten(x), padded)

    @abstractmethod
    def positions(self, payload: Payload) -> Tensor | None:
        """Elements that the message carries, for `SameIndices`; None where it is dense."""


class Plans:
    """The plans of a link in the step under way: of the last message sent, and of those due.

    Args:
        make: makes a plan.

    Attributes:
        step: the step; None between two.
    """

    def __init__(self, make: Callable[[Side, TensorMeta, Step, int, torch.device], Plan]) -> None:
        self._make = make
        self.step: Step | None = None
        self._sent: Plan | None = None
        self._due: dict[int, Plan] = {}

    def enter(self, step: Step | None) -> None:
        """Begins with another step; what was planned is forgotten."""
        self.step, self._sent = step, None
        self._due.clear()

    def last_sent(self, step: Step, microbatch: int) -> Plan:
        """The plan of the last message that was encoded here, which alone is asked about."""
        assert step is self.step and self._sent is not None, "a message is asked about in its step"
        assert self._sent.context.microbatch == microbatch, "another was encoded since"
        return self._sent

    def to_send(self, meta: TensorMeta, microbatch: int, device: torch.device) -> Plan:
        """The plan of a message that is encoded now."""
        assert self.step is not None
        self._sent = self._make(Side.SENDER, meta, self.step, microbatch, device)
        return self._sent

    def due(self, meta: TensorMeta, microbatch: int, device: torch.device) -> Plan:
        """The plan of a message to be received, made once: when its buffer is posted."""
        plan = self._due.get(microbatch)
        if plan is None or plan.meta != meta:
            assert self.step is not None
            plan = self._make(Side.RECEIVER, meta, self.step, microbatch, device)
            self._due[microbatch] = plan
        return plan

    def forget(self, microbatch: int) -> None:
        """Takes back the plan of a message that was due, and will not come."""
        self._due.pop(microbatch, None)


class StateSize(NamedTuple):
    """The size of what an end keeps.

    Attributes:
        rows: at most.
        row_bytes: of each.
        capped: whether a cap leaves rows out.
        location: where they are kept.
    """

    rows: int
    row_bytes: int
    capped: bool = False
    location: str = "device"


class Endpoint(ABC):
    """The part of a link that its method decides, for the ends of it that are on this rank.

    As it stands here it keeps nothing; a method that remembers overrides what it needs.

    Args:
        method: of the link.

    Attributes:
        method: what messages are planned by.
        partner: endpoint of the cut's other direction; None where there is none.
    """

    #: Whether messages of the cut's other direction are told of, by `crossed`.
    follows: bool = False
    #: Whether `crossed` then asks for the tensor that arrived.
    asks_arrived: bool = False
    #: Whether a message may be shorter than both ends know ahead.
    varies: bool = True
    #: Whether what a message leaves out is sent later, or is right on average.
    makes_good: bool = False

    _classes: ClassVar[dict[type, type[Endpoint]]] = {}

    def __init_subclass__(cls, *, of: type[SpecValue] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if of is not None:
            Endpoint._classes[of] = cls

    def __init__(self, method: Any) -> None:
        self.method = method
        self.partner: Endpoint | None = None

    @abstractmethod
    def plan(
        self, side: Side, meta: TensorMeta, context: MessageContext, device: torch.device
    ) -> Plan:
        """The plan of a message.

        Args:
            side: the end.
            meta: the tensor.
            context: of the message; unless it is ``on``, the tensor goes as it is.
            device: where the tensor is, or will be.

        Raises:
            ValueError: the context lacks what the method needs.
        """

    def check(self, context_of: Callable[[int], MessageContext], sizes: Sequence[int]) -> None:
        """Raises what `plan` would for a step of training to come.

        Args:
            context_of: gives the context of a microbatch.
            sizes: rows of the microbatches.
        """

    @property
    def coders(self) -> Sequence[Compressor]:
        """Compressors of the parts of a message, as far as they are known ahead."""
        return ()

    # -- what passes ----------------------------------------------------------------------------

    def observe(self, x: Tensor, num_bytes: int, plan: Plan) -> None:
        """Notes a tensor that was sent, and the bytes of its message."""

    def hear(self, payload: Payload, plan: Plan) -> None:
        """Notes a payload that was received."""

    def crossed(
        self,
        side: Side,
        plan: Plan,
        payload: Payload,
        arrived: Callable[[], Tensor],
        context: MessageContext,
    ) -> None:
        """Notes a message of the cut's other direction, where `follows`.

        Args:
            side: its end here: an activation's sender is a gradient's receiver.
            plan: of that message.
            payload: likewise.
            arrived: gives the tensor that its receiver has.
            context: of a message of this link in the same microbatch.
        """

    def measured(self, x: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """The tensor that is compressed for ``x``, and what its error is compared with.

        Args:
            x: that was sent, zero where it is padded.
            plan: of its message.
        """
        return x, x

    # -- what is kept ---------------------------------------------------------------------------

    @property
    def ends(self) -> Mapping[str, EndState]:
        """States of a memory's ends here, by role ("sender", "receiver")."""
        return {}

    def prefetch(self, ids: Sequence[SampleIds]) -> None:
        """Begins to read what a step with these ids, per microbatch, will need.

        Raises:
            OSError: reading ahead failed since the last call.
        """

    def commit(self) -> None:
        """Keeps what the step has noted."""

    def discard(self, *, unused: bool = False) -> None:
        """Forgets what the step has noted.

        Args:
            unused: whether none of the messages that were planned for came.
        """

    def copies(self, side: Side) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yields what an end here keeps that the other end has too, before the step is kept.

        Args:
            side: the end; of one that is not here there is nothing.

        Yields:
            Names, and a row for each of them: [names, ...].
        """
        yield from ()

    def state_size(self, side: Side, meta: TensorMeta, num_samples: int | None) -> list[StateSize]:
        """The sizes of what an end will keep, by kind.

        Args:
            side: the end.
            meta: of all tensors of a step together.
            num_samples: of the training set, for methods that keep a row for each of them.
        """
        return []

    def state_dict(self) -> dict[str, Any]:
        """All that is kept: tensors, and what JSON can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], device: Mapping[str, torch.device]) -> None:
        """Restores `state_dict`; ``device`` says where each role's end lives.

        Raises:
            ValueError, KeyError: it is the state of another method or of other tensors.
        """


class WrappingEndpoint(Endpoint):
    """Base of the endpoint of a method round another, whose endpoint does what is not said here.

    Args:
        method: of the link.

    Attributes:
        inner: endpoint of the method inside.
    """

    makes_good = of_inner("makes_good")
    coders = of_inner("coders")
    ends = of_inner("ends")

    def __init__(self, method: Any) -> None:
        super().__init__(method)
        self.inner = endpoint_of(method.inner)

    def check(self, context_of: Callable[[int], MessageContext], sizes: Sequence[int]) -> None:
        self.inner.check(context_of, sizes)

    def prefetch(self, ids: Sequence[SampleIds]) -> None:
        self.inner.prefetch(ids)

    def commit(self) -> None:
        self.inner.commit()

    def discard(self, *, unused: bool = False) -> None:
        self.inner.discard(unused=unused)

    def copies(self, side: Side) -> Iterator[tuple[Sequence[str], Tensor]]:
        return self.inner.copies(side)

    def state_size(self, side: Side, meta: TensorMeta, num_samples: int | None) -> list[StateSize]:
        return self.inner.state_size(side, meta, num_samples)


@functools.cache
def _load_all() -> None:
    """Imports every module beside this one, when there is a first link."""
    import_all(__name__.rpartition(".")[0], [str(Path(__file__).parent)])


def endpoint_of(method: SpecValue) -> Endpoint:
    """A new endpoint for a method: of the nearest of its classes that has one.

    Raises:
        TypeError: there is none.
    """
    _load_all()
    for cls in type(method).__mro__:
        if cls in Endpoint._classes:
            return Endpoint._classes[cls](method)
    raise TypeError(
        f"{method!r}: no endpoint is for {type(method).__name__}, so it cannot send what crosses a "
        f"cut; write one, class ...(mpcomp.links.endpoints.Endpoint, of={type(method).__name__})"
    )


class PlainPlan(Plan):
    """A message of a compressor alone, or of a tensor that goes as it is.

    Args:
        coder: the compressor.
        meta: the tensor.
        context: of the message.
        device: of the tensor.
        form: of the message, if it is known, and that the coder makes such a tensor smaller.

    Attributes:
        coder: the compressor, or what sends the tensor as it is.
    """

    def __init__(
        self,
        coder: Compressor,
        meta: TensorMeta,
        context: MessageContext,
        device: torch.device,
        form: Form | None = None,
    ) -> None:
        self.meta = meta
        self.context = context
        if form is None:
            if context.num_rows is not None:
                coder = InRows(coder, context.num_rows)
            coder = or_dense(coder, meta)
            self.layout = coder.layout(meta)
        else:
            self.layout, self.form = form.layout, form
        self.coder = coder
        self._coding = Coding(coder, meta, partial(context.draw, ""), device)
        self.check = coder.check
        self.dense = coder.sends_dense
        self.variable = coder.variable_length
        self.on_host = coder.on_host
        self._padded: Tensor | None = None
        if context.valid is not None and not self.dense:
            self._padded = padded_positions(context.valid, meta, device)
        self._arrived: Tensor | None = None

    def _zero_padding(self, x: Tensor) -> Tensor:
        return x if self._padded is None else zero_padding(x, self._padded)

    def encode(self, x: Tensor, *, asked: bool = False) -> Payload:
        x = self._zero_padding(x)
        if not asked:
            return self._coding.compress(x)
        payload, said = self._coding.round_trip(x, x)
        self._arrived = self._zero_padding(said)
        return payload

    def decode(self, payload: Payload) -> Tensor:
        return self._zero_padding(self._coding.decompress(payload))

    def arrived(self, payload: Payload) -> Tensor:
        if self._arrived is None:
            self._arrived = PlainPlan.decode(self, payload)
        return self._arrived

    def positions(self, payload: Payload) -> Tensor | None:
        return self._coding.positions(payload)


class PlainEndpoint(Endpoint, of=Compressor):
    """A compressor alone, which remembers nothing."""

    def __init__(self, method: Compressor) -> None:
        super().__init__(method)
        #: The method, coder and form of tensors that have crossed last, by side and tensor.
        self._forms: dict[tuple[Side, TensorMeta], tuple[Compressor, Compressor, Form]] = {}

    @property
    def varies(self) -> bool:  # type: ignore[override]
        """Whether the compressor's messages do."""
        return bool(self.method.variable_length)

    @property
    def makes_good(self) -> bool:  # type: ignore[override]
        """Whether the compressor is unbiased."""
        return bool(self.method.is_unbiased)

    @property
    def coders(self) -> Sequence[Compressor]:
        return (self.method,)

    def plan(
        self, side: Side, meta: TensorMeta, context: MessageContext, device: torch.device
    ) -> Plan:
        if not context.on or context.num_rows is not None:
            return PlainPlan(self.method if context.on else Identity(), meta, context, device)
        known = self._forms.get((side, meta))
        if known is None or known[0] is not self.method:
            plan = PlainPlan(self.method, meta, context, device)
            self._forms[side, meta] = self.method, plan.coder, plan.form
            return plan
        _, coder, form = known
        return PlainPlan(coder, meta, context, device, form)
