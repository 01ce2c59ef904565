"""One step's averaging, from the first gradients that backward has finished to the means of all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpcomp.comm.collectives import Works
from mpcomp.core.randomness import generator_for
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.traffic import ReplicaTraffic
from mpcomp.data_parallel.base import Controller, Draw, ReplicaMethod
from mpcomp.data_parallel.network import Connections, ReplicaNetwork
from mpcomp.data_parallel.paths import PATH_OF, Path, broadcast, mean_inside, routes
from mpcomp.data_parallel.plan import Context, Item
from mpcomp.data_parallel.replica_state import ReplicaState

__all__ = ["Averaging", "Run"]


@dataclass(frozen=True)
class Run:
    """The surroundings that all steps have in common.

    Attributes:
        method: between replicas.
        network: how they are connected.
        connections: to them.
        controller: this rank's.
        state: of this rank's parameters.
        totals: of this rank.
        compressible: the parameters that may go compressed, as matrices.
        everywhere: sums numbers over all ranks that must decide alike.
        own_norm: the norm of this replica's whole gradient, from the square of that of this rank's
            part.
        copy_of: the name under which each parameter counts that another rank has a copy of.
        watched: parameters that no replica may have a gradient for.
        alike_inside: whether what is averaged is the same on all replicas of a machine.
        seed: of all random choices.
        device: of the gradients.
    """

    method: ReplicaMethod
    network: ReplicaNetwork
    connections: Connections
    controller: Controller
    state: ReplicaState
    totals: ReplicaTraffic
    compressible: Mapping[str, TensorMeta]
    everywhere: Callable[[Sequence[float]], list[float]]
    own_norm: Callable[[float], float]
    copy_of: Mapping[str, str]
    watched: Sequence[str]
    alike_inside: bool
    seed: int
    device: torch.device


def _draws(run: Run, step: int) -> Callable[[str, int], Draw]:
    """The generators of a step, by the name of a parameter and the number of its piece."""

    def draw_of(name: str, piece: int) -> Draw:
        def draw(alike: bool) -> torch.Generator:
            who = -1 if alike else run.connections.everyone.rank
            drawn = run.copy_of.get(name, name)
            return generator_for("replicas", run.seed, drawn, piece, step, who)

        return draw

    return draw_of


class Averaging:
    """A step under way. The calls, in this order::

        averaging.add({name: gradient, ...})    # any number of times
        averaging.finish()

    Args:
        run: what it shares with other steps.
        step: its number.
        unit: factor from what memories keep to this step's gradients.
        compress: if not, everything goes as it is, and nothing is left over.

    Attributes:
        items: the gradients so far.
        context: what their paths share.
        routed: number of parameters on each path.
        finite: whether all gradients were finite on all ranks, once it is finished.
        sums: of the controller's figures over those ranks; None before it is finished.
        mean_traffic_bytes: that each rank has sent, on average.
    """

    def __init__(self, run: Run, step: int, unit: float, *, compress: bool) -> None:
        self._run = run
        self._step = step
        self._compress = compress
        self.items: list[Item] = []
        self._paths: list[tuple[Path, Works | None]] = []
        self._waiting: list[list[Item]] = []
        self._bad = torch.zeros((), dtype=torch.float32, device=run.device)
        self._used = dict.fromkeys(run.watched, 0.0)
        self._started = time.perf_counter()
        self._waits = run.controller.waits or run.method.clip is not None
        self.routed: dict[str, int] = {}
        self.finite = True
        self.sums: list[float] | None = None
        self.mean_traffic_bytes = 0.0
        connections = run.connections
        # A function of its own: a method would hold this step, which holds the context that has
        # it, and gradients would stay until somebody collects such circles.
        self._draw = _draws(run, step)
        self.context = Context(
            connections.between or connections.everyone,
            run.controller,
            unit,
            self._draw,
            run.state.end_of_mean,
            run.state.factors,
        )

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes gradients that are complete on this rank; they are overwritten by `finish`."""
        items = [self.item(name, gradient) for name, gradient in gradients.items()]
        self.items += items
        for item in items:
            # A sum is finite unless an element is not, or it overflows, which is as bad.
            self.found_nonfinite(~item.gradient.sum(dtype=torch.float32).isfinite())
            if item.name in self._used:
                self._used[item.name] = float(bool(item.gradient.any()))
        if self._waits:
            self._waiting.append(items)
        else:
            self._start(items, 1.0)

    def item(self, name: str, gradient: Tensor) -> Item:
        """A gradient of this step; it is counted among what there is to send."""
        run = self._run
        may = self._compress and name in run.compressible
        small = run.network.small if self._compress and not may else None
        self.context.traffic.dense_bytes += gradient.nbytes
        self.context.traffic.num_elements += gradient.numel()
        return Item(
            name,
            gradient,
            run.state.ends[name],
            may,
            None if small is None else small.wire_dtype,
        )

    def load(self, items: Iterable[Item], factor: float = 1.0) -> None:
        """Reads gradients, times ``factor``, and shows them to the controller."""
        for item in items:
            gradient = item.load(self.context, factor)
            if item.compressible:
                draw = self._draw(item.name, 0)
                self._run.controller.observe(item.name, item.target, gradient, draw)

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
        run, inside = self._run, self._run.connections.inside
        if self._waits:
            with run.totals.timed("encode_s"):
                self._start_waiting()
        self._drive()
        if inside is not None:
            # Not before the last group's exchange has ended: groups may take turns of different
            # number, of which the ranks that only wait for the result know nothing.
            self._paths = [_begun(broadcast(self.items, inside))]
            self._drive()
        traffic = self.context.traffic
        traffic.messages = 1
        traffic.traffic_bytes = run.connections.take_traffic()
        said = [1.0, float(self._bad), traffic.traffic_bytes, *self._used.values()]
        figures = run.controller.figures()
        if run.controller.among_replicas:
            ranks, bad, total_traffic, *used = run.everywhere(said)
            self.sums = run.connections.sum(figures) if figures else []
        else:
            ranks, bad, total_traffic, *rest = run.everywhere([*said, *figures])
            used, self.sums = rest[: len(self._used)], rest[len(self._used) :]
        self.mean_traffic_bytes = total_traffic / ranks
        self.finite = not bad
        if self.finite:
            self.leave_alone({n for n, u in zip(self._used, used, strict=True) if not u})
        else:
            for item in self.items:
                item.gradient.fill_(math.nan)

    def leave_alone(self, unused: Collection[str]) -> None:
        """Takes back what was sent for parameters that no replica had a gradient for.

        Nobody looks at their results; what memories hold must wait for a step in which one does.
        """
        for item in self.items:
            if item.name in unused:
                self._run.state.discard_one(item.name)
                self.context.new_factors.pop(item.name, None)
                item.gradient.zero_()

    def entry(self, finite: bool) -> dict[str, Any]:
        """Entry for a log of every step; ``finite`` is whether the step was, at last."""
        traffic = self.context.traffic
        return {
            "step": self._step,
            "wire_bytes": traffic.wire_bytes,
            "dense_bytes": traffic.dense_bytes,
            "num_elements": traffic.num_elements,
            "floats": traffic.floats,
            "traffic_bytes": self.mean_traffic_bytes,
            "skipped": not finite,
            "seconds": time.perf_counter() - self._started,
            **self._run.controller.report(),
        }

    # -- inside ---------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Starts what had to wait for all gradients of the step."""
        controller = self._run.controller
        items = [item for group in self._waiting for item in group]
        factor = self._clipping(items)
        if controller.waits:
            for item in items:
                if item.compressible:
                    item.load(self.context, factor)
                    controller.look(item.name, item.target, self._draw(item.name, 0))
            *sums, bad = self._run.everywhere([*controller.looked(), float(self._bad)])
            # A step that will be skipped must leave no trace in what the next ones are decided by.
            controller.decide([math.nan] * len(sums) if bad else sums)
        for group in self._waiting:
            self._start(group, factor)

    def _clipping(self, items: Sequence[Item]) -> float:
        """By what this replica's gradient is scaled down, if the method clips it."""
        run = self._run
        if run.method.clip is None:
            return 1.0
        norms = [
            torch.linalg.vector_norm(item.gradient, dtype=torch.float32)
            for item in items
            if run.copy_of.get(item.name, item.name) == item.name
        ]
        square = float(torch.stack(norms).square().sum()) if norms else 0.0
        norm = run.own_norm(square) / self.context.unit
        # Of N gradients g the mean is the sum of g / N, and DGC clips g / N to clip / sqrt(N).
        largest = run.method.clip * math.sqrt(run.connections.everyone.size)
        return min(1.0, largest / norm) if norm > 0 else 1.0

    def _start(self, items: Sequence[Item], factor: float) -> None:
        """Starts the paths of a group of gradients."""
        if self._run.connections.inside is None:
            self.load(items, factor)
            self._paths += [_begun(path) for path in self._routes(items)]
        else:
            self._paths.append(_begun(self._over_two_levels(items, factor)))

    def _over_two_levels(self, items: Sequence[Item], factor: float) -> Path:
        """Means inside each machine, and an exchange between their first replicas."""
        connections, codec = self._run.connections, self._run.network.inside
        assert connections.inside is not None
        if not self._run.alike_inside:
            yield from mean_inside(items, connections.inside, codec, self._draw, factor)
            factor = 1.0
        if connections.between is not None:
            self.load(items, factor)
            for path in self._routes(items):
                yield from path

    def _routes(self, items: Sequence[Item]) -> list[Path]:
        """The path of each gradient, those of a kind together."""
        run, context = self._run, self.context
        by_path = routes(items, run.controller, run.network, context.peers.size)
        for name, of_path in by_path.items():
            self.count_route(name, len(of_path))
            for item in of_path if name != "two-phase" else ():
                run.state.hand_back(item, context)
        return [PATH_OF[name](of_path, context) for name, of_path in by_path.items()]

    def _drive(self) -> None:
        """Waits for each path's collectives in turn, until all paths have ended."""
        totals, everyone = self._run.totals, self._run.connections.everyone
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
