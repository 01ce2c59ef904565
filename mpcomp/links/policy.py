"""The contract of an adaptive link's policy: what a link asks of it, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.feedback.base import Feedback

__all__ = ["Policy"]


class Policy(Protocol):
    """Chooser of the compression factor of a link, which changes between steps alone."""

    cf: float

    @property
    def coder(self) -> Compressor | Feedback:
        """Coder of a message of training: the method at `cf`, or `Identity`."""

    @property
    def measures_energies(self) -> bool:
        """Whether this step wants the tensor of `note_energies`."""

    def note_energies(
        self,
        target: Tensor,
        against: Tensor,
        padded: Tensor | None,
        draw: Callable[[str], torch.Generator],
    ) -> None:
        """Takes what is compressed, and what its error is compared with."""

    def note_message(self, num_bytes: int, meta: TensorMeta) -> None:
        """Counts a message of training that was sent while compression was on."""

    def fresh(self) -> Policy:
        """A policy as this one was before the first step."""

    def state_dict(self) -> dict[str, Any]:
        """State that JSON can hold: enough to go on exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
