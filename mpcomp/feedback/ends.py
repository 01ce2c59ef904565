"""The ends of a link that live on this rank: made when first needed, stored and restored together.

State belongs to a per-sample shape. When another shape comes, the ends start anew; should the step
that brought it be discarded, the former ends come back.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mpcomp.core.step import SampleIds
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.feedback.base import Feedback
from mpcomp.feedback.memory import Side
from mpcomp.feedback.state import EndState

__all__ = ["Ends", "end_of"]


def end_of(method: Feedback, side: Side, meta: TensorMeta, device: torch.device) -> EndState:
    """A new end of a link, for tensors of ``meta``'s per-sample shape."""
    return EndState(method, TensorMeta((1, meta.row_numel)), device, (side,))


@dataclass
class _Held:
    """The ends for one per-sample shape."""

    sample: TensorMeta | None = None
    ends: dict[Side, EndState] = field(default_factory=dict)


class Ends:
    """Sender and receiver of one link, where they are on this rank.

    Args:
        method: names what they keep.
    """

    def __init__(self, method: Feedback) -> None:
        self._method = method
        self._held = _Held()
        self._former: _Held | None = None  # before the open step brought another shape

    @property
    def by_role(self) -> dict[str, EndState]:
        """The ends made so far: "sender", "receiver"."""
        return {side.value: self._held.ends[side] for side in Side if side in self._held.ends}

    def end(self, side: Side, meta: TensorMeta, device: torch.device) -> EndState:
        """The end of one side for tensors of ``meta``'s per-sample shape."""
        self._adopt(meta)
        if side not in self._held.ends:
            self._held.ends[side] = end_of(self._method, side, meta, device)
        return self._held.ends[side]

    def prefetch(self, ids: Sequence[SampleIds]) -> None:
        """Begins to read what a step with these ids, per microbatch, will find."""
        for end in self._held.ends.values():
            if end.fields:
                known = next(iter(end.fields.values())).known
                end.prefetch(self._method.keys_to_come(each, known) for each in ids)

    def _adopt(self, meta: TensorMeta) -> None:
        sample = _sample_of(meta)
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
        """Keeps what the ends have staged."""
        self._former = None
        for end in self._held.ends.values():
            end.commit()

    def discard(self) -> None:
        """Forgets what the ends have staged."""
        if self._former is not None:
            self._held, self._former = self._former, None
        for end in self._held.ends.values():
            end.discard()

    def drop_empty(self) -> None:
        """Lets go of ends that keep nothing, as of those that were made for no message."""
        held = {side: end for side, end in self._held.ends.items() if end.num_slots}
        self._held = _Held(self._held.sample, held) if held else _Held()

    def state_dict(self) -> dict[str, Any]:
        """Stored rows of each end, and the sample shape they belong to."""
        state: dict[str, Any] = {}
        for role, end in self.by_role.items():
            state.update({f"{role}.{key}": value for key, value in end.state_dict().items()})
        if state:
            assert self._held.sample is not None
            sample = self._held.sample
            state["sample"] = {"shape": list(sample.shape), "channels_last": sample.channels_last}
        return state

    def load_state_dict(self, state: Mapping[str, Any], device: Mapping[str, torch.device]) -> None:
        """Restores `state_dict`; ``device`` says where each role's end lives."""
        self._held, self._former = _Held(), None
        if not state:
            return
        sample = state["sample"]
        meta = TensorMeta(tuple(sample["shape"]), torch.float32, sample["channels_last"])
        for side in Side:
            prefix = f"{side.value}."
            rows: dict[str, Tensor] = {
                key.removeprefix(prefix): value
                for key, value in state.items()
                if key.startswith(prefix)
            }
            if rows:
                self.end(side, meta, device[side.value]).load_state_dict(rows)


@functools.lru_cache(4096)
def _sample_of(meta: TensorMeta) -> TensorMeta:
    """One row of a tensor, whatever its dtype."""
    return replace(meta.with_rows(1), dtype=torch.float32)
