"""The endpoint of a basis: what the ends of a link have learned, and when a new one is sent.

The sender keeps mean and covariance of the vectors of one microbatch a step, each divided by its
root mean square, older ones with falling weight; for a weighted basis the same of the gradients
that come back for them, so that no few tokens say alone what errors cost. From time to time it
makes a basis of these, and encodes a microbatch in the basis that there is and in the new one. To
send that is to buy where one has rented, and the old rule for it holds: as soon as the rent paid
since the last one (the vectors sent, times what each would have been shorter by) is the price, its
coded bytes. So a sender spends no more on bases than it has lost by waiting (Karlin et al., 1988),
and none where data do not profit: where all directions are as strong, or many elements are zero.
The microbatch is one that the new basis was not made from, so that one of too few vectors does not
seem better than it is.

Such a look takes eigenvectors and two codings. What a new basis would save a vector grows with the
steps since the last one, about in proportion, so the rent grows with their square: the next look is
when that reaches the price.

A new basis rides on a message of the next step and is used from the step after it on, by both ends;
nothing happens in a step that is discarded.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpcomp import entropy
from mpcomp.compressors.klt import KLT, LARGEST_WIDTH, Basis, InBasis
from mpcomp.compressors.tokens import Tokens
from mpcomp.core.context import MessageContext, TensorMeta, padded_positions, zero_padding
from mpcomp.core.randomness import generator_for
from mpcomp.core.spec import SpecValue
from mpcomp.core.wire import Parts, Payload
from mpcomp.feedback.memory import Side
from mpcomp.links.endpoints.base import Plan, StateSize, WrappingEndpoint

__all__ = ["BasisEndpoint", "WithNews"]

#: Microbatches, and vectors a channel, that moments go back at least.
_MICROBATCHES, _VECTORS = 16, 64
#: The share of what an error costs that hangs on its size alone: few gradients know the directions
#: of little cost badly, and errors there would grow beyond what is known of them.
_UNIFORM = 0.5
#: The most by which the steps since the last basis grow from one look for a better one to the next.
_GROWTH = 4
#: Bytes an entry: numbers and a matrix in fp32; of a sender its inverse too, and of each average.
_ENTRY_BYTES, _MOMENT_BYTES = {Side.SENDER: 2 + 4 + 4, Side.RECEIVER: 2 + 4}, 8


@dataclass(frozen=True)
class _Moments:
    """Means over vectors.

    Attributes:
        num: vectors.
        mean: fp64 [C] on the CPU.
        second: mean of x x^T, fp64 [C, C] on the CPU.
    """

    num: int
    mean: Tensor
    second: Tensor

    @classmethod
    def of(cls, x: Tensor) -> _Moments | None:
        """Moments of a tensor's vectors; None if all of them are zero."""
        vectors = Tokens.of(TensorMeta.of(x)).split(x)
        size = vectors.square().mean(1, keepdim=True, dtype=torch.float64).sqrt()
        there = (size > 0).squeeze(1)
        num = int(there.sum())
        if not num:
            return None
        vectors = (vectors[there] / size[there]).to(torch.float32)
        mean = vectors.mean(0, dtype=torch.float64).cpu()
        return cls(num, mean, (vectors.T @ vectors).to("cpu", torch.float64) / num)


class _Average:
    """Moments of what steps have brought, older ones with falling weight.

    Attributes:
        batches: that are in them.
        mean: as of `_Moments`.
        second: likewise.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.mean = self.second = torch.zeros((), dtype=torch.float64)

    def add(self, fresh: _Moments) -> None:
        """Takes those of one more microbatch."""
        self.batches += 1
        least = min(1 / _MICROBATCHES, fresh.num / (_VECTORS * len(fresh.mean)))
        weight = max(1 / self.batches, least)
        self.mean = self.mean + weight * (fresh.mean - self.mean)
        self.second = self.second + weight * (fresh.second - self.second)

    @property
    def covariance(self) -> Tensor:
        """Fp64 [C, C]."""
        return self.second - torch.outer(self.mean, self.mean)

    def state_dict(self, name: str) -> dict[str, Tensor]:
        """All that is kept, under names that begin with one."""
        if not self.batches:
            return {}
        batches = torch.tensor(self.batches)
        return {
            f"{name}_batches": batches,
            f"{name}_mean": self.mean,
            f"{name}_second": self.second,
        }

    def load_state_dict(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `state_dict` gave."""
        if f"{name}_batches" in state:
            self.batches = int(state[f"{name}_batches"])
            self.mean, self.second = (state[f"{name}_{of}"].cpu() for of in ("mean", "second"))


