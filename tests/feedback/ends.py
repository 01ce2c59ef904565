"""The two ends of a feedback method, driven by hand."""

from collections.abc import Sequence

import torch
from methods import same_bits
from torch import Tensor

from mpcomp import Feedback, TensorMeta
from mpcomp.core.randomness import generator_for
from mpcomp.core.step import SampleIds, Visit


def visit(step: int, microbatch: int = 0, ids: SampleIds = None, unit: float = 1.0) -> Visit:
    """As a link makes it: both ends draw alike, and again alike when asked again."""
    return Visit(
        step, microbatch, lambda part: generator_for("test", step, microbatch, part), ids, unit
    )


class Wire:
    """A sender, a receiver, and the checks that every message must pass."""

    def __init__(self, method: Feedback, meta: TensorMeta) -> None:
        self.sender = method.sender(meta, torch.device("cpu"))
        self.receiver = method.receiver(meta, torch.device("cpu"))

    def send(self, x: Tensor, at: Visit) -> Tensor:
        """What arrives for ``x``; nothing is stored before `commit`."""
        meta = TensorMeta.of(x)
        before = x.clone()
        layout = self.sender.layout(meta, at)
        assert layout == self.receiver.layout(meta, at)  # known before there is a message
        assert self.sender.check(at, meta.num_rows) == self.receiver.check(at, meta.num_rows)
        payload = self.sender.encode(x, at)
        assert [TensorMeta.of(part).shape for part in payload] == [part.shape for part in layout]
        assert [part.dtype for part in payload] == [part.dtype for part in layout]
        y = self.receiver.decode(payload, meta, at)
        assert y.shape == x.shape and y.dtype == x.dtype and same_bits(x, before)
        assert TensorMeta.of(y).channels_last == meta.channels_last
        return y

    def send_dense(self, x: Tensor, at: Visit) -> None:
        """``x`` itself went over, as in a warm-up."""
        self.sender.observe_dense(x, at)
        self.receiver.observe_dense(x, at)

    def commit(self) -> None:
        self.sender.commit()
        self.receiver.commit()

    def step(self, x: Tensor, at: Visit) -> Tensor:
        """One message and its commit."""
        y = self.send(x, at)
        self.commit()
        return y

    def residual(self, num_rows: int, microbatch: int = 0) -> Tensor:
        """The sender's rows of a microbatch: residuals, or estimates."""
        return self.rows(self.sender, [(microbatch, row) for row in range(num_rows)])

    @staticmethod
    def rows(end, keys: Sequence[tuple[int, ...]]) -> Tensor:
        return end.store.read(keys)

    def assert_ends_agree(self) -> None:
        """Slots, flags and every stored bit are equal at both ends."""
        mine, theirs = self.sender.store.state_dict(), self.receiver.store.state_dict()
        assert mine.keys() == theirs.keys()
        assert all(same_bits(mine[key], theirs[key]) for key in mine)
