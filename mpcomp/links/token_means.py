"""The means of tokens that the ends of a link keep: see `mpcomp.compressors.token_mean`.

They are computed on the CPU, in an order of additions that is always the same, so that both ends
have the same bits wherever the same tensors arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.compressors.token_mean import LessMean, TokenMean
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.wire import Payload
from mpcomp.feedback.memory import Side
from mpcomp.links.learned import Learned, Sent, Visit, by_end

__all__ = ["TokenMeans"]

#: Occurrences of a token that its mean goes back.
_HORIZON: Final = 64
_Whole: TypeAlias = NDArray[np.int64]
_PART: Final = "means"  # of the names of what is kept


def _summed(
    tokens: _Whole, counts: _Whole, vectors: NDArray[np.float32]
) -> tuple[_Whole, _Whole, NDArray[np.float32]]:
    """Each token once, ascending; sums of its counts and of its vectors, in their order."""
    order = np.argsort(tokens, kind="stable")
    found, first = np.unique(tokens[order], return_index=True)
    sums: NDArray[np.float32] = np.add.reduceat(vectors[order], first, axis=0)
    return found, np.add.reduceat(counts[order], first), sums


class _Means:
    """The means of one end, for vectors of one width."""

    def __init__(self, width: int) -> None:
        self._rows: dict[int, int] = {}
        self._means = np.zeros((0, width), np.float32)
        self._occurrences = np.zeros(0, np.int64)
        # By microbatch: tokens, how often they occur, sums of their vectors.
        self._noted: dict[int, tuple[_Whole, _Whole, NDArray[np.float32]]] = {}

    @property
    def occurrences(self) -> int:
        """Occurrences of all tokens."""
        return int(self._occurrences.sum())

    def of(self, tokens: _Whole) -> NDArray[np.float32]:
        """The mean of each token [n], zero of one that has not occurred: [n, C]."""
        found, places = np.unique(tokens, return_inverse=True)
        means = np.zeros((len(found), self._means.shape[1]), np.float32)
        rows = np.array([self._rows.get(token, -1) for token in found.tolist()], np.int64)
        known = rows >= 0
        means[known] = self._means[rows[known]]
        at_each: NDArray[np.float32] = means[places]
        return at_each

    def note(self, microbatch: int, tokens: _Whole, vectors: NDArray[np.float32]) -> None:
        """Takes the vectors [n, C] of tokens [n], for the end of the step."""
        if len(tokens):
            self._noted[microbatch] = _summed(tokens, np.ones_like(tokens), vectors)

    def commit(self) -> None:
        """Moves the means."""
        noted = [self._noted[microbatch] for microbatch in sorted(self._noted)]
        self._noted = {}
        if not noted:
            return
        tokens, counts, sums = _summed(
            *(np.concatenate(parts) for parts in zip(*noted, strict=True))
        )
        rows = self._rows_of(tokens)
        self._occurrences[rows] += counts
        back = np.minimum(self._occurrences[rows], _HORIZON)
        weights = np.minimum(counts / back, 1.0).astype(np.float32)[:, None]
        means = sums / counts[:, None].astype(np.float32)
        self._means[rows] = self._means[rows] + weights * (means - self._means[rows])

    def discard(self) -> None:
        """Forgets the step."""
        self._noted = {}

    def _rows_of(self, tokens: _Whole) -> _Whole:
        """The rows of tokens, new ones for those that have none."""
        rows = [self._rows.setdefault(token, len(self._rows)) for token in tokens.tolist()]
        more = len(self._rows) - len(self._means)
        if more > 0:
            more = max(more, len(self._means))  # twice as many: not a copy for each token
            self._means = np.pad(self._means, ((0, more), (0, 0)))
            self._occurrences = np.pad(self._occurrences, (0, more))
        return np.array(rows, np.int64)

    def state_dict(self) -> dict[str, Tensor]:
        """All that is kept."""
        if not self._rows:
            return {}
        num = len(self._rows)
        return {
            "tokens": torch.tensor(list(self._rows)),
            "means": torch.from_numpy(self._means[:num].copy()),
            "occurrences": torch.from_numpy(self._occurrences[:num].copy()),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `state_dict` gave."""
        self._rows = {token: row for row, token in enumerate(state["tokens"].tolist())}
        self._means = state["means"].cpu().numpy().copy()
        self._occurrences = state["occurrences"].cpu().numpy().copy()