class _Sender:
    """The sender's end, for vectors of one width.

    Args:
        method: of the link.
    """

    def __init__(self, method: KLT) -> None:
        self.basis: Basis | None = None
        self.news: Basis | None = None
        self._method = method
        self._sent, self._came_back = _Average(), _Average()
        self._vectors = self._steps = 0  # since the last basis was sent
        self._due = 1  # step of those with the next look
        # What the open step has brought.
        self._num, self._announced = 0, False
        self._fresh: _Moments | None = None
        self._gradients: _Moments | None = None
        self._x: Tensor | None = None

    def count(self, num: int, *, announces: bool) -> None:
        """Notes a message of so many vectors, and whether news may go with it."""
        self._num += num
        self._announced |= announces and self.news is not None

    def observe(self, x: Tensor) -> None:
        """Notes what is sent in a message."""
        self._fresh = _Moments.of(x)
        looks = self._sent.batches and self.news is None and self._steps + 1 >= self._due
        # A copy, as the stage may write to the tensor before the step is over.
        self._x = x.clone() if looks else None

    def observe_gradient(self, gradient: Tensor) -> None:
        """Notes what came back for what was sent in a message."""
        self._gradients = _Moments.of(gradient)

    def commit(self) -> None:
        """Learns from the step, and looks for a better basis if it is time."""
        if self._announced:
            self.basis, self.news = self.news, None
            self._vectors, self._steps, self._due = 0, 0, 1
        if self._num:
            self._vectors += self._num
            self._steps += 1
        if self._fresh is not None:
            if self._x is not None:
                self._look(self._x)
            self._sent.add(self._fresh)
        if self._gradients is not None:
            self._came_back.add(self._gradients)
        self.discard()

    def discard(self) -> None:
        """Forgets the step."""
        self._num, self._announced = 0, False
        self._fresh = self._gradients = self._x = None

    def _look(self, x: Tensor) -> None:
        """Makes a new basis, and keeps it to be sent if it would have paid."""
        basis = Basis.of(self._sent.covariance, self._weights)
        saved = self._bytes(x, self.basis) - self._bytes(x, basis)
        rent = saved * self._vectors / Tokens.of(TensorMeta.of(x)).num
        price = basis.coded.numel()
        if rent >= price:
            self.news = basis
        growth = min(_GROWTH, math.sqrt(price / max(rent, 1)))
        self._due = max(self._steps + 1, math.ceil(self._steps * growth))

    @property
    def _weights(self) -> Tensor | None:
        """Costs of errors, F: fp64 [C, C], 1 in the mean; None where only their sizes count."""
        if not self._came_back.batches:
            return None
        weights = self._came_back.second / self._came_back.second.diagonal().mean()
        return (1 - _UNIFORM) * weights + _UNIFORM * torch.eye(len(weights), dtype=torch.float64)

    def _bytes(self, x: Tensor, basis: Basis | None) -> int:
        """Bytes that a tensor takes in a basis."""
        coder = InBasis(self._method.coder, basis, "")
        return sum(part.nbytes for part in coder.compress(x, generator_for("a look")))

    def state_dict(self) -> dict[str, Tensor]:
        """All that is kept."""
        if not (self._sent.batches or self._steps):
            return {}
        state = {
            "counts": torch.tensor([self._vectors, self._steps, self._due]),
            **self._sent.state_dict("sent"),
            **self._came_back.state_dict("came_back"),
        }
        for name, basis in (("basis", self.basis), ("news", self.news)):
            if basis is not None:
                state[name] = basis.numbers
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `state_dict` gave."""
        self._vectors, self._steps, self._due = state["counts"].tolist()
        self._sent.load_state_dict("sent", state)
        self._came_back.load_state_dict("came_back", state)
        self.basis, self.news = _basis(state, "basis"), _basis(state, "news")


class _Receiver:
    """The receiver's end, for vectors of one width."""

    def __init__(self) -> None:
        self.basis: Basis | None = None
        self.heard: Basis | None = None

    def commit(self) -> None:
        """Takes the basis that was heard of."""
        self.basis, self.heard = self.heard or self.basis, None

    def discard(self) -> None:
        """Forgets it."""
        self.heard = None

    def state_dict(self) -> dict[str, Tensor]:
        """All that is kept."""
        return {} if self.basis is None else {"basis": self.basis.numbers}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `state_dict` gave."""
        self.basis = _basis(state, "basis")


def _basis(state: Mapping[str, Tensor], name: str) -> Basis | None:
    return Basis(state[name].cpu()) if name in state else None


class WithNews(Plan):
    """A message with room in front for a new basis.

    Args:
        plan: of the rest.
        news: the new basis, at a sender that has one.
    """

    def __init__(self, plan: Plan, news: Basis | None) -> None:
        self.meta, self.context, self.check = plan.meta, plan.context, plan.check
        self.on_host = plan.on_host
        self.plan, self._news = plan, news
        self._width = width = Tokens.of(plan.meta).width
        room = TensorMeta((entropy.max_bytes(width, width),), torch.uint8)
        self._parts = Parts(((room,), plan.layout), (True, plan.variable))
        self.layout = self._parts.layout
        self.variable = True

    def encode(self, x: Tensor, *, asked: bool = False) -> Payload:
        own = self.plan.encode(x, asked=asked)
        self.lags = self.plan.lags
        news = torch.empty(0, dtype=torch.uint8) if self._news is None else self._news.coded
        return self._parts.joined([(news.to(own[0].device),), own])

    def heard(self, payload: Payload) -> Basis | None:
        """The new basis in a payload, if there is one.

        Raises:
            RuntimeError: the payload is damaged.
        """
        (news,), _ = self._parts.parted(payload)
        return Basis.decoded(news, self._width) if news.numel() else None

    def decode(self, payload: Payload) -> Tensor:
        return self.plan.decode(self._own(payload))

    def arrived(self, payload: Payload) -> Tensor:
        return self.plan.arrived(self._own(payload))

    def positions(self, payload: Payload) -> Tensor | None:
        return self.plan.positions(self._own(payload))

    def _own(self, payload: Payload) -> Payload:
        """The payload without the new basis."""
        _, own = self._parts.parted(payload)
        return own


class BasisEndpoint(WrappingEndpoint, of=KLT):
    """The ends of one link that are on this rank, with a basis for each width of its vectors.

    Args:
        method: of the link.
    """

    method: KLT

    def __init__(self, method: KLT) -> None:
        super().__init__(method)
        self._senders: dict[int, _Sender] = {}
        self._receivers: dict[int, _Receiver] = {}
        #: What codes in the basis of an end, and that basis.
        self._coded: dict[tuple[Side, int], tuple[Basis | None, SpecValue]] = {}

    @property
    def follows(self) -> bool:  # type: ignore[override]
        """Whether gradients say what an error costs."""
        return self.method.weighted

    def plan(
        self, side: Side, meta: TensorMeta, context: MessageContext, device: torch.device
    ) -> Plan:
        width, news = Tokens.of(meta).width, None
        if width > LARGEST_WIDTH:
            warnings.warn(
                f"{self.method}: {width} channels cross here, and a basis is of at most "
                f"{LARGEST_WIDTH}; they go as with {self.method.inner}",
                stacklevel=2,
            )
            return self.inner.plan(side, meta, context, device)
        if side is Side.SENDER:
            sender = self._sender(width)
            basis, news = sender.basis, sender.news
        else:
            basis = self._receiver(width).basis
        self.inner.method = self._in_basis(side, width, basis)
        plan = self.inner.plan(side, meta, context, device)
        return WithNews(plan, news) if context.learns else plan

    def observe(self, x: Tensor, num_bytes: int, plan: Plan) -> None:
        context = plan.context
        tokens = Tokens.of(plan.meta)
        if not (context.train and context.on) or tokens.width > LARGEST_WIDTH:
            return
        sender = self._sender(tokens.width)
        sender.count(tokens.num, announces=isinstance(plan, WithNews))
        if context.learns:
            sender.observe(_zero_padding(x, context))

    def hear(self, payload: Payload, plan: Plan) -> None:
        if isinstance(plan, WithNews):
            self._receiver(Tokens.of(plan.meta).width).heard = plan.heard(payload)

    def crossed(
        self,
        side: Side,
        plan: Plan,
        payload: Payload,
        arrived: Callable[[], Tensor],
        context: MessageContext,
    ) -> None:
        width = Tokens.of(plan.meta).width
        if side is Side.RECEIVER and context.learns and width <= LARGEST_WIDTH:
            self._sender(width).observe_gradient(_zero_padding(arrived(), context))

    def measured(self, x: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        return self.inner.measured(x, plan.plan if isinstance(plan, WithNews) else plan)

    def copies(self, side: Side) -> Iterator[tuple[Sequence[str], Tensor]]:
        known = {w: e.basis for of, w, e in self._ends if of is side and e.basis is not None}
        if known:
            yield ["basis"], torch.tensor([sum(w * basis.checksum for w, basis in known.items())])
        yield from super().copies(side)

    def state_size(self, side: Side, meta: TensorMeta, num_samples: int | None) -> list[StateSize]:
        averages = (1 + self.method.weighted) if side is Side.SENDER else 0
        entry = _ENTRY_BYTES[side] + averages * _MOMENT_BYTES
        basis = StateSize(1, entry * Tokens.of(meta).width ** 2)
        return [basis, *super().state_size(side, meta, num_samples)]

    def commit(self) -> None:
        super().commit()
        for _, _, end in self._ends:
            end.commit()

    def discard(self, *, unused: bool = False) -> None:
        super().discard(unused=unused)
        for _, _, end in self._ends:
            end.discard()

    def state_dict(self) -> dict[str, Any]:
        bases = {
            f"{side.value}.{width}.{name}": value
            for side, width, end in self._ends
            for name, value in end.state_dict().items()
        }
        of_memory = self.inner.state_dict()
        return {"sample": {}, **bases, **of_memory} if bases or of_memory else {}

    def load_state_dict(self, state: Mapping[str, Any], device: Mapping[str, torch.device]) -> None:
        self._senders, self._receivers = {}, {}
        found: dict[tuple[Side, int], dict[str, Tensor]] = {}
        of_memory: dict[str, Any] = {}
        for key, value in state.items():
            role, _, rest = key.partition(".")
            width, _, name = rest.partition(".")
            if width.isdigit():
                found.setdefault((Side(role), int(width)), {})[name] = value
            elif key != "sample" or value:  # empty beside a basis alone
                of_memory[key] = value
        for (side, of), entries in found.items():
            end = self._sender(of) if side is Side.SENDER else self._receiver(of)
            end.load_state_dict(entries)
        self.inner.load_state_dict(of_memory, device)

    def _in_basis(self, side: Side, width: int, basis: Basis | None) -> SpecValue:
        """The coder in a basis of one end: the same value for as long as the basis is."""
        known = self._coded.get((side, width))
        if known is None or known[0] is not basis:
            known = self._coded[side, width] = basis, self.method.at(basis)
        return known[1]

    def _sender(self, width: int) -> _Sender:
        if width not in self._senders:
            self._senders[width] = _Sender(self.method)
        return self._senders[width]

    def _receiver(self, width: int) -> _Receiver:
        if width not in self._receivers:
            self._receivers[width] = _Receiver()
        return self._receivers[width]

    @property
    def _ends(self) -> list[tuple[Side, int, _Sender | _Receiver]]:
        """All ends, with their sides and widths."""
        return [
            *((Side.SENDER, width, end) for width, end in self._senders.items()),
            *((Side.RECEIVER, width, end) for width, end in self._receivers.items()),
        ]


def _zero_padding(x: Tensor, context: MessageContext) -> Tensor:
    """A microbatch with zeros where it is padded."""
    return zero_padding(x.detach(), padded_positions(context.valid, TensorMeta.of(x), x.device))
