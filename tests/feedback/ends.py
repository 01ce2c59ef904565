"""The two ends of a feedback method, driven by hand."""

from collections.abc import Sequence

import torch
from methods import same_bits
from models import assert_ends_agree, store_of
from torch import Tensor

from mpcomp import Feedback, TensorMeta
from mpcomp.core.context import MessageContext, SampleIds
from mpcomp.core.randomness import generator_for
from mpcomp.feedback.memory import Side
from mpcomp.feedback.state import EndState
from mpcomp.links.endpoints.memory import DensePlan, MemoryPlan, end_of

CPU = torch.device("cpu")


def context(
    step: int, microbatch: int = 0, ids: SampleIds = None, unit: float = 1.0
) -> MessageContext:
    """As a link makes it: both ends draw alike, and again alike when asked again."""
    return MessageContext(
        step, microbatch, lambda part: generator_for("test", step, microbatch, part), ids, unit
    )


def plan_of(method: Feedback, end: EndState, meta: TensorMeta, at: MessageContext) -> MemoryPlan:
    """The plan of a message at one end."""
    return MemoryPlan(method, end, meta, at, CPU)


class Wire:
    """A sender, a receiver, and the checks that every message must pass."""

    def __init__(self, method: Feedback, meta: TensorMeta) -> None:
        self.method = method
        self.sender = end_of(method, Side.SENDER, meta, CPU)
        self.receiver = end_of(method, Side.RECEIVER, meta, CPU)

    def plans(self, meta: TensorMeta, at: MessageContext) -> list[MemoryPlan]:
        """The plans of a message at both ends."""
        return [plan_of(self.method, end, meta, at) for end in (self.sender, self.receiver)]

    def send(self, x: Tensor, at: MessageContext) -> Tensor:
        """What arrives for ``x``; nothing is stored before `commit`."""
        meta = TensorMeta.of(x)
        before = x.clone()
        sender, receiver = self.plans(meta, at)
        assert sender.layout == receiver.layout  # known before there is a message
        assert sender.check == receiver.check
        payload = sender.encode(x)
        got = [TensorMeta.of(part).shape for part in payload]
        longest = [part.shape for part in sender.layout]
        if sender.variable:  # but for the last one, which may be shorter
            assert got.pop() <= longest.pop()
        assert got == longest
        assert [part.dtype for part in payload] == [part.dtype for part in sender.layout]
        y = receiver.decode(payload)
        assert y.shape == x.shape and y.dtype == x.dtype and same_bits(x, before)
        assert TensorMeta.of(y).channels_last == meta.channels_last
        return y

    def send_dense(self, x: Tensor, at: MessageContext) -> None:
        """``x`` itself went over, as in a warm-up."""
        meta = TensorMeta.of(x)
        payload = DensePlan(self.sender, meta, at, CPU).encode(x)
        DensePlan(self.receiver, meta, at, CPU).decode(payload)

    def commit(self) -> None:
        self.sender.commit()
        self.receiver.commit()

    def step(self, x: Tensor, at: MessageContext) -> Tensor:
        """One message and its commit."""
        y = self.send(x, at)
        self.commit()
        return y

    def residual(self, num_rows: int, microbatch: int = 0) -> Tensor:
        """The sender's rows of a microbatch: residuals, or estimates."""
        return self.rows(self.sender, [(microbatch, row) for row in range(num_rows)])

    @staticmethod
    def rows(end: EndState, keys: Sequence[tuple[int, ...]]) -> Tensor:
        return store_of(end).read(keys)

    def assert_ends_agree(self) -> None:
        """Slots, flags and every stored bit of estimates are equal at both ends."""
        assert_ends_agree(self.sender, self.receiver)
