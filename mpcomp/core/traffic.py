"""Counts of what a rank sends: bytes, how well it arrived, how long it took.

One class counts on cuts, ties, between replicas and of gathered parameters; what only replicas have
is in `ReplicaTraffic`. Energies are summed on the tensors' own device in fp64 and read only when
somebody asks, so that metering never makes an accelerator wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from mpcomp.core.sent import Sent

T = TypeVar("T", bound="Traffic")

__all__ = ["AMOUNTS", "FIDELITY", "LAGS", "SECONDS", "Meter", "ReplicaTraffic", "Traffic"]

#: Figures of a memory of samples.
LAGS: Final = ("drift", "lag", "stayed")
#: Figures of how well messages arrive.
FIDELITY: Final = ("relative_error", "cosine", *LAGS)
#: Figures of gradients between replicas that ranks add up.
AMOUNTS: Final = (
    "wire_bytes",
    "dense_bytes",
    "num_elements",
    "floats",
    "traffic_bytes",
    "dense_traffic_bytes",
)
#: Figures of gradients between replicas of which the slowest rank's counts.
SECONDS: Final = ("encode_s", "wait_s", "decode_s")


@dataclass
class Traffic:
    """Traffic of one kind: of a link in training or evaluation, of one step between replicas.

    Attributes:
        messages: number of messages.
        wire_bytes: bytes of the messages as their sender made them, headers included.
        dense_bytes: bytes of the tensors in their own dtype.
        num_elements: of the tensors; NaN where a checkpoint of a time before they were counted is
            part of the sum.
        seconds: host time spent encoding and decoding.
        nonfinite: messages whose tensor had NaN or Inf.
    """

    messages: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    num_elements: float = 0
    seconds: float = 0.0
    nonfinite: int = 0
    # ||x||^2, <x, y>, ||y||^2, ||x - y||^2 over all messages
    _energies: Tensor | None = field(default=None, repr=False)
    # ||x||^2, ||x - m||^2 before and after the message, elements that stayed, all elements
    _lags: Tensor | None = field(default=None, repr=False)

    def count(self, wire_bytes: int, dense_bytes: int, num_elements: int) -> None:
        """Counts one message handed to the transport, and the tensor that it was made from."""
        self.messages += 1
        self.wire_bytes += wire_bytes
        self.dense_bytes += dense_bytes
        self.num_elements += num_elements

    def compare(self, x: Tensor, y: Tensor) -> None:
        """Adds the fidelity of ``y``, which arrived for ``x``; nothing if one is not finite."""
        a, b = x.detach().flatten().float(), y.detach().flatten().float()
        difference = a - b
        sums = [
            torch.dot(a, a),
            torch.dot(a, b),
            torch.dot(b, b),
            torch.dot(difference, difference),
        ]
        energies = torch.stack(sums).double()
        # A step that a loss scaler skips would make the figures of the whole run NaN.
        energies = torch.where(energies.isfinite().all(), energies, 0.0)
        self._add_energies(energies)

    def follow(self, lags: Tensor) -> None:
        """Adds how a memory follows its samples; nothing if a number is not finite.

        Args:
            lags: of one message, as the attribute `lags`.
        """
        self._add_lags(torch.where(lags.isfinite().all(), lags, 0.0))

    def _add_energies(self, energies: Tensor) -> None:
        held = self._energies
        self._energies = energies if held is None else held.to(energies.device) + energies

    def _add_lags(self, lags: Tensor) -> None:
        held = self._lags
        self._lags = lags if held is None else held.to(lags.device) + lags

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds of a block to the field of this name."""
        start = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    @property
    def energies(self) -> Tensor | None:
        """||x||^2, <x, y>, ||y||^2, ||x - y||^2 over all messages, fp64 [4]; None before the first.

        It is replaced, and never changed, by what comes later.
        """
        return self._energies

    @property
    def sent(self) -> Sent:
        """The bytes of messages, and what they were made from."""
        return Sent(self.wire_bytes, self.dense_bytes, self.num_elements)

    @property
    def ratio(self) -> float:
        """Wire bytes over dense bytes; NaN before the first message."""
        return self.sent.wire_ratio

    @property
    def below_bf16(self) -> float | None:
        """Times fewer bytes than bf16 has; None before the first message, or where unknown."""
        return self.sent.below_bf16

    @property
    def relative_error(self) -> float:
        """||x - y|| / ||x|| over the messages of a compressing link; 0 where all went dense."""
        if self._energies is None:
            return 0.0 if self.messages else math.nan
        xx, _, _, dd = self._energies.tolist()
        return math.sqrt(dd / xx) if xx else math.sqrt(dd)

    @property
    def cosine(self) -> float:
        """<x, y> / (||x|| ||y||) over the same messages; 1 where all went dense."""
        if self._energies is None:
            return 1.0 if self.messages else math.nan
        xx, xy, yy, _ = self._energies.tolist()
        return xy / math.sqrt(xx * yy) if xx * yy else math.nan

    @property
    def lags(self) -> Tensor | None:
        """Sums over samples x that came again to a memory m: how m follows them.

        ||x||^2, ||x - m||^2 before and after their messages, elements of m that stayed as they
        were, all elements: fp64 [5]; None before the first, and of links without such a memory.
        """
        return self._lags

    @property
    def drift(self) -> float | None:
        """||x - m|| / ||x|| before the messages: what samples changed by, and lag before it."""
        return self._lag_of(1)

    @property
    def lag(self) -> float | None:
        """||x - m|| / ||x|| after the messages: how far what is remembered lags behind."""
        return self._lag_of(2)

    def _lag_of(self, place: int) -> float | None:
        if self._lags is None:
            return None
        sums = self._lags.tolist()
        return math.sqrt(sums[place] / sums[0]) if sums[0] else None

    @property
    def first_error(self) -> float | None:
        """`relative_error` of messages of samples that came for the first time; None of none."""
        if self._energies is None or self._lags is None:
            return None
        (xx, *_, dd), (again, _, after, *_) = self._energies.tolist(), self._lags.tolist()
        # Sums of all, less those that came again; in half precision they are a little apart.
        return math.sqrt(max(0.0, dd - after) / (xx - again)) if xx > again else None

    @property
    def stayed(self) -> float | None:
        """The share of what is remembered that messages left as it was."""
        if self._lags is None:
            return None
        *_, stayed, elements = self._lags.tolist()
        return stayed / elements if elements else None

    def to_dict(self) -> dict[str, Any]:
        """All figures under their names; None of a memory where there is none."""
        return {
            "messages": self.messages,
            **self.sent.to_dict(),
            "ratio": self.ratio,
            "below_bf16": self.below_bf16,
            **{name: getattr(self, name) for name in FIDELITY},
            "seconds": self.seconds,
            "nonfinite": self.nonfinite,
        }

    def to_state(self) -> dict[str, Any]:
        """State for a checkpoint, so that a resumed run counts on; without what is not known."""
        energies = None if self._energies is None else self._energies.tolist()
        lags = {} if self._lags is None else {"lags": self._lags.tolist()}
        counts = _known({n: getattr(self, n) for n in self.counts()})
        return {**counts, "energies": energies, **lags}

    @classmethod
    def counts(cls) -> list[str]:
        """Names of the fields that are plain numbers, which add up."""
        return [each.name for each in fields(cls) if not each.name.startswith("_")]

    def add(self, other: Traffic) -> None:
        """Counts what another of the same class has counted as well."""
        for name in other.counts():
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other._energies is not None:
            self._add_energies(other._energies)
        if other._lags is not None:
            self._add_lags(other._lags)

    def since(self: T, before: T) -> T:
        """The traffic after ``before``, a copy of this; all of it where counting began anew.

        That is where a checkpoint was loaded.
        """
        if self.messages < before.messages:
            return replace(self)
        counts = {name: getattr(self, name) - getattr(before, name) for name in self.counts()}
        return type(self)(
            **counts,
            _energies=_added(before._energies, self._energies),
            _lags=_added(before._lags, self._lags),
        )

    @classmethod
    def merged(cls, states: Iterable[dict[str, Any]]) -> Traffic:
        """The traffic of several `to_state`s together: the two ends of a link, or replicas."""
        total = cls()
        for state in states:
            part = cls()
            part.load_state(state)
            total.add(part)
        return total

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores `to_state`."""
        self.num_elements = _elements_of(state, state["messages"])
        for name, value in state.items():
            if name in ("energies", "lags"):
                sums = None if value is None else torch.tensor(value, dtype=torch.float64)
                setattr(self, f"_{name}", sums)
            else:
                setattr(self, name, value)


@dataclass
class ReplicaTraffic(Traffic):
    """Traffic between replicas, whose messages go to several others; of a step, or of all.

    All gradients of a step are one message, whatever groups they go in; so are the parameters that
    are gathered together.

    Attributes:
        floats: numbers of 32 bits in messages; a selection counts its values alone, as the papers
            do.
        traffic_bytes: what went over this rank's link, with the messages' copies to several others.
        dense_traffic_bytes: what uncompressed tensors would have put on it.
        encode_s: seconds of encoding gradients (and of beginning to send).
        wait_s: seconds of waiting for other replicas and the network.
        decode_s: seconds of decoding gradients.
    """

    floats: float = 0.0
    traffic_bytes: float = 0.0
    dense_traffic_bytes: float = 0.0
    encode_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0

    @property
    def steps(self) -> int:
        """Steps that were exchanged, skipped ones counted."""
        return self.messages

    def count_part(self, wire_bytes: int, floats: float) -> None:
        """Counts a part of the message under way."""
        self.wire_bytes += wire_bytes
        self.floats += floats

    def of_gradients(self) -> dict[str, Any]:
        """Figures of exchanged gradients, under the names of reports and checkpoints."""
        figures = {name: getattr(self, name) for name in (*AMOUNTS, *SECONDS)}
        return {"steps": self.steps, **_known(figures)}

    @classmethod
    def from_gradients(cls, figures: Mapping[str, Any]) -> ReplicaTraffic:
        """Traffic that goes on from `of_gradients`."""
        counts = dict(figures)
        steps = counts.pop("steps")
        return cls(messages=steps, **{**counts, "num_elements": _elements_of(figures, steps)})

    def of_parameters(self) -> dict[str, Any]:
        """Figures of gathered parameters, under the names of reports."""
        return {
            "gathers": self.messages,
            "wire_bytes": self.wire_bytes,
            "dense_bytes": self.dense_bytes,
            "num_elements": self.num_elements,
            "traffic_bytes": int(self.traffic_bytes),
            "seconds": self.seconds,
        }


def _added(before: Tensor | None, now: Tensor | None) -> Tensor | None:
    """The sums that came to others; None where nothing was compared since."""
    if now is None or now is before:
        return None
    if before is None:
        return now
    # What was added last may be less than rounding takes away; of these <x, y> may be negative.
    since = now - before.to(now.device)
    signed = torch.arange(len(since), device=since.device) == 1
    return torch.where(signed, since, since.clamp(min=0))


def _known(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Counts without those that are not known, as JSON has no NaN."""
    return {name: value for name, value in counts.items() if not math.isnan(value)}


def _elements_of(counts: Mapping[str, Any], num_messages: int) -> float:
    """The number of elements among saved counts, of which older ones have none."""
    known: int | None = counts.get("num_elements")
    return known if known is not None else math.nan if num_messages else 0


class Meter:
    """The traffic of one link: training, evaluation, and evaluation with compression off."""

    def __init__(self) -> None:
        self.train = Traffic()
        self.eval = Traffic()
        self.eval_off = Traffic()

    def of(self, train: bool, compressed: bool = True) -> Traffic:
        """The traffic of a phase; training counts as one, compressed or not."""
        return self.train if train else self.eval if compressed else self.eval_off

    @property
    def phases(self) -> dict[str, Traffic]:
        """All traffic under the names that reports and checkpoints use."""
        return {"train": self.train, "eval": self.eval, "eval_off": self.eval_off}
