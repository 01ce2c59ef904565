"""One rank's part in averaging gradients over replicas, step by step.

    exchange.begin(...)
    exchange.add({name: gradient, ...})     # any number of times: what backward has finished
    exchange.finish()                       # all gradients are means now, the same on all replicas
    exchange.finish_step(finite)            # what memories noted is kept, or forgotten

State belongs to parameters by name, never to the groups in which gradients come: DDP rebuilds its
buckets after the first step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpcomp.core.context import HISTORY_STEPS, TensorMeta
from mpcomp.core.randomness import generator_for
from mpcomp.core.traffic import ReplicaTraffic
from mpcomp.data_parallel.base import (
    Controller,
    Draw,
    ReplicaMethod,
    RunInfo,
    check_run,
    matrices,
    matrix_of,
)
from mpcomp.data_parallel.network import Connections, ReplicaNetwork, Works
from mpcomp.data_parallel.paths import PATH_OF, Path, broadcast, mean_inside, routes
from mpcomp.data_parallel.plan import Context, GradientPlan, ReplicaState

__all__ = ["GROUP_BYTES", "Averaging", "Exchange", "in_groups"]

#: Bytes of a group, about.
GROUP_BYTES = 25_000_000


class Exchange:
    """Averages the gradients of named parameters over replicas, compressed.

    Args:
        parameters: those of this rank that require gradients; the same on all replicas.
        method: between replicas.
        group: the ranks that have these parameters.
        network: how they are connected.
        seed: of all random choices.
        all_reduce_sum: sums numbers over all ranks that must decide alike (those of all stages of
            a pipeline); by default over ``group``.
        global_norm: the norm of this replica's whole gradient, from the square of that of this
            rank's part; by default there is no other part.
        unused: whether a parameter may get no gradient in a step on all replicas, and is then left
            alone by DDP.
        history: how many steps `history` goes back; a log of all belongs into a file.
        whole: the whole model's parameters, where this rank has a part of them.
        sizes: elements of the whole parameter, where ``parameters`` are pieces of some.
        tied_alias: of each parameter here that another rank has a copy of (a tied weight) the
            name that both draw random numbers by, and under which it counts.
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
    replicated_in_node = False

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        method: ReplicaMethod,
        group: dist.ProcessGroup,
        *,
        network: ReplicaNetwork | None = None,
        seed: int = 0,
        all_reduce_sum: Callable[[Sequence[float]], list[float]] | None = None,
        global_norm: Callable[[float], float] = math.sqrt,
        unused: bool = False,
        history: int = HISTORY_STEPS,
        whole: Mapping[str, Tensor] | None = None,
        sizes: Mapping[str, int] | None = None,
        tied_alias: Mapping[str, str] | None = None,
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
        self._tied_alias = tied_alias or {}
        self._all_reduce_sum = all_reduce_sum or self._connections.sum
        self._global_norm = global_norm
        self._seed = seed
        self._compressible = matrices(parameters, self.network, sizes)
        self._metas = {name: matrix_of(TensorMeta.of(p)) for name, p in parameters.items()}
        self._maybe_unused = list(parameters) if unused else []
        self._lr_scaled = method.lr_scaled
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
        run = RunInfo(self.num_replicas, self._compressible)
        self.controller: Controller = method.controller(run)
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
        if self._lr_scaled and not lr:
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
        unit = loss_scale / lr if self._lr_scaled and lr else loss_scale
        self.controller.begin(self.step, lr)
        if self._open is not None:  # an error has left it
            self._open.abandon()
        self._open = Averaging(self, unit, compress=compress)
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
            self.density = math.nan if self.nonfinite else _density(averaging.plans)
        self._count(averaging.traffic)

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
        averaging.abandon()
        if finite:
            self._state.commit(averaging.new_factors)
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

    def merged(self, replicas: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of a `state_dict` for every replica, from those of more or fewer replicas.

        Raises:
            ValueError: something belongs to as many replicas as there were.
        """
        return self._state.merged(replicas)

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


class Averaging(Context):
    """A step under way, which its paths share. The calls, in this order::

        averaging.add({name: gradient, ...})    # any number of times
        averaging.finish()

    Args:
        exchange: whose step it is; it lives longer than its steps.
        unit: factor from what memories keep to this step's gradients.
        compress: if not, everything goes as it is, and nothing is left over.

    Attributes:
        plans: of the gradients so far.
        routed: number of parameters on each path.
        finite: whether all gradients were finite on all ranks, once it is finished.
        sums: of the controller's figures over those ranks; None before it is finished.
        mean_traffic_bytes: that each rank has sent, on average.
    """

    def __init__(self, exchange: Exchange, unit: float, *, compress: bool) -> None:
        connections, controller = exchange._connections, exchange.controller
        super().__init__(
            connections.between or connections.everyone,
            controller,
            exchange._state,
            unit,
            _draws(exchange),
        )
        self._exchange = exchange
        self._step = exchange.step
        self._compress = compress
        self.plans: list[GradientPlan] = []
        self._paths: list[tuple[Path, Works | None]] = []
        self._waiting: list[list[GradientPlan]] = []
        self._bad = torch.zeros((), dtype=torch.float32, device=exchange._device)
        self._used = dict.fromkeys(exchange._maybe_unused, 0.0)
        self._started = time.perf_counter()
        self._waits = controller.waits or exchange.method.clip is not None
        self.routed: dict[str, int] = {}
        self.finite = True
        self.sums: list[float] | None = None
        self.mean_traffic_bytes = 0.0

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes gradients that are complete on this rank; they are overwritten by `finish`."""
        plans = [self.plan(name, gradient) for name, gradient in gradients.items()]
        self.plans += plans
        for plan in plans:
            # A sum is finite unless an element is not, or it overflows, which is as bad.
            self.found_nonfinite(~plan.gradient.sum(dtype=torch.float32).isfinite())
            if plan.name in self._used:
                self._used[plan.name] = float(bool(plan.gradient.any()))
        if self._waits:
            self._waiting.append(plans)
        else:
            self._start(plans, 1.0)

    def plan(self, name: str, gradient: Tensor) -> GradientPlan:
        """The plan of a gradient of this step; it is counted among what there is to send."""
        exchange = self._exchange
        may = self._compress and name in exchange._compressible
        small = exchange.network.small if self._compress and not may else None
        narrowed = None if small is None else small.wire_dtype
        self.traffic.dense_bytes += gradient.nbytes
        self.traffic.num_elements += gradient.numel()
        return GradientPlan(name, gradient, self.state.ends[name], may, narrowed)

    def load(self, plans: Iterable[GradientPlan], factor: float = 1.0) -> None:
        """Reads gradients, times ``factor``, and shows them to the controller."""
        for plan in plans:
            gradient = plan.load(self, factor)
            if plan.compressible:
                draw = self.draw(plan.name, 0)
                self.controller.observe(plan.name, plan.target, gradient, draw)

    def found_nonfinite(self, found: Tensor | bool) -> None:
        """Notes whether a gradient of this rank was not finite."""
        self._bad += float(found) if isinstance(found, bool) else found.float()

    def count_route(self, name: str, num_parameters: int = 1) -> None:
        """Notes that so many parameters took a path."""
        self.routed[name] = self.routed.get(name, 0) + num_parameters

    def finish(self) -> None:
        """Waits for all replicas; the gradients that were added are their results then.

        If a gradient was not finite on some rank, all results are NaN, as they would be
        uncompressed.
        """
        exchange, controller = self._exchange, self.controller
        connections = exchange._connections
        if self._waits:
            with exchange.totals.timed("encode_s"):
                self._start_waiting()
        self._drive()
        if connections.inside is not None:
            # Not before the last group's exchange has ended: groups may take turns of different
            # number, of which the ranks that only wait for the result know nothing.
            self._paths = [_begun(broadcast(self.plans, connections.inside))]
            self._drive()
        self.traffic.messages = 1
        self.traffic.traffic_bytes = connections.take_traffic()
        said = [1.0, float(self._bad), self.traffic.traffic_bytes, *self._used.values()]
        figures = controller.figures()
        if controller.sum_over_replicas_only:
            ranks, bad, total_traffic, *used = exchange._all_reduce_sum(said)
            self.sums = connections.sum(figures) if figures else []
        else:
            ranks, bad, total_traffic, *rest = exchange._all_reduce_sum([*said, *figures])
            used, self.sums = rest[: len(self._used)], rest[len(self._used) :]
        self.mean_traffic_bytes = total_traffic / ranks
        self.finite = not bad
        if self.finite:
            self.leave_alone({n for n, u in zip(self._used, used, strict=True) if not u})
        else:
            for plan in self.plans:
                plan.gradient.fill_(math.nan)

    def leave_alone(self, unused: Collection[str]) -> None:
        """Takes back what was sent for parameters that no replica had a gradient for.

        Nobody looks at their results; what memories hold must wait for a step in which one does.
        """
        for plan in self.plans:
            if plan.name in unused:
                self.state.discard_one(plan.name)
                self.new_factors.pop(plan.name, None)
                plan.gradient.zero_()

    def abandon(self) -> None:
        """Lets go of paths that an error has left half way: each of them holds this step."""
        self._paths.clear()

    def entry(self, finite: bool) -> dict[str, Any]:
        """Entry for a log of every step; ``finite`` is whether the step was, at last."""
        traffic = self.traffic
        return {
            "step": self._step,
            "wire_bytes": traffic.wire_bytes,
            "dense_bytes": traffic.dense_bytes,
            "num_elements": traffic.num_elements,
            "floats": traffic.floats,
            "traffic_bytes": self.mean_traffic_bytes,
            "skipped": not finite,
            "seconds": time.perf_counter() - self._started,
            **self.controller.report(),
        }

    # -- inside ---------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Starts what had to wait for all gradients of the step."""
        controller = self.controller
        plans = [plan for group in self._waiting for plan in group]
        factor = self._clipping(plans)
        if controller.waits:
            for plan in plans:
                if plan.compressible:
                    plan.load(self, factor)
                    controller.look(plan.name, plan.target, self.draw(plan.name, 0))
            told = [*controller.looked(), float(self._bad)]
            *sums, bad = self._exchange._all_reduce_sum(told)
            # A step that will be skipped must leave no trace in what the next ones are decided by.
            controller.decide([math.nan] * len(sums) if bad else sums)
        for group in self._waiting:
            self._start(group, factor)

    def _clipping(self, plans: Sequence[GradientPlan]) -> float:
        """By what this replica's gradient is scaled down, if the method clips it."""
        exchange = self._exchange
        clip = exchange.method.clip
        if clip is None:
            return 1.0
        norms = [
            torch.linalg.vector_norm(plan.gradient, dtype=torch.float32)
            for plan in plans
            if exchange._tied_alias.get(plan.name, plan.name) == plan.name
        ]
        square = float(torch.stack(norms).square().sum()) if norms else 0.0
        norm = exchange._global_norm(square) / self.unit
        # Of N gradients g the mean is the sum of g / N, and DGC clips g / N to clip / sqrt(N).
        largest = clip * math.sqrt(exchange.num_replicas)
        return min(1.0, largest / norm) if norm > 0 else 1.0

    def _start(self, plans: Sequence[GradientPlan], factor: float) -> None:
        """Starts the paths of a group of gradients."""
        if self._exchange._connections.inside is None:
            self.load(plans, factor)
            self._paths += [_begun(path) for path in self._routes(plans)]
        else:
            self._paths.append(_begun(self._over_two_levels(plans, factor)))

    def _over_two_levels(self, plans: Sequence[GradientPlan], factor: float) -> Path:
        """Means inside each machine, and an exchange between their first replicas."""
        connections, codec = self._exchange._connections, self._exchange.network.inside
        assert connections.inside is not None
        if not self._exchange.replicated_in_node:
            yield from mean_inside(plans, self, connections.inside, codec, factor)
            factor = 1.0
        if connections.between is not None:
            self.load(plans, factor)
            for path in self._routes(plans):
                yield from path

    def _routes(self, plans: Sequence[GradientPlan]) -> list[Path]:
        """The path of each gradient, those of a kind together."""
        by_path = routes(plans, self, self._exchange.network)
        for name, of_path in by_path.items():
            self.count_route(name, len(of_path))
            for plan in of_path if name != "two-phase" else ():
                self.state.flush_second_stage_residual(plan, self)
        return [PATH_OF[name](of_path, self) for name, of_path in by_path.items()]

    def _drive(self) -> None:
        """Waits for each path's collectives in turn, until all paths have ended."""
        totals, everyone = self._exchange.totals, self._exchange._connections.everyone
        while self._paths:
            going = []
            for path, works in self._paths:
                if works is None:
                    continue
                with totals.timed("wait_s"):
                    for work in works:
                        with everyone.waiting():
                            work.wait()
                with totals.timed("decode_s"):
                    going.append((path, next(path, None)))
            self._paths = going


def _begun(path: Path) -> tuple[Path, Works | None]:
    return path, next(path, None)


def _draws(exchange: Exchange) -> Callable[[str, int], Draw]:
    """The generators of a step, by the name of a parameter and the number of its piece.

    They do not hold the step, whose plans hold them: it would stay until somebody collects circles.
    """
    rank, step = exchange._connections.everyone.rank, exchange.step

    def draw_of(name: str, piece: int) -> Draw:
        def draw(alike: bool) -> torch.Generator:
            drawn = exchange._tied_alias.get(name, name)
            who = -1 if alike else rank
            return generator_for("replicas", exchange._seed, drawn, piece, step, who)

        return draw

    return draw_of


def in_groups(
    named: Iterable[tuple[str, Tensor]], alone: Collection[str]
) -> Iterator[dict[str, Tensor]]:
    """Tensors by name, in groups; the last one may be empty.

    Args:
        named: the tensors, in an order that is the same on all replicas.
        alone: names of parameters that another rank may have a copy of. Each goes by itself, so
            that no figure of it depends on what else a rank has.
    """
    group: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in named:
        if name in alone:
            yield {name: tensor}
            continue
        group[name] = tensor
        num_bytes += tensor.nbytes
        if num_bytes >= GROUP_BYTES:
            yield group
            group, num_bytes = {}, 0
    yield group


def _density(plans: Sequence[GradientPlan]) -> float:
    """Elements that are not zero in the results of parameters that may go compressed."""
    looked = [plan for plan in plans if plan.compressible]
    total = sum(plan.numel for plan in looked)
    if not total:
        return math.nan
    return sum(int(plan.gradient.count_nonzero()) for plan in looked) / total