class TokenMeans:
    """The ends of one link that are on this rank, with means for each width of its vectors.

    Args:
        method: of the link.
        inner: what is learned of what is left; None for nothing.
    """

    def __init__(self, method: TokenMean, inner: Learned | None) -> None:
        self._method = method
        self._inner = inner
        self._ends: dict[tuple[Side, int], _Means] = {}

    def coder(self, side: Side, visit: Visit) -> LessMean:
        """The compressor of a message.

        Raises:
            ValueError: the tensor is not [rows, positions, C] like the tokens of the batch.
        """
        meta, tokens = visit.meta, visit.tokens
        if tokens is None or len(meta.shape) != 3 or meta.shape[:2] != tuple(tokens.shape):
            raise ValueError(
                f"{self._method}: a tensor of shape {list(meta.shape)} for tokens of shape "
                f"{None if tokens is None else list(tokens.shape)}; expected [b, s, C] and "
                f"input_ids [b, s]. Use {self._method.inner}"
            )
        end = self._end(side, meta.shape[-1])
        flat, counts = tokens.reshape(-1).numpy(), visit.counts

        def means() -> Tensor:
            found = torch.from_numpy(end.of(flat)).view(meta.shape)
            # Nothing is left of a padded position, which is zero.
            return found if counts is None else found.masked_fill_(~counts[:, :, None], 0)

        inner: Any = self._method.inner if self._inner is None else self._inner.coder(side, visit)
        return LessMean(self._method, inner, means, end.occurrences)

    def sent(self, coder: Compressor, x: Tensor, arrived: Sent, visit: Visit) -> None:
        """As `Learned.sent`."""
        assert isinstance(coder, LessMean)
        if self._inner is not None:
            self._inner.sent(coder.inner, coder.left(x), arrived, visit)
        self._note(Side.SENDER, arrived(), visit)

    def heard(self, coder: Compressor, payload: Payload, x: Tensor, visit: Visit) -> None:
        """As `Learned.heard`."""
        assert isinstance(coder, LessMean)
        if self._inner is not None:
            self._inner.heard(coder.inner, payload, x, visit)
        self._note(Side.RECEIVER, x, visit)

    def kept(self, side: Side, meta: TensorMeta, vocabulary: int) -> Iterator[tuple[int, int, str]]:
        """As `Learned.kept`: at most a row for each token of the vocabulary."""
        yield vocabulary, 4 * meta.shape[-1] + 8 + 8, "cpu"
        if self._inner is not None:
            yield from self._inner.kept(side, meta, vocabulary)

    def commit(self) -> None:
        """As `Learned.commit`."""
        for end in self._ends.values():
            end.commit()
        if self._inner is not None:
            self._inner.commit()

    def discard(self) -> None:
        """As `Learned.discard`."""
        for end in self._ends.values():
            end.discard()
        if self._inner is not None:
            self._inner.discard()

    def state_dict(self) -> dict[str, Any]:
        """As `Learned.state_dict`."""
        state: dict[str, Any] = {
            f"{side.value}.{width}.{_PART}.{name}": value
            for (side, width), end in self._ends.items()
            for name, value in end.state_dict().items()
        }
        inner = {} if self._inner is None else self._inner.state_dict()
        return {**state, **inner, "sample": {}} if state or inner else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Learned.load_state_dict`."""
        self._ends = {}
        own: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for key, value in state.items():
            (own if f".{_PART}." in key else others)[key] = value
        for (side, width), entries in by_end(own).items():
            self._end(side, width).load_state_dict(entries)
        if self._inner is not None:
            self._inner.load_state_dict(others)

    def _end(self, side: Side, width: int) -> _Means:
        return self._ends.setdefault((side, width), _Means(width))

    def _note(self, side: Side, x: Tensor, visit: Visit) -> None:
        assert visit.tokens is not None
        width = visit.meta.shape[-1]
        tokens, vectors = visit.tokens, x.detach().to("cpu", torch.float32)
        if visit.counts is not None:
            tokens, vectors = tokens[visit.counts], vectors[visit.counts]
        flat = vectors.reshape(-1, width).numpy()
        self._end(side, width).note(visit.microbatch, tokens.reshape(-1).numpy(), flat)
