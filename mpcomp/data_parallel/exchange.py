"""One rank's part in averaging gradients over replicas, step by step.

    exchange.begin(...)
    exchange.add({name: gradient, ...})     # any number of times: what backward has finished
    exchange.finish()                       # all gradients are means now, the same on all replicas
    exchange.finish_step(finite)                 # what memories noted is kept, or forgotten

State belongs to parameters by name, never to the groups in which gradients come: DDP rebuilds its
buckets after the first step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpcomp.core.step import HISTORY_STEPS
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.traffic import ReplicaTraffic
from mpcomp.data_parallel.averaging import Averaging, Run
from mpcomp.data_parallel.base import (
    Controller,
    ReplicaMethod,
    Setting,
    check_run,
    matrices,
    matrix_of,
)
from mpcomp.data_parallel.network import Connections, ReplicaNetwork
from mpcomp.data_parallel.plan import Item
from mpcomp.data_parallel.replica_state import ReplicaState

__all__ = ["Exchange"]


class Exchange:
    """Averages the gradients of named parameters over replicas, compressed.

    Args:
        parameters: those of this rank that require gradients; the same on all replicas.
        method: between replicas.
        group: the ranks that have these parameters.
        network: how they are connected.
        seed: of all random choices.
        everywhere: sums numbers over all ranks that must decide alike (those of all stages of a
            pipeline); by default over ``group``.
        own_norm: the norm of this replica's whole gradient, from the square of that of this
            rank's part; by default there is no other part.
        unused: whether a parameter may get no gradient in a step on all replicas, and is then left
            alone by DDP.
        history: how many steps `history` goes back; a log of all belongs into a file.
        whole: the whole model's parameters, where this rank has a part of them.
        sizes: elements of the whole parameter, where ``parameters`` are pieces of some.
        copy_of: of each parameter here that another rank has a copy of (a tied weight) the name
            that both draw random numbers by, and under which it counts.
        waiting: a context for whatever needs other replicas, and fails if one is gone.
        timeout: of a wait in groups that are made here; None for torch's own.

    Raises:
        ValueError: the method does not suit these parameters, or the network these replicas.
        TypeError: parameters of fp64.
    """

    #: How many times a ring of uncompressed gradients puts them on each link, but for own ones.
    rounds = 2.0
    #: Steps between counts of the zeros in a result; None counts none.
    density_every: int | None = 50
    #: Whether the replicas of a machine have the same to average.
    alike_inside = False

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        method: ReplicaMethod,
        group: dist.ProcessGroup,
        *,
        network: ReplicaNetwork | None = None,
        seed: int = 0,
        everywhere: Callable[[Sequence[float]], list[float]] | None = None,
        own_norm: Callable[[float], float] = math.sqrt,
        unused: bool = False,
        history: int = HISTORY_STEPS,
        whole: Mapping[str, Tensor] | None = None,
        sizes: Mapping[str, int] | None = None,
        copy_of: Mapping[str, str] | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        timeout: timedelta | None = None,
    ) -> None:
        self.method = method
        self.network = network or ReplicaNetwork()
        self.num_replicas = dist.get_world_size(group)
        check_run(whole or parameters, method, self.network, self.num_replicas, sizes)
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._connections = Connections(
            group, self.network, self._device, waiting=waiting, timeout=timeout
        )
        self._copy_of = copy_of or {}
        self._everywhere = everywhere or self._connections.sum
        self._own_norm = own_norm
        self._seed = seed
        self._compressible = matrices(parameters, self.network, sizes)
        self._metas = {name: matrix_of(TensorMeta.of(p)) for name, p in parameters.items()}
        self._watched = list(parameters) if unused else []
        self._open: Averaging | None = None
        #: Number of parameters on each path, in the step under way or the last one.
        self._routed: dict[str, int] = {}
        self.nonfinite = False
        self.reset()
        self.density = math.nan  # of the last result that was looked at
        #: One entry for each of the last steps.
        self.history: deque[dict[str, Any]] = deque(maxlen=history)

    def reset(self) -> None:
        """Forgets everything, as before the first step."""
        method = self.method
        setting = Setting(self.num_replicas, self._compressible)
        self.controller: Controller = method.controller(setting)
        self._state = ReplicaState(method, self._metas, self._compressible, self._device)
        self.step = 0
        self.totals = ReplicaTraffic()

    def close(self) -> None:
        """Closes connections, and lets go of those of others; only figures are left."""
        self._connections.close()

    # -- a step ---------------------------------------------------------------------------------

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at the optimizer that steps by the results.

        Raises:
            ValueError: it does what the method itself does.
        """
        self.method.check_optimizer(optimizer)

    def check_begin(self, lr: float | None) -> None:
        """Whether a step can begin, with a learning rate.

        Raises:
            ValueError: the method follows it, and it is not known.
        """
        if self.method.lr_scaled and not lr:
            raise ValueError(
                f"{self.method} keeps its state in units of the learning rate: tell it the "
                "optimizer with follow(optimizer), whose rate must be above 0"
            )

    def check_finite(self, step: int, *, scaled: bool) -> None:
        """Looks at what `finish` has found; to be called when no rank waits for this one.

        Raises:
            FloatingPointError: NaN or Inf in a gradient of some rank, without a loss scaler; on all
                ranks.
        """
        if self.nonfinite and not scaled:
            raise FloatingPointError(
                f"NaN or Inf in a gradient of a replica, step {step}: the model has diverged "
                "or overflowed. All gradients are NaN now, and what replicas remember is as before "
                "the step; zero_grad before going on"
            )

    def begin(
        self, *, loss_scale: float = 1.0, lr: float | None = None, compress: bool = True
    ) -> None:
        """Begins a step.

        Args:
            loss_scale: factor on all gradients.
            lr: learning rate, where it is known.
            compress: if not, everything goes as it is, and nothing is left over.

        Raises:
            ValueError: the method follows the learning rate, and it is not known.
        """
        self.check_begin(lr)
        unit = loss_scale / lr if self.method.lr_scaled and lr else loss_scale
        self.controller.begin(self.step, lr)
        self._open = Averaging(self._run(), self.step, unit, compress=compress)
        self._routed = self._open.routed

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes gradients that are complete on this rank; they are overwritten by `finish`.

        Every replica adds the same parameters in the same order.
        """
        with self.totals.timed("encode_s"):
            self._under_way.add(gradients)

    def finish(self) -> None:
        """Waits for all replicas; the gradients that were added are their results then.

        If a gradient was not finite on some rank, all results are NaN, as they would be
        uncompressed, and `nonfinite` is set.
        """
        averaging = self._under_way
        averaging.finish()
        self.nonfinite = not averaging.finite
        if self.density_every is not None and self.step % self.density_every == 0:
            self.density = math.nan if self.nonfinite else _density(averaging.items)
        self._count(averaging.context.traffic)

    def leave_alone(self, names: Collection[str]) -> None:
        """Takes back, once finished, what was sent for parameters that no replica uses."""
        self._under_way.leave_alone(names)

    @property
    def averaged_over(self) -> dist.ProcessGroup | None:
        """The ranks whose gradients are averaged; None if each keeps its own."""
        return self._connections.everyone.group

    def finish_step(self, finite: bool) -> None:
        """Ends the step: what memories noted is kept if it was finite everywhere, else forgotten.

        Of no effect if no step is under way.
        """
        averaging, self._open = self._open, None
        if averaging is None:
            return
        if finite:
            self._state.commit(averaging.context.new_factors)
        else:
            self._state.discard()
        if averaging.sums is not None:  # else the step ended with an error
            traffic_bytes = averaging.mean_traffic_bytes
            self.controller.end(averaging.sums, finite=finite, traffic_bytes=traffic_bytes)
            self.history.append(averaging.entry(finite))
        self.step += 1

    def _count(self, traffic: ReplicaTraffic) -> None:
        """Adds a step's traffic to the totals."""
        others = (self.num_replicas - 1) / self.num_replicas
        traffic.dense_traffic_bytes = self.rounds * others * traffic.dense_bytes
        self.totals.add(traffic)

    @property
    def _under_way(self) -> Averaging:
        assert self._open is not None, "a step has begun"
        return self._open

    def _run(self) -> Run:
        return Run(
            method=self.method,
            network=self.network,
            connections=self._connections,
            controller=self.controller,
            state=self._state,
            totals=self.totals,
            compressible=self._compressible,
            everywhere=self._everywhere,
            own_norm=self._own_norm,
            copy_of=self._copy_of,
            watched=self._watched,
            alike_inside=self.alike_inside,
            seed=self._seed,
            device=self._device,
        )

    # -- what happened, and going on from it ------------------------------------------------------

    @property
    def num_compressible(self) -> int:
        """Elements of this rank's parameters that may go compressed."""
        return sum(meta.numel for meta in self._compressible.values())

    def report(self) -> dict[str, Any]:
        """Totals of this rank, the ratio, and what the method is at."""
        return {
            "method": str(self.method),
            "replicas": self.num_replicas,
            **self.totals.of_gradients(),
            "num_elements": self.totals.num_elements,  # also where it is not known
            "ratio": self.totals.ratio,
            "below_bf16": self.totals.below_bf16,
            "density": self.density,
            # Who only gives its gradients to the first of its machine remembers nothing.
            "memory_bytes": self._state.num_bytes if self._connections.between is not None else 0,
            "paths": dict(sorted(self._routed.items())),
            **self.controller.report(),
        }

    def state_dict(self) -> dict[str, Any]:
        """The state that is needed to go on exactly; each replica has its own.

        Returns:
            ``tensors`` by name, and ``rest``, which JSON can hold.
        """
        tensors = self._state.tensors()
        held = self.controller.tensors()
        tensors.update({f"controller/{name}": value for name, value in held.items()})
        rest = {
            "method": str(self.method),
            "step": self.step,
            "controller": self.controller.state_dict(),
            "totals": self.totals.of_gradients(),
        }
        return {"tensors": tensors, "rest": rest}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Whether there is a place for all of a `state_dict`.

        Raises:
            ValueError: it was given by another method, or other parameters went compressed.
        """
        method = state["rest"]["method"]
        if method != str(self.method):
            raise ValueError(
                f"the state is that of {method}, these replicas use {self.method}: "
                "use the same method"
            )
        self._state.check(state["tensors"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave, on the same replica of as many.

        Raises:
            ValueError: it was given by another method, or has no place here.
        """
        self.check_state(state)
        self.reset()
        rest = state["rest"]
        self._state.load(state["tensors"])
        own = {k: v for k, v in state["tensors"].items() if k.startswith("controller/")}
        self.controller.load_tensors(
            {k.removeprefix("controller/"): v.to(self._device) for k, v in own.items()}
        )
        self.step = rest["step"]
        self.totals = ReplicaTraffic.from_gradients(rest["totals"])
        self.controller.load_state_dict(rest["controller"])


def _density(items: Sequence[Item]) -> float:
    """Elements that are not zero in the results of parameters that may go compressed."""
    looked = [item for item in items if item.compressible]
    total = sum(item.numel for item in looked)
    if not total:
        return math.nan
    return sum(int(item.gradient.count_nonzero()) for item in looked) / total
