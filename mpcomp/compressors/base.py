"""The contract of a compressor: a frozen value that maps one tensor to wire tensors and back.

A compressor is pure. It never changes its input, keeps nothing, and touches no global
generator. What it puts on the wire has a layout that follows from `TensorMeta` alone, so
buffers can be posted, and bytes counted, before there is data.

A new compressor is one file in this folder: a frozen dataclass deriving from `Compressor`,
whose class attribute ``spec`` is its name on command lines and whose other class attributes
say what it can do. `mpcomp.parse` finds it, and a test asks for examples to run the laws over. The
simplest one is here: `Identity`, which sends a tensor as it is.

A `Selecting` compressor sends some of the elements. Most send positions, too: `SentPositions`.

A `Coding` is a compressor for one tensor: a part of a message at a cut, a parameter or a piece of
one between replicas. Each end makes an equal one, so that a payload is all that travels.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from mpcomp.compressors.bits import decode_indices, encode_indices, index_bytes
from mpcomp.core.context import TensorMeta
from mpcomp.core.spec import SpecValue, shown
from mpcomp.core.transfer import to_device
from mpcomp.core.wire import Payload, packed_length, unpack

__all__ = [
    "Coding",
    "Compressor",
    "Encoded",
    "Hosted",
    "Identity",
    "RoundCompressors",
    "Selecting",
    "SentPositions",
    "ValuesAt",
    "check_cf",
    "check_contractive",
    "check_keep",
    "check_values",
    "num_kept",
    "or_dense",
    "put_at",
    "shrinks",
]


_T = TypeVar("_T")
_BY_IDENTITY: Any = object.__eq__
_REMEMBERED = 4096  # results of one method of one class: a few for each shape of a model


def _once_per_meta(method: Callable[[Any, TensorMeta], _T]) -> Callable[[Any, TensorMeta], _T]:
    """``method(compressor, meta)``, a pure function of two frozen values, computed once for each.

    Compressors that are equal to nothing but themselves, as they hold tensors, are not kept.
    """
    remembered = functools.lru_cache(_REMEMBERED)(method)

    @functools.wraps(method)
    def once(self: Any, meta: TensorMeta) -> _T:
        cls = type(self)
        if cls.__eq__ is _BY_IDENTITY or cls.__hash__ is None:
            return method(self, meta)
        return remembered(self, meta)

    return once


class Compressor(SpecValue, ABC):
    """Maps a dense floating-point tensor to a payload and back.

    `layout` and `wire_bytes` are computed once for each pair of compressor and `TensorMeta`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("layout", "wire_bytes"):
            if name in cls.__dict__:
                setattr(cls, name, _once_per_meta(cls.__dict__[name]))

    adaptable = True  # as far as `with_cf` has a ratio to set
    at_cuts = True
    between_replicas = True
    #: Whether it draws so that the mean of what arrives is the tensor: E C(x) = x.
    is_unbiased: bool = False
    #: Whether the error is meant to be no larger than the tensor, E||x - C(x)||^2 <= ||x||^2, so
    #: that error feedback may go round it. What is scaled up to be unbiased is not.
    contractive: bool = True
    #: The dtype that elements are rounded to, where that is all that is done to them.
    wire_dtype: torch.dtype | None = None
    #: Whether payloads of the same layout may be added elementwise (all-reduce).
    summable: bool = False
    #: Whether the method works on a matrix, not on elements one by one: between replicas it is
    #: given [first dim, product of the rest], others one row of all elements.
    by_matrix: bool = False
    #: Whether `decompress` multiplies matrices, which GPUs of two models may round otherwise.
    multiplies: bool = False
    #: Whether a generator is read at all; what reads none need not be given one.
    draws: bool = True
    #: Whether `decompress` reads the generator, so that all ends must be given equal ones.
    shares_choice: bool = False
    #: A number that is equal at both ends if what they have learned is, sent in the header.
    check: int = 0
    #: Whether a message's length is known only after coding. `layout` then says the most that it
    #: may be, and ends with a uint8 [n]; the last tensor of a payload is as long as it happens to
    #: be, up to that, and `decompress` is given it so. `wire_bytes` is the most, too.
    variable_length: bool = False
    #: Whether it codes on the host, where its payloads then lie, whatever device the tensor is on.
    on_host: bool = False

    @abstractmethod
    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        """Shapes and dtypes of the wire tensors for an input like ``meta``.

        With `variable_length` those of the longest payload that there can be.
        """

    @abstractmethod
    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        """The payload of ``x``: tensors exactly as `layout` says, on the device of ``x``.

        What codes `on_host` gives tensors of the host.

        Args:
            x: floating-point tensor of any shape; it is not changed.
            generator: CPU generator for methods that draw; both ends of a link are given
                equal ones.
        """

    def compress_against(
        self, x: Tensor, whole: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        """The payload of ``x``, where that is what is left of a tensor that a memory knows in part.

        For methods whose error is set beforehand, relative to the tensor: with others it is that
        of `compress`, whose error is relative to ``x``.

        Args:
            x: as for `compress`.
            whole: the tensor, like ``x``.
            generator: as for `compress`.
        """
        return self.compress(x, generator)

    def round_trip(
        self,
        x: Tensor,
        whole: Tensor,
        meta: TensorMeta,
        draw: Callable[[], torch.Generator | None],
    ) -> tuple[Payload, Tensor]:
        """The payload of `compress_against`, and bit for bit what `decompress` makes of it.

        For a sender that keeps what its receiver will work with: a method may know that without
        reading its own message.

        Args:
            x: as for `compress`.
            whole: as for `compress_against`.
            meta: describes ``x``.
            draw: makes a fresh generator, equal each time; None where none is read.
        """
        payload = self.compress_against(x, whole, draw())
        return payload, self.decompress(payload, meta, draw())

    @abstractmethod
    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        """The dense tensor, of ``meta``'s shape, dtype and memory order, that ``payload`` says.

        It is on the payload's device.

        Args:
            payload: what `compress` returned, possibly after a journey.
            meta: describes the tensor that was compressed.
            generator: equal to the one `compress` was given; read by methods whose choice of
                elements is shared rather than sent.
        """

    def decompress_to(
        self,
        device: torch.device,
        payload: Payload,
        meta: TensorMeta,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """As `decompress`; of a payload that was coded `on_host` the tensor is on ``device``.

        Args:
            device: of the tensor, and of any other payload.
            payload: as for `decompress`, and so are those that follow.
            meta: likewise.
            generator: likewise.
        """
        return self.decompress(payload, meta, generator)

    def add_to(
        self,
        total: Tensor,
        payload: Payload,
        meta: TensorMeta,
        generator: torch.Generator | None = None,
        *,
        scale: float = 1.0,
        positions: Tensor | None = None,
    ) -> None:
        """``total += scale * decompress(payload)``, in place.

        Product and sum are rounded one by one, so that all devices agree, and selecting
        methods, which add what they sent alone, agree with a dense sum bit for bit (but for the
        sign of a zero).

        Args:
            total: flat contiguous fp32 [elements], in memory order.
            payload: of a tensor like ``meta``.
            meta: describes the tensor that was compressed.
            generator: as for `decompress`.
            scale: factor of what is added.
            positions: those that the payload carries (`Selecting.indices`), where the caller
                has them; only selecting methods look at it.
        """
        x = meta.flatten(self.decompress(payload, meta, generator)).reshape(-1)
        total.add_(scaled(x, scale))

    @_once_per_meta
    def wire_bytes(self, meta: TensorMeta) -> int:
        """Bytes of the payload of a tensor like ``meta``, without a message header."""
        return sum(part.dense_bytes for part in self.layout(meta))

    def wire_ratio(self, meta: TensorMeta) -> float:
        """Payload bytes over the dense bytes of the tensor's own dtype; lower is better."""
        return self.wire_bytes(meta) / meta.dense_bytes if meta.numel else 1.0

    def with_cf(self, cf: float) -> Compressor:
        """The same method at compression factor ``cf``: elements of the input per element sent.

        Raises:
            TypeError: the method has no ratio to set.
        """
        raise TypeError(
            f"{self} has no compression factor to set; "
            "selecting compressors (topk, randomk, randomblock) and quant have one"
        )

    def cf_ladder(self, lowest: float, highest: float) -> tuple[float, ...]:
        """The CFs of `with_cf` that are worth telling apart, from ``lowest`` to ``highest``.

        Each is 2^(1/2) times the one before; methods of few settings have a rung for each.
        """
        count = math.ceil(2 * math.log2(highest / lowest) - 1e-9)
        return (*(lowest * 2 ** (i / 2) for i in range(count)), highest)


class Hosted(Compressor):
    """A compressor that codes on the host, or whose inner one may.

    Its payloads then say nothing of the tensor's device.
    """

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        return self.decompress_to(payload[0].device, payload, meta, generator)

    @abstractmethod
    def decompress_to(
        self,
        device: torch.device,
        payload: Payload,
        meta: TensorMeta,
        generator: torch.Generator | None = None,
    ) -> Tensor: ...


class Selecting(Compressor):
    """A compressor that sends some of the elements and drops the others.

    Over a whole tensor `compress` is `choose`, then `take`. Who needs the choice itself (a
    second level, momentum to be masked) calls the two.
    """

    keep: float
    values: Compressor | None
    selects = True

    @abstractmethod
    def choose(self, flat: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
        """Ascending int64 positions of the ``k`` elements that this method picks of ``flat``.

        Args:
            flat: the elements [n], all of them one scope.
            k: how many, 0 to n.
            generator: for methods that draw.
        """

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        flat = TensorMeta.of(x).flatten(x).reshape(-1)
        positions = self.choose(flat, self.num_kept(flat.numel()), generator)
        return self.take(x, positions, generator)

    @abstractmethod
    def take(
        self, x: Tensor, positions: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        """The payload that carries the elements of ``x`` at ``positions``.

        Args:
            x: tensor of any shape.
            positions: ascending int64, in memory order; as many as `layout` has room for. A
                method with `shares_choice` must be given those that `decompress` will draw.
            generator: for value compressors that draw.
        """

    @abstractmethod
    def indices(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        """Ascending int64 positions, in memory order, of the elements that ``payload`` carries."""

    @abstractmethod
    def decoded(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        """The values [k], in ``meta``'s dtype, that belong to those positions."""

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        positions = self.indices(payload, meta, generator)
        return put_at(positions, self.decoded(payload, meta, generator), meta)

    def add_to(
        self,
        total: Tensor,
        payload: Payload,
        meta: TensorMeta,
        generator: torch.Generator | None = None,
        *,
        scale: float = 1.0,
        positions: Tensor | None = None,
    ) -> None:
        if positions is None:
            positions = self.indices(payload, meta, generator)
        values = scaled(self.decoded(payload, meta, generator), scale)
        # Unique positions need no atomic adds, which index_add_ has on accelerators.
        total.index_copy_(0, positions, total.index_select(0, positions).add_(values))

    def num_kept(self, n: int) -> int:
        """Number of elements that are sent of a scope of ``n``."""
        return num_kept(self.keep, n)

    def over_tensor(self) -> Selecting:
        """The same method selecting over the whole tensor, not within samples or rows."""
        return self

    def with_cf(self, cf: float) -> Selecting:
        check_cf(cf)
        return self.with_keep(1 / cf)

    def with_keep(self, keep: float) -> Selecting:
        """The same method with another fraction of elements to send."""
        return dataclasses.replace(self, keep=keep)  # type: ignore[type-var]


@dataclass(frozen=True)
class ValuesAt:
    """The elements at given positions of a tensor, optionally compressed themselves.

    Attributes:
        num_rows: number of rows of equal length in which the values are coded, so that a value
            compressor with a scale per sample has samples to go by.
        count: number of values in all.
        values: compressor of the values; None sends them as they are.
    """

    num_rows: int
    count: int
    values: Compressor | None

    def _meta(self, dtype: torch.dtype) -> TensorMeta:
        return TensorMeta((self.num_rows, self.count // max(1, self.num_rows)), dtype)

    def layout(self, dtype: torch.dtype) -> tuple[TensorMeta, ...]:
        """Wire tensors for values of ``dtype``."""
        return (Identity() if self.values is None else self.values).layout(self._meta(dtype))

    def take(
        self, x: Tensor, positions: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        """The payload of the elements of ``x`` at ``positions`` (memory order)."""
        flat = TensorMeta.of(x).flatten(x).reshape(-1)
        chosen = flat.index_select(0, positions).reshape(self._meta(x.dtype).shape)
        if self.values is None:
            return (chosen,)
        payload = self.values.compress(chosen, generator)
        if self.values.on_host:
            payload = tuple(to_device(part, x.device) for part in payload)
        return payload

    def put(
        self,
        payload: Payload,
        positions: Tensor,
        meta: TensorMeta,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A tensor like ``meta`` that holds the payload's values and zeros elsewhere."""
        return put_at(positions, self.decode(payload, meta.dtype, generator), meta)

    def decode(
        self, payload: Payload, dtype: torch.dtype, generator: torch.Generator | None = None
    ) -> Tensor:
        """The payload's values [count] in ``dtype``."""
        if self.values is None:
            return payload[0].reshape(-1)
        return self.values.decompress(payload, self._meta(dtype), generator).reshape(-1)


class SentPositions(Selecting):
    """A selection whose positions travel behind its values: (*values, indices)."""

    def _values(self, meta: TensorMeta) -> ValuesAt:
        """The coding of the values of a tensor like ``meta``: here, one scope."""
        return ValuesAt(1, self.num_kept(meta.numel), self.values)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        values = self._values(meta)
        indices = TensorMeta((index_bytes(meta.numel, values.count),), torch.uint8)
        return (*values.layout(meta.dtype), indices)

    def take(
        self, x: Tensor, positions: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        meta = TensorMeta.of(x)
        payload = self._values(meta).take(x, positions, generator)
        return (*payload, encode_indices(positions, meta.numel))

    def indices(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        return decode_indices(payload[-1], meta.numel, self._values(meta).count)

    def decoded(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        return self._values(meta).decode(payload[:-1], meta.dtype, generator)


class RoundCompressors(SpecValue, ABC):
    """A method round compressors, as feedback is.

    Attributes:
        inner: the compressor of what is sent.
        first: of what is sent first; None where that is no other.
        looks_at_gradients: whether a message follows from gradients that have come back.
    """

    inner: Compressor
    first: Compressor | None
    looks_at_gradients: bool

    @abstractmethod
    def with_coders(self, change: Callable[[Compressor], Compressor]) -> Self:
        """The method with each of its compressors changed."""


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends every element as it is. Spec ``none``.

    * Source: this project's own, for what is not to be compressed.
    * Theory: x^ = x, so whatever is proved of the plain method.
    """

    spec: ClassVar[str] = "none"
    aliases: ClassVar[dict[str, dict[str, Any]]] = {"identity": {}}
    draws = False
    summable = True
    sends_dense = True

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return (TensorMeta((meta.num_rows, meta.row_numel), meta.dtype),)

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        return (TensorMeta.of(x).flatten(x),)

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        return meta.unflatten(payload[0])


def shrinks(compressor: Compressor, meta: TensorMeta) -> bool:
    """Whether a tensor like ``meta`` is sent by ``compressor``, and not as it is."""
    if compressor.sends_dense or compressor.variable_length:
        return True
    return compressor.wire_bytes(meta) < meta.dense_bytes


def or_dense(compressor: Compressor, meta: TensorMeta) -> Compressor:
    """``compressor``, or `Identity` where it would not make a tensor like ``meta`` smaller.

    Both ends decide alike, as the layout follows from ``meta``. (Of messages that vary in length it
    says only the most, which is not what is sent.) Says so once (Python's warning filter folds
    repeats).
    """
    if shrinks(compressor, meta):
        return compressor
    warnings.warn(
        f"{compressor} would not shrink {list(meta.shape)} {meta.dtype} tensors "
        f"({compressor.wire_bytes(meta)} of {meta.dense_bytes} bytes): sending them dense",
        stacklevel=2,
    )
    return Identity()


# -- one tensor -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coding:
    """The way of a tensor to a payload, and of that to a tensor again.

    Attributes:
        compressor: what does it.
        meta: the tensor.
        draw: makes a fresh generator; equal at all ends, and equal again when called again.
        device: of the tensor; None for the payload's.
    """

    compressor: Compressor
    meta: TensorMeta
    draw: Callable[[], torch.Generator]
    device: torch.device | None = None

    def _generator(self) -> torch.Generator | None:
        """A fresh generator; None for a compressor that reads none, as seeding one takes time."""
        return self.draw() if self.compressor.draws else None

    @property
    def layout(self) -> tuple[TensorMeta, ...]:
        """Wire tensors of the payload."""
        return self.compressor.layout(self.meta)

    def compress(self, x: Tensor) -> Payload:
        """The payload of ``x``."""
        return self.compressor.compress(x, self._generator())

    def round_trip(self, x: Tensor, whole: Tensor) -> tuple[Payload, Tensor]:
        """The payload of ``x``, which is what is left of a tensor, and what it says."""
        return self.compressor.round_trip(x, whole, self.meta, self.draw)

    def encode(self, x: Tensor) -> Encoded:
        """The payload of ``x``, one scope as a whole; of a selection with its positions."""
        if not isinstance(self.compressor, Selecting):
            return Encoded(self, self.compress(x))
        generator, flat = self._generator(), x.reshape(-1)
        kept = self.compressor.num_kept(flat.numel())
        positions = self.compressor.choose(flat, kept, generator)
        return Encoded(self, self.compressor.take(x, positions, generator), positions)

    def take(self, x: Tensor, positions: Tensor) -> Encoded:
        """The payload of a selection that was made before."""
        assert isinstance(self.compressor, Selecting)
        return Encoded(self, self.compressor.take(x, positions, self._generator()), positions)

    def unpack(self, buffer: Tensor, start: int) -> tuple[Payload, int]:
        """The payload that begins at this byte of `mpcomp.core.wire.pack`, and where it ends."""
        return unpack(buffer, self.layout, start), packed_length(self.layout, start)

    def decompress(self, payload: Payload) -> Tensor:
        """The tensor that a payload says, like `meta`."""
        if self.device is not None and self.compressor.on_host:
            generator = self._generator()
            return self.compressor.decompress_to(self.device, payload, self.meta, generator)
        return self.compressor.decompress(payload, self.meta, self._generator())

    def positions(self, payload: Payload) -> Tensor | None:
        """Elements that a payload carries, ascending in memory order; None for all."""
        if not isinstance(self.compressor, Selecting):
            return None
        return self.compressor.indices(payload, self.meta, self._generator())

    def add_to(
        self,
        total: Tensor,
        payload: Payload,
        *,
        scale: float = 1.0,
        positions: Tensor | None = None,
    ) -> None:
        """Adds the tensor that a payload says, see `Compressor.add_to`."""
        self.compressor.add_to(
            total, payload, self.meta, self._generator(), scale=scale, positions=positions
        )


@dataclass(frozen=True)
class Encoded:
    """A tensor that was encoded here.

    Attributes:
        coding: how.
        payload: where the compressor has it.
        positions: of the elements that it carries, where the coding chose them.
    """

    coding: Coding
    payload: Payload
    positions: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return sum(part.nbytes for part in self.payload)

    def without(self, y: Tensor) -> Tensor:
        """A tensor [n] less what the payload says."""
        y = y.clone()
        self.coding.add_to(y, self.payload, scale=-1.0, positions=self.positions)
        return y


# -- what methods have in common -------------------------------------------------------------------


def put_at(positions: Tensor, values: Tensor, meta: TensorMeta) -> Tensor:
    """A tensor like ``meta`` with values [k] at positions [k], and zeros elsewhere."""
    flat = torch.zeros(meta.numel, dtype=meta.dtype, device=values.device)
    # Positions are unique, so the order of writing does not matter.
    return meta.unflatten(flat.index_copy_(0, positions, values))


def scaled(x: Tensor, scale: float) -> Tensor:
    """``x`` times ``scale`` in fp32, rounded before anything is added to it."""
    x = x.to(torch.float32)
    return x if scale == 1.0 else x * scale


def check_contractive(compressor: Compressor, where: str) -> None:
    """Raises ValueError unless a residual, kept ``where``, may go round ``compressor``."""
    if compressor.contractive:
        return
    if getattr(compressor, "unbiased", False):  # the setting, where there is one
        raise ValueError(
            f"inner={compressor}: unbiased=True {where} diverges, as its error is larger than "
            "the tensor; leave it out"
        )
    raise ValueError(
        f"inner={compressor}: {where} it diverges, as its error may be larger than the tensor; "
        "use one whose error is not, such as topk:0.1, sign or quant:4"
    )


def check_cf(cf: float) -> None:
    """Raises ValueError unless ``cf`` is a compression factor."""
    if not cf >= 1:
        raise ValueError(f"cf={cf}: a compression factor is a number of at least 1")


def check_keep(keep: float) -> None:
    """Raises ValueError unless ``keep`` is a fraction in (0, 1]."""
    if not 0 < keep <= 1:
        raise ValueError(
            f"keep={keep}: the fraction of elements to send is in (0, 1]; "
            "for 10 % write 0.1 (topk:0.1)"
        )


def num_kept(keep: float, n: int) -> int:
    """Number of elements kept of ``n`` by a selection: max(1, ceil(keep n - 1e-9)), 0 of none."""
    # The 1e-9 takes back the rounding of products such as 0.1 * 30 = 3.0000000000000004.
    return min(n, max(1, -int(-(keep * n - 1e-9) // 1))) if n else 0


def check_values(values: Compressor | None, *, last: bool = False) -> None:
    """Raises unless ``values`` may code the values of a selection.

    Args:
        values: their compressor; None sends them as they are.
        last: whether nothing follows them in the message, so that they may vary in length.
    """
    if values is None:
        return
    if not isinstance(values, Compressor):
        raise TypeError(
            f"values={shown(values)}: the values of a selection take a compressor such as "
            "Cast('fp16') or Quantize(8); feedback goes round the whole: ef21+topk:0.1+quant:8"
        )
    if isinstance(values, Selecting):
        raise ValueError(
            f"values={values}: the values of a selection cannot be selected again; lower keep"
        )
    if values.variable_length and not last:
        raise ValueError(
            f"values={values}: indices follow the values of a selection, so these cannot vary in "
            "length; use it alone"
        )
