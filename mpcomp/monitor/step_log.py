"""Figures of each step for TensorBoard, Weights & Biases or any function that takes them.

They are those of a window of steps (`mpcomp.monitor.step_window`), gathered from all ranks every
``every`` steps and written on the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mpcomp.core.sent import Sent
from mpcomp.core.traffic import LAGS, Traffic
from mpcomp.links.link import Link
from mpcomp.monitor.step_window import StepWindow

__all__ = ["ScalarWriter", "StepLog", "tensorboard_writer"]


class ScalarWriter(Protocol):
    """A writer of numbers, as TensorBoard's SummaryWriter is one."""

    def add_scalar(self, tag: str, value: float, global_step: int) -> Any: ...


class StepLog:
    """Writes figures of the steps of a pipeline.

    Args:
        writer: has ``add_scalar(tag, value, step)``, or is called with a mapping of tags to
            numbers and ``step=``, as ``wandb.log`` is; None on ranks that write nothing.
        every: steps from one entry to the next.
        window: of the pipeline's steps.
        links: all links.
        writes: whether this is the rank that writes.

    Raises:
        TypeError: a writer that is neither.
        ValueError: ``every`` is no positive whole number.
    """

    def __init__(
        self,
        writer: ScalarWriter | Callable[..., Any] | None,
        every: int,
        window: StepWindow,
        links: Sequence[Link],
        *,
        writes: bool,
    ) -> None:
        if not (writer is None or callable(writer) or hasattr(writer, "add_scalar")):
            raise TypeError(
                f"log_to got a {type(writer).__name__}: expected an object with add_scalar(tag, "
                "value, step), such as torch.utils.tensorboard.SummaryWriter, or a function of "
                "(mapping, step=), such as wandb.log"
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: expected a whole number of steps, 1 or more")
        self._writer = writer
        self._every = every
        self._window = window
        self._names = [f"cut {link.boundary} {link.direction}" for link in links]
        self._writes = writes
        self._steps = 0

    def step(self, number: int, loss: Tensor) -> None:
        """Writes the figures of the steps since the last entry, if one is due; on every rank.

        Args:
            number: of the step, from 0.
            loss: of the step, 0-d; read from its device only where an entry is due.
        """
        self._steps += 1
        if self._steps < self._every:
            return
        found = self._window.gathered(self._steps)
        figures = {"loss": float(loss), "seconds": found.ranks[0]["seconds"]}
        for name, traffic in zip(self._names, found.links, strict=True):
            if traffic.messages:
                figures[f"{name}/bytes"] = traffic.wire_bytes / self._steps
                figures[f"{name}/ratio"] = traffic.ratio
                figures |= _below(f"{name}/", traffic)
                figures[f"{name}/relative error"] = traffic.relative_error
                figures[f"{name}/cosine"] = traffic.cosine
                lags = {each: getattr(traffic, each) for each in LAGS}
                figures |= {f"{name}/{k}": v for k, v in lags.items() if v is not None}
        whole = found.account.whole
        if whole.dense_bytes:
            figures["bytes"] = whole.wire_bytes / self._steps
            figures["ratio"] = whole.wire_ratio
            figures |= _below("", whole) | _below("cuts/", found.account.cuts)
        self._steps = 0
        self._window.begin()
        if self._writes:
            self._write(figures, number)

    def _write(self, figures: Mapping[str, float], number: int) -> None:
        if self._writer is None:
            return
        add_scalar = getattr(self._writer, "add_scalar", None)
        if add_scalar is None:
            assert callable(self._writer)
            self._writer(dict(figures), step=number)
            return
        for tag, value in figures.items():
            add_scalar(tag, value, number)


def _below(name: str, traffic: Traffic | Sent) -> dict[str, float]:
    """The factor below bf16 under its tag, where it is known."""
    factor = traffic.below_bf16
    return {} if factor is None else {f"{name}below bf16": factor}


def tensorboard_writer(folder: Any) -> Any:
    """A SummaryWriter of torch for a folder.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed; the message says how to.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'TensorBoard is not installed: pip install "mpcomp[tensorboard]"'
        ) from error
    return SummaryWriter(folder)
