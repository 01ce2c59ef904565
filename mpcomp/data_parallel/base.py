"""The contract of a method between replicas: who chooses, what is remembered, what is sent.

A step of an `Exchange`, for each parameter of this rank::

    gradient ──memory.compensate──> target ──controller.encode──> payload ──path──> mean of all
                     ^                │                              │                   │
                     └─ memory.sent <─┴── less what the payload says ┘                   │
    result <──────────────────────────────────────────── memory.received ────────────────┘

A `ReplicaMethod` is a frozen value that makes both for a run: one `Controller` on each rank, which
chooses what parameters are sent with, and a `Memory` for each parameter. Whatever a controller
decides follows from numbers that all ranks share, as it also decides which collectives run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mpcomp.compressors import Compressor
from mpcomp.compressors.base import Coding, Encoded
from mpcomp.core.context import TensorMeta
from mpcomp.core.spec import SpecValue
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.feedback.memory import Draw, Memory

__all__ = [
    "Codec",
    "Controller",
    "Draw",
    "Factored",
    "ReplicaMethod",
    "RunInfo",
    "Static",
    "SyncSchedule",
    "check_run",
    "matrices",
    "matrix_of",
]


class Factored(ABC):
    """Marks a method that sends a matrix as two factors, in two sums (PowerSGD)."""

    rank: int
    #: As of a compressor; it is given matrices whatever this says.
    by_matrix: bool = False

    @abstractmethod
    def worthwhile(self, meta: TensorMeta) -> bool:
        """Whether a matrix like ``meta`` is sent as factors."""


#: What a parameter can be sent with; None sends it as it is.
Codec: TypeAlias = Compressor | Factored | None


@dataclass(frozen=True)
class RunInfo:
    """A run, as a method is told of it once.

    Attributes:
        num_replicas: replicas that average their gradients.
        metas: of the parameters on this rank that may be compressed, by name, as matrices
            [first dim, all others] in memory order.
    """

    num_replicas: int
    metas: Mapping[str, TensorMeta]


class Controller(ABC):
    """Chooses what each parameter is sent with in a step; the same on all replicas.

    Methods are called in the order in which they stand here.

    Attributes:
        waits: whether a step's choice needs all of its gradients first (`look`), so that nothing is
            sent before the last is there.
    """

    waits: bool = False
    #: Whether `figures` are summed over the replicas of this rank's parameters alone, and not over
    #: all ranks: for what is decided for each parameter by itself.
    sum_over_replicas_only: bool = False

    def begin(self, step: int, lr: float | None) -> None:  # noqa: B027
        """A step begins.

        Args:
            step: number of steps before it, skipped ones counted.
            lr: learning rate, where it is known.
        """

    def look(self, name: str, target: Tensor, draw: Draw) -> None:  # noqa: B027
        """Looks at what is to be sent, fp32 [n], where it ``waits``."""

    def looked(self) -> list[float]:
        """Statistics of what it was shown, to be summed over all ranks."""
        return []

    def decide(self, sums: Sequence[float]) -> None:  # noqa: B027
        """Decides by those sums."""

    @abstractmethod
    def codec(self, name: str) -> Codec:
        """The codec of a parameter in this step; None sends it as it is."""

    def encode(self, name: str, x: Tensor, coding: Coding) -> Encoded:
        """The message of what is to be sent; called where `codec` is a compressor.

        Args:
            name: of the parameter, or of that which it is a piece of.
            x: [1, n], or [rows, columns] for a compressor that works by matrix.
            coding: by that compressor.
        """
        return coding.encode(x)

    def observe(self, name: str, target: Tensor, gradient: Tensor, draw: Draw) -> None:  # noqa: B027
        """Looks at what is to be sent and this step's gradient in it, both fp32 [n], on all paths.

        It comes before `encode`, if that is called at all.
        """

    def figures(self) -> list[float]:
        """Statistics of this step, to be summed over all ranks; of equal length on all."""
        return []

    def end(self, sums: Sequence[float], *, finite: bool, traffic_bytes: float) -> None:  # noqa: B027
        """The step ends.

        Args:
            sums: of `figures`.
            finite: whether the gradients of all ranks were; a step that is not still counts.
            traffic_bytes: that each rank has sent in this step, on average.
        """

    def report(self) -> dict[str, Any]:
        """Its state in plain numbers and words, for a log of every step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON can hold it: enough to go on exactly."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Goes on from what `state_dict` gave."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that it remembers of parameters, by name."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Goes on from what `tensors` gave."""


