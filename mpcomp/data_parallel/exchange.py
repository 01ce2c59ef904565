"""One rank's part in averaging gradients over replicas, step by step.

    exchange.begin(...)
    exchange.add({name: gradient, ...})     # any number of times: what backward has finished
    exchange.finish()                       # all gradients are means now, the same on all replicas
    exchange.settle(finite)                 # what memories noted is kept, or forgotten

State belongs to parameters by name, never to the groups in which gradients come: DDP rebuilds its
buckets after the first step.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpcomp.data_parallel.base import Controller, Draw, ReplicaMethod, Setting
from mpcomp.data_parallel.item import Context, Item, matrix_of
from mpcomp.data_parallel.levels import broadcast, mean_inside, split_group
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.paths import Path
from mpcomp.data_parallel.peers import Peers, Works
from mpcomp.data_parallel.remembered import Remembered
from mpcomp.data_parallel.routes import PATH_OF, check_run, matrices, routes
from mpcomp.data_parallel.totals import Totals, density
from mpcomp.randomness import generator_for
from mpcomp.tensor_meta import TensorMeta

__all__ = ["Exchange"]

#: Steps between counts of the zeros in a result.
DENSITY_EVERY = 50


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
        history: how many steps `history` keeps.
        whole: the whole model's parameters, where this rank has a part of them.
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
        history: int = 100_000,
        whole: Mapping[str, Tensor] | None = None,
        copy_of: Mapping[str, str] | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        timeout: timedelta | None = None,
    ) -> None:
        self.method = method
        self.network = network or ReplicaNetwork()
        self.num_replicas = dist.get_world_size(group)
        check_run(whole or parameters, method, self.network, self.num_replicas)
        self._inside, between = split_group(group, self.network, timeout)
        self._everyone = Peers(group)
        self._peers = Peers(between) if between is not None else None
        for peers in (self._everyone, self._peers, self._inside):
            if peers is not None:
                peers.waiting = waiting
        self._copy_of = copy_of or {}
        self._everywhere = everywhere or self._sum
        self._own_norm = own_norm
        self._unused = unused
        self._seed = seed
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._compressible = matrices(parameters, self.network)
        self._metas = {name: matrix_of(TensorMeta.of(p)) for name, p in parameters.items()}
        self._names = list(parameters)
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
        self._state = Remembered(method, self._metas, self._compressible, self._device)
        self.step = 0
        self.totals = Totals()

    def close(self) -> None:
        """Closes connections, and lets go of those of others; only figures are left."""
        for peers in (self._peers, self._inside):
            if peers is None:
                continue
            if peers.group is not self._everyone.group:
                with suppress(ValueError, RuntimeError):  # destroyed with all others at the end
                    dist.destroy_process_group(peers.group)
            peers.close()
        self._everyone.close()

    # -- a step ---------------------------------------------------------------------------------

    def check_lr(self, lr: float | None) -> None:
        """Whether a step can begin with a learning rate.

        Raises:
            ValueError: the method follows it, and it is not known.
        """
        if self.method.lr_scaled and not lr:
            raise ValueError(
                f"{self.method} keeps its state in units of the learning rate: tell it the "
                "optimizer with follow_lr(optimizer), whose rate must be above 0"
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
        self.check_lr(lr)
        unit = loss_scale / lr if self.method.lr_scaled and lr else loss_scale
        self._compress = compress
        self._items: list[Item] = []
        self._paths: list[tuple[Path, Works | None]] = []
        self._waiting: list[list[Item]] = []
        self._bad = torch.zeros((), device=self._device)
        self._used = dict.fromkeys(self._names, 0.0) if self._unused else {}
        self._started = time.perf_counter()
        self._routed = {}
        self.controller.begin(self.step, lr)
        self._context = Context(
            self._peers or self._everyone,
            self.controller,
            unit,
            self._draw,
            self._state.phase_memory,
            self._state.factors,
        )

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes gradients that are complete on this rank; they are overwritten by `finish`.

        Every replica adds the same parameters in the same order.
        """
        with self.totals.timed("encode_s"):
            items = [
                Item(
                    name,
                    gradient,
                    self._state.memories[name],
                    self._compress and name in self._compressible,
                )
                for name, gradient in gradients.items()
            ]
            self._items += items
            for item in items:
                self._context.tally.dense_bytes += item.gradient.nbytes
                # A sum is finite unless an element is not, or it overflows, which is as bad.
                self._bad += (~item.gradient.sum(dtype=torch.float32).isfinite()).float()
                if self._unused:
                    self._used[item.name] = float(bool(item.gradient.any()))
            if self.controller.waits or self.method.clip is not None:
                self._waiting.append(items)
            else:
                self._start(items, 1.0)

    def finish(self) -> None:
        """Waits for all replicas; the gradients that were added are their results then.

        If a gradient was not finite on some rank, all results are NaN, as they would be
        uncompressed, and `nonfinite` is set.
        """
        with self.totals.timed("encode_s"):
            self._start_waiting()
        self._drive()
        if self._inside is not None:
            # Not before the last group's exchange has ended: groups may take turns of different
            # number, of which the ranks that only wait for the result know nothing.
            self._paths = [self._begun(broadcast(self._items, self._inside))]
            self._drive()
        traffic = self._everyone.take_traffic()
        if self._peers is not None and self._peers is not self._everyone:
            traffic += self._peers.take_traffic()
        said = [1.0, float(self._bad), traffic, *self._used.values()]
        figures = self.controller.figures()
        if self.controller.among_replicas:
            ranks, bad, total_traffic, *used = self._everywhere(said)
            self._sums = self._sum(figures) if figures else []
        else:
            ranks, bad, total_traffic, *rest = self._everywhere([*said, *figures])
            used, self._sums = rest[: len(self._used)], rest[len(self._used) :]
        self._mean_traffic = total_traffic / ranks
        self.nonfinite = bool(bad)
        if self.nonfinite:
            for item in self._items:
                item.gradient.fill_(math.nan)
        else:
            self._leave_alone({n for n, u in zip(self._used, used, strict=True) if not u})
        if self.step % DENSITY_EVERY == 0:
            self.density = math.nan if self.nonfinite else density(self._items)
        tally, others = self._context.tally, (self.num_replicas - 1) / self.num_replicas
        dense_traffic = self.rounds * others * tally.dense_bytes
        self.totals.count(tally, traffic_bytes=traffic, dense_traffic_bytes=dense_traffic)

    def settle(self, finite: bool) -> None:
        """Ends the step: what memories noted is kept if it was finite everywhere, else forgotten.

        Of no effect if no step is under way.
        """
        if not hasattr(self, "_context"):
            return
        if finite:
            self._state.commit(self._context.new_factors)
        else:
            self._state.discard()
        if hasattr(self, "_sums"):  # else the step ended with an error
            self.controller.end(self._sums, finite=finite, traffic_bytes=self._mean_traffic)
            self.history.append(self._entry(finite))
            del self._sums
        del self._context, self._paths, self._items, self._waiting
        self.step += 1

    # -- inside ---------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Starts what had to wait for all gradients of the step."""
        if not (self.controller.waits or self.method.clip is not None):
            return
        items = [item for group in self._waiting for item in group]
        factor = 1.0
        if self.method.clip is not None:
            norms = [
                torch.linalg.vector_norm(item.gradient, dtype=torch.float32)
                for item in items
                if self._copy_of.get(item.name, item.name) == item.name
            ]
            square = float(torch.stack(norms).square().sum()) if norms else 0.0
            norm = self._own_norm(square) / self._context.unit
            largest = self.method.clip / math.sqrt(self.num_replicas)
            factor = min(1.0, largest / norm) if norm > 0 else 1.0
        if self.controller.waits:
            for item in items:
                if item.compressible:
                    item.load(self._context.unit, factor)
                    self.controller.look(item.name, item.wanted, self._draw(item.name, 0))
            *sums, bad = self._everywhere([*self.controller.looked(), float(self._bad)])
            # A step that will be skipped must leave no trace in what the next ones are decided by.
            self.controller.decide([math.nan] * len(sums) if bad else sums)
        for group in self._waiting:
            self._start(group, factor)

    def _start(self, items: Sequence[Item], factor: float) -> None:
        """Starts the paths of a group of gradients."""
        if self._inside is None:
            self._load(items, factor)
            self._paths += [self._begun(path) for path in self._routes(items)]
        else:
            self._paths.append(self._begun(self._over_two_levels(items, factor)))

    def _over_two_levels(self, items: Sequence[Item], factor: float) -> Path:
        """Means inside each machine, and an exchange between their first replicas."""
        assert self._inside is not None
        yield from mean_inside(items, self._inside, self.network.inside, self._draw, factor)
        if self._peers is not None:
            self._load(items, 1.0)
            for path in self._routes(items):
                yield from path

    def _load(self, items: Iterable[Item], factor: float) -> None:
        for item in items:
            gradient = item.load(self._context.unit, factor)
            if item.compressible:
                draw = self._draw(item.name, 0)
                self.controller.observe(item.name, item.wanted, gradient, draw)

    def _routes(self, items: Sequence[Item]) -> list[Path]:
        """The path of each gradient, those of a kind together."""
        context = self._context
        by_path = routes(items, self.controller, self.network, context.peers.size)
        for name, of_path in by_path.items():
            self._routed[name] = self._routed.get(name, 0) + len(of_path)
            for item in of_path if name != "two-phase" else ():
                self._state.hand_back(item, context)
        return [PATH_OF[name](of_path, context) for name, of_path in by_path.items()]

    @staticmethod
    def _begun(path: Path) -> tuple[Path, Works | None]:
        return path, next(path, None)

    def _drive(self) -> None:
        """Waits for each path's collectives in turn, until all paths have ended."""
        paths = self._paths
        while paths:
            going = []
            for path, works in paths:
                if works is None:
                    continue
                with self.totals.timed("wait_s"):
                    for work in works:
                        with self._everyone.waiting():
                            work.wait()
                with self.totals.timed("decode_s"):
                    going.append((path, next(path, None)))
            paths = going

    def _draw(self, name: str, piece: int) -> Draw:
        def draw(alike: bool) -> torch.Generator:
            who = -1 if alike else self._everyone.rank
            drawn = self._copy_of.get(name, name)
            return generator_for("replicas", self._seed, drawn, piece, self.step, who)

        return draw

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        """Over the replicas, in fp64, on the gradients' device."""
        total = torch.tensor(list(numbers), dtype=torch.float64, device=self._device)
        with self._everyone.waiting():
            dist.all_reduce(total, group=self._everyone.group)
        result: list[float] = total.tolist()
        return result

    def _leave_alone(self, unused: set[str]) -> None:
        """Takes back what was sent for parameters that no replica had a gradient for.

        DDP ignores their results; what memories hold must wait for a step in which it does not.
        """
        for item in self._items:
            if item.name in unused:
                self._state.discard_one(item.name)
                self._context.new_factors.pop(item.name, None)
                item.gradient.zero_()

    def _entry(self, finite: bool) -> dict[str, Any]:
        tally = self._context.tally
        return {
            "step": self.step,
            "wire_bytes": tally.wire_bytes,
            "dense_bytes": tally.dense_bytes,
            "floats": tally.floats,
            "traffic_bytes": self._mean_traffic,
            "skipped": not finite,
            "seconds": time.perf_counter() - self._started,
            **self.controller.report(),
        }

    # -- what happened, and going on from it ------------------------------------------------------

    @property
    def num_compressible(self) -> int:
        """Elements of this rank's parameters that may go compressed."""
        return sum(meta.numel for meta in self._compressible.values())

    def report(self) -> dict[str, Any]:
        """Totals of this rank, the ratio, and what the method is at."""
        totals = dataclasses.asdict(self.totals)
        return {
            "method": str(self.method),
            "replicas": self.num_replicas,
            **totals,
            "ratio": self.totals.ratio,
            "density": self.density,
            "memory_bytes": self._state.num_bytes,
            "paths": dict(sorted(self._routed.items())),
            **self.controller.report(),
        }

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on exactly; each replica has its own.

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
            "totals": dataclasses.asdict(self.totals),
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
        self.totals = Totals(**rest["totals"])
        self.controller.load_state_dict(rest["controller"])
