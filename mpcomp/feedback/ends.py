"""The ends of a link that live on this rank: made when first needed, stored and restored together.

State belongs to a per-sample shape. When another shape comes, the ends start anew; should the step
that brought it be discarded, the former ends come back.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpcomp.core.step import SampleIds
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.feedback.base import Adaptable, Feedback, Receiver, Sender

__all__ = ["Ends"]


@dataclass(frozen=True)
class _Held:
    """The ends for one per-sample shape."""

    sample: TensorMeta | None = None
    sender: Sender | None = None
    receiver: Receiver | None = None


class Ends:
    """Sender and receiver of one link, where they are on this rank.

    Args:
        method: what makes them.
    """

    def __init__(self, method: Feedback) -> None:
        self._method = method
        self._held = _Held()
        self._former: _Held | None = None  # before the open step brought another shape

    def use(self, method: Feedback) -> None:
        """Codes with another inner compressor from now on; what is remembered stays."""
        if method is self._method:
            return
        self._method = method
        for held in (self._held, self._former or _Held()):
            for end in (held.sender, held.receiver):
                if end is not None:
                    assert isinstance(end, Adaptable), "Adaptive refuses methods of other ends"
                    end.use(method)

    @property
    def by_role(self) -> dict[str, Sender | Receiver]:
        """The ends made so far: "sender", "receiver"."""
        ends = {"sender": self._held.sender, "receiver": self._held.receiver}
        return {role: end for role, end in ends.items() if end is not None}

    def sender(self, meta: TensorMeta, device: torch.device) -> Sender:
        """The sender for tensors of ``meta``'s per-sample shape."""
        self._adopt(meta)
        if self._held.sender is None:
            self._held = replace(self._held, sender=self._method.sender(meta, device))
        assert self._held.sender is not None
        return self._held.sender

    def receiver(self, meta: TensorMeta, device: torch.device) -> Receiver:
        """The receiver for tensors of ``meta``'s per-sample shape."""
        self._adopt(meta)
        if self._held.receiver is None:
            self._held = replace(self._held, receiver=self._method.receiver(meta, device))
        assert self._held.receiver is not None
        return self._held.receiver

    def prefetch(self, ids: Sequence[SampleIds]) -> None:
        """Begins to read what a step with these ids, per microbatch, will find."""
        for end in self.by_role.values():
            if end.store is not None:
                store = end.store
                store.prefetch([self._method.keys_to_come(one, store) for one in ids])

    def _adopt(self, meta: TensorMeta) -> None:
        sample = replace(meta.with_rows(1), dtype=torch.float32)
        if sample == self._held.sample:
            return
        if self._held.sample is not None and self._former is None:
            self._former = self._held
            if self._method.by_sample:
                warnings.warn(
                    f"{self._method}: samples of shape {list(sample.shape[1:])} come after those "
                    f"of {list(self._held.sample.shape[1:])}, so what was kept of all samples is "
                    "dropped and they go raw again; pad all batches to one length",
                    stacklevel=2,
                )
        self._held = _Held(sample)

    def commit(self) -> None:
        """Stores what the ends have noted."""
        self._former = None
        for end in self.by_role.values():
            end.commit()

    def discard(self) -> None:
        """Forgets what the ends have noted."""
        if self._former is not None:
            self._held, self._former = self._former, None
        for end in self.by_role.values():
            end.discard()

    def state_dict(self) -> dict[str, Any]:
        """Stored rows of each end, and the sample shape they belong to."""
        state: dict[str, Any] = {}
        for role, end in self.by_role.items():
            if end.store is not None:
                state.update({f"{role}.{key}": v for key, v in end.store.state_dict().items()})
        if state:
            assert self._held.sample is not None
            sample = self._held.sample
            state["sample"] = {"shape": list(sample.shape), "channels_last": sample.channels_last}
        return state

    def load_state_dict(self, state: dict[str, Any], device: dict[str, torch.device]) -> None:
        """Restores `state_dict`; ``device`` says where each role's end lives."""
        self._held, self._former = _Held(), None
        if not state:
            return
        sample = state["sample"]
        meta = TensorMeta(tuple(sample["shape"]), torch.float32, sample["channels_last"])
        make = {"sender": self.sender, "receiver": self.receiver}
        for role, end_of in make.items():
            rows: dict[str, Tensor] = {
                key.removeprefix(f"{role}."): value
                for key, value in state.items()
                if key.startswith(f"{role}.")
            }
            if rows:
                store = end_of(meta, device[role]).store
                assert store is not None
                store.load_state_dict(rows)