class Static(Controller):
    """The same codec for all parameters in every step."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def codec(self, name: str) -> Codec:
        return self._codec


@dataclass(frozen=True)
class SyncSchedule:
    """A period, in which each part of a model has its turn once, at equal distances.

    With several parts a message is that much smaller and as many times more frequent: Streaming
    DiLoCo, Douillard et al. 2025.

    Args:
        period: steps between two turns of the same part.
        parts: how many.

    Raises:
        ValueError: a period below one step, or more parts than it has steps.
    """

    period: int
    parts: int = 1

    def __post_init__(self) -> None:
        if type(self.period) is not int or self.period < 1:
            raise ValueError(f"period={self.period!r}: expected a number of steps, 1 or more")
        if type(self.parts) is not int or not 1 <= self.parts <= self.period:
            raise ValueError(
                f"parts={self.parts!r}: each has a step of its own in a period of {self.period}; "
                f"expected 1 to {self.period}"
            )

    def part_due(self, step: int) -> int | None:
        """The part whose turn comes after a step, or None.

        Args:
            step: number of steps before it.
        """
        for part in range(self.parts):
            turn = (part + 1) * self.period // self.parts
            if (step + 1 - turn) % self.period == 0:
                return part
        return None

    def assign_parts(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The part that each parameter belongs to: neighbours together, of about equal sizes.

        A parameter that is larger than a share leaves fewer, or none, to a part beside it.

        Args:
            sizes: elements of each parameter, in the model's order.
        """
        total, before, found = max(1, sum(sizes.values())), 0, {}
        for name, size in sizes.items():
            middle = before + size / 2
            found[name] = min(self.parts - 1, int(middle * self.parts / total))
            before += size
        return found


class ReplicaMethod(SpecValue, ABC):
    """A method between replicas: a frozen value.

    Attributes:
        clip: norm that the mean gradient of the whole model is held to, roughly, by scaling each
            replica's own down to clip * sqrt(replicas) before anything else (see `DGC`); None for
            no clipping.
    """

    between_replicas = True
    clip: float | None = None
    #: Whether state is kept in units of learning rate times gradient.
    lr_scaled: bool = False
    #: Momentum that it has on each replica, in place of the optimizer's.
    own_momentum: float = 0.0
    #: When it averages which parameters, and gradients stay each replica's own; None for gradients,
    #: in every step.
    sync_schedule: SyncSchedule | None = None
    #: Share of what an exchange moves a replica by that goes into its optimizer's first moments.
    correction: float = 0.0

    @property
    def deltas(self) -> ReplicaMethod:
        """The method of what goes at the turns of a `sync_schedule`; of gradients, this one."""
        return self

    def check(self, run: RunInfo) -> None:
        """Raises ValueError where the method does not suit a run."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError for an optimizer that does what the method itself does."""

    @abstractmethod
    def controller(self, run: RunInfo) -> Controller:
        """This rank's controller for a run."""

    @abstractmethod
    def memory(self, *, compressed: bool) -> Memory:
        """The memory of a parameter; ``compressed``: whether it may go compressed at all."""

    def second_stage_memory(self) -> Memory:
        """The memory of a mean that one replica forms for all, and compresses again."""
        return self.memory(compressed=True).second_stage_memory()


def matrix_of(meta: TensorMeta) -> TensorMeta:
    """A tensor as a matrix [first dim, all others]."""
    return TensorMeta((meta.num_rows, meta.row_numel), meta.dtype)


def matrices(
    parameters: Mapping[str, Tensor],
    network: ReplicaNetwork,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, TensorMeta]:
    """The parameters that may go compressed, as matrices.

    Args:
        parameters: by name.
        network: says from how many elements on.
        sizes: elements of the whole parameter, where ``parameters`` are pieces; by default theirs.
    """
    metas = {name: TensorMeta.of(p) for name, p in parameters.items()}
    sizes = sizes or {name: meta.numel for name, meta in metas.items()}
    return {
        name: matrix_of(meta)
        for name, meta in metas.items()
        if len(meta.shape) > 1 and sizes[name] >= network.smallest
    }


def check_run(
    parameters: Mapping[str, Tensor],
    method: ReplicaMethod,
    network: ReplicaNetwork,
    num_replicas: int,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Checks what ranks can tell alike before anything is connected.

    Args:
        parameters: those of the whole model that require gradients, by name.
        method: between replicas.
        network: how they are connected.
        num_replicas: how many.
        sizes: as for `matrices`.

    Raises:
        ValueError: the method does not suit the model or the path, or the network these replicas.
        TypeError: parameters of fp64.
    """
    wide = [name for name, p in parameters.items() if p.dtype == torch.float64]
    if wide:
        raise TypeError(f"{wide[0]} is fp64: gradients between replicas are at most fp32")
    network.check_replicas(num_replicas)
    run = RunInfo(num_replicas, matrices(parameters, network, sizes))
    method.check(run)
    controller = method.controller(run)
    if controller.waits and network.per_machine > 1:
        raise ValueError(
            f"{method} with per_machine={network.per_machine}: exact=True looks at gradients "
            "before machines have averaged theirs; leave exact out"
        )
    controller.begin(0, None)
    for name in run.metas:
        codec = controller.codec(name)
        if not isinstance(codec, Compressor):
            continue
        if codec.variable_length:
            raise ValueError(
                f"dp_comp={method}: a message of {codec} is as long as its tensor makes it, and "
                "replicas exchange messages of equal lengths; use it at a cut"
            )
        if network.path == "sum":
            network.check_path(codec.summable)
