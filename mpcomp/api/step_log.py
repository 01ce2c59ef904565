"""Figures of each step for TensorBoard, Weights & Biases or any function that takes them.

Ends of a cut are on two ranks, so figures are collected from all of them, every ``every`` steps,
and written on the first rank; bytes and seconds are those of the steps since the last time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mpcomp.comm.mesh import Mesh
from mpcomp.core.traffic import Traffic
from mpcomp.links.link import Link

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
        mesh: the ranks.
        links: all links.

    Raises:
        TypeError: a writer that is neither.
        ValueError: ``every`` is no positive whole number.
    """

    def __init__(
        self,
        writer: ScalarWriter | Callable[..., Any] | None,
        every: int,
        mesh: Mesh,
        links: Sequence[Link],
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
        self._mesh = mesh
        self._links = list(links)
        self._steps = 0
        self._began = time.perf_counter()
        self._before = self._states()

    def step(self, number: int, loss: Tensor) -> None:
        """Writes the figures of the steps since the last entry, if one is due; on every rank.

        Args:
            number: of the step, from 0.
            loss: of the step, 0-d; read from its device only where an entry is due.
        """
        self._steps += 1
        if self._steps < self._every:
            return
        own = self._states()
        found = self._mesh.all_gather_object(
            [_since(new, old) for new, old in zip(own, self._before, strict=True)],
            "figures of the step",
        )
        now = time.perf_counter()
        figures = {"loss": float(loss), "seconds": (now - self._began) / self._steps}
        total = Traffic()
        for i, link in enumerate(self._links):
            traffic = Traffic.merged(states[i] for states in found)
            total.add(traffic)
            if traffic.messages:
                name = f"cut {link.boundary} {link.direction}"
                figures[f"{name}/bytes"] = traffic.wire_bytes / self._steps
                figures[f"{name}/ratio"] = traffic.ratio
                figures |= _below(f"{name}/", traffic)
                figures[f"{name}/relative error"] = traffic.relative_error
                figures[f"{name}/cosine"] = traffic.cosine
        if total.messages:
            figures["bytes"] = total.wire_bytes / self._steps
            figures["ratio"] = total.ratio
            figures |= _below("", total)
        self._steps, self._before, self._began = 0, own, now
        if self._mesh.rank == 0:
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

    def _states(self) -> list[dict[str, Any]]:
        return [link.meter.train.to_state() for link in self._links]


def _below(name: str, traffic: Traffic) -> dict[str, float]:
    """The factor below bf16 under its tag, where it is known."""
    factor = traffic.below_bf16
    return {} if factor is None else {f"{name}below bf16": factor}


def _since(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The traffic between two `Traffic.to_state`s; all of it where counting began anew."""
    if new["messages"] < old["messages"]:
        return dict(new)  # a checkpoint was loaded
    difference = {n: new[n] - old[n] for n in new if n != "energies" and n in old}
    energies = new["energies"]
    if energies is not None and old["energies"] is not None:
        energies = [a - b for a, b in zip(energies, old["energies"], strict=True)]
    # Sums in floating point: what was added last may be less than what rounding takes away.
    return {**difference, "energies": None if energies is None else [max(e, 0) for e in energies]}


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
