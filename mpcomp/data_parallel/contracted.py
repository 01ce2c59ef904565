"""What ConEF remembers of a parameter: its error, compressed, in one memory or in two.

A step, with the error e as far as the memories know it, and d = g - Delta what was not sent now::

    p = g + (1 - beta) e          Delta = Q(p)          e <- C(e + d)

The second memory of iConEF holds C of what the first one lost: its error is e + d - first, and
changes by d - (first, new) + (first, old). A sketch is told of changes, and never of what it itself
has been decoded to (`mpcomp.feedback.conef`); any other compressor is given the error itself. What
the first memory takes over from a sketch is as noisy as what is sent, so it takes the same part of
it, 1 - beta: all of it would multiply a cell by 1 - load, and diverge.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from mpcomp.compressors import Compressor
from mpcomp.core.packing import Payload
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.data_parallel.memory import Draw, Memory, State, StateTensor
from mpcomp.feedback.conef import ConEF
from mpcomp.feedback.sketch import VectorSketch

__all__ = ["Contracted"]


class _Error(State):
    """An error held in compressed form."""

    @abstractmethod
    def read(self, unit: float) -> Tensor:
        """What is known of the error that was committed, fp32 [n], times ``unit``."""

    @abstractmethod
    def note(self, error: Tensor, change: Tensor, unit: float, draw: Draw) -> Tensor:
        """What `commit` will keep; returns what will be known of it, in this step's units.

        Args:
            error: [n].
            change: [n], of the error since what was committed.
            unit: of this step.
            draw: makes generators.
        """


class _Sketched(_Error):
    """By a count sketch."""

    def __init__(self, sketch: VectorSketch, method: ConEF, device: torch.device) -> None:
        self.numel = sketch.cells
        self._sketch = sketch
        self._cells = StateTensor(sketch.cells, method.plan, device)

    def read(self, unit: float) -> Tensor:
        return self._sketch.estimate(self._cells.read(unit)[None])[0]

    def note(self, error: Tensor, change: Tensor, unit: float, draw: Draw) -> Tensor:
        cells = self._cells.read(unit) + self._sketch.sketch(change[None])[0]
        self._cells.note(cells, unit)
        return self._sketch.estimate(cells[None])[0]

    @property
    def known(self) -> bool:
        return self._cells.known

    @property
    def num_bytes(self) -> int:
        return self._cells.num_bytes

    def commit(self) -> None:
        self._cells.commit()

    def discard(self) -> None:
        self._cells.discard()

    def state_dict(self, name: str) -> dict[str, Tensor]:
        return self._cells.state_dict(name)

    def load_state_dict(self, name: str, state: Mapping[str, Tensor]) -> None:
        self._cells.load_state_dict(name, state)


class _Coded(_Error):
    """By the payload of a compressor."""

    def __init__(self, compressor: Compressor, meta: TensorMeta, device: torch.device) -> None:
        self._compressor = compressor
        self._meta = meta
        self._device = device
        self._held: Payload | None = None
        self._seed = torch.zeros(1, dtype=torch.int64)  # of a choice that decoding must draw again
        self._noted: tuple[Payload, Tensor] | None = None

    def read(self, unit: float) -> Tensor:
        if self._held is None:
            return torch.zeros(self._meta.numel, device=self._device)
        return self._decoded(self._held, self._seed) * unit

    def note(self, error: Tensor, change: Tensor, unit: float, draw: Draw) -> Tensor:
        seed = torch.tensor([draw(False).initial_seed()])
        x = (error / unit).reshape(self._meta.shape)
        payload = self._compressor.compress(x, _generator(seed))
        self._noted = payload, seed
        return self._decoded(payload, seed) * unit

    def _decoded(self, payload: Payload, seed: Tensor) -> Tensor:
        return self._compressor.decompress(payload, self._meta, _generator(seed)).reshape(-1)

    @property
    def known(self) -> bool:
        return self._held is not None

    @property
    def num_bytes(self) -> int:
        return self._compressor.wire_bytes(self._meta)

    def commit(self) -> None:
        if self._noted is not None:
            self._held, self._seed = self._noted
        self._noted = None

    def discard(self) -> None:
        self._noted = None

    def state_dict(self, name: str) -> dict[str, Tensor]:
        if self._held is None:
            return {}
        parts = {f"{name}:{i}": part for i, part in enumerate(self._held)}
        return {f"{name}:seed": self._seed, **parts}

    def load_state_dict(self, name: str, state: Mapping[str, Tensor]) -> None:
        layout = self._compressor.layout(self._meta)
        parts = tuple(state[f"{name}:{i}"] for i in range(len(layout)))
        for part, meta in zip(parts, layout, strict=True):
            if tuple(part.shape) != meta.shape:
                raise ValueError(
                    f"{name} is of shape {list(part.shape)}, here it has {list(meta.shape)}: use "
                    "the same model"
                )
        self._held, self._seed = parts, state[f"{name}:seed"].cpu()


def _generator(seed: Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed))


class Contracted(Memory):
    """The memory of `ConEF`; see the module's first lines.

    Args:
        method: its settings.
        meta: of the parameter, as a matrix.
        device: of its gradients.
    """

    keeps = True

    def __init__(self, method: ConEF, meta: TensorMeta, device: torch.device) -> None:
        super().__init__()
        self._rest = 1 - method.beta
        row = TensorMeta((1, meta.numel))

        def memory(compressor: Compressor | None) -> _Error:
            if compressor is None:
                sketch = method.sketch(meta.numel, meta.row_numel if meta.num_rows > 1 else None)
                return _Sketched(sketch, method, device)
            return _Coded(compressor, meta if compressor.by_matrix else row, device)

        first = method.inner if method.improved == "v2" else method.error
        self._errors = [memory(first)]
        if method.improved is not None:
            self._errors.append(memory(method.error))
        names = ("error", "second_error")
        self._state.update(zip(names, self._errors, strict=False))
        #: What each memory knew before this step, in its units.
        self._before: list[Tensor] = []

    def wanted(self, gradient: Tensor, unit: float) -> Tensor:
        if not self.known:
            return gradient
        self._before = [error.read(unit) for error in self._errors]
        return torch.add(gradient, sum(self._before[1:], self._before[0]), alpha=self._rest)

    def keep(self, rest: Tensor, positions: Tensor | None, unit: float, draw: Draw) -> None:
        before = self._before or [torch.zeros_like(rest) for _ in self._errors]
        self._before = []
        known = sum(before[1:], before[0])
        change = rest - self._rest * known  # g - Delta
        error = known + change
        if isinstance(self._errors[-1], _Sketched):  # which goes by the change alone
            error = sum((self._rest * later for later in before[1:]), before[0]) + change
        for memory, was in zip(self._errors, before, strict=True):
            now = memory.note(error, change, unit, draw)
            error, change = error - now, change - (now - was)
