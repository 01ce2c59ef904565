"""One rank's part in local SGD: the exchange of an optimizer's steps, not of gradients.

The calls for gradients are those of every `Exchange`, and leave them as they are. What replicas
average are parameters, after the optimizer's step, in the same calls of the class above::

    begin, add, finish, finish_step     of a backward: gradients stay each replica's own
    optimizer.step()
        └─ on_optimizer_step    nothing is sent, or, where a part of the model has its turn,
                                begin, add, finish, finish_step of its parameters

Which of the two it is follows from the number of steps, so replicas have to skip the same ones:
those of a pipeline do in any case, and those that have a loss scaler each agree in every step.

Several replicas on a machine are one to the others: an exchange of their own averages their
gradients in every step, so that they train alike, and the first of them meets those of other
machines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mpcomp.core.context import TensorMeta
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.exchange import Averaging, Exchange, in_groups
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.methods.local_sgd import correct
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.feedback.anchor import ANCHOR

__all__ = ["LocalExchange"]


class LocalExchange(Exchange):
    """Averages what replicas have moved by, each part of the model once a period.

    Args:
        parameters: as for `Exchange`; they are read and replaced in place.
        method: one with a schedule.
        group: the ranks that have these parameters.
        whole: as for `Exchange`.
        tied_alias: as for `Exchange`.
        together: a context for an exchange, which it names: an error in it ends all ranks.
        agrees: whether replicas find out in each step if gradients are finite on all of them, in a
            sum of one number: where each has a loss scaler that skips steps.
        options: of `Exchange`.

    Raises:
        ValueError, TypeError: as for `Exchange`.
    """

    density_every = None  # results are parameters, which are not sparse
    replicated_in_node = True  # as gradients were averaged there
    _machine: Exchange | None = None

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        method: ReplicaMethod,
        group: dist.ProcessGroup,
        *,
        whole: Mapping[str, Tensor] | None = None,
        tied_alias: Mapping[str, str] | None = None,
        together: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
        agrees: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(parameters, method, group, whole=whole, tied_alias=tied_alias, **options)
        assert method.sync_schedule is not None
        self._schedule = method.sync_schedule
        self._trained = dict(parameters)
        self._dense_bytes = sum(p.nbytes for p in parameters.values())
        self._num_elements = sum(p.numel() for p in parameters.values())
        shares = self._schedule.assign_parts(
            {name: p.numel() for name, p in (whole or parameters).items()}
        )
        #: Copies of a tied weight have the turn of the first one, on whatever rank.
        self._part_of = {name: shares[self._tied_alias.get(name, name)] for name in shares}
        inside = self._connections.inside
        if inside is not None:
            common = ("seed", "waiting", "timeout")
            self._machine = Exchange(
                parameters,
                replica_method_of(self.network.inside),
                inside.group,
                network=ReplicaNetwork(smallest=self.network.smallest),
                whole=whole,
                tied_alias=tied_alias,
                **{name: value for name, value in options.items() if name in common},
            )
        self._together = together
        self._agrees = agrees
        self._gradients: list[Tensor] = []
        self._compress = True
        self._optimizer: torch.optim.Optimizer | None = None
        self._hook: RemovableHandle | None = None

    def reset(self) -> None:
        super().reset()
        if self._machine is not None:
            self._machine.reset()
        self._in_backward = False
        #: Whether a step of the optimizer would be the first one since a backward that counts.
        self._expecting = False

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes a part in the steps of this optimizer, and of no other.

        Raises:
            ValueError: it has none of these parameters.
        """
        super().follow(optimizer)
        own = {id(p) for p in self._trained.values()}
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if own and not own & stepped:
            raise ValueError(
                f"{self.method}: the optimizer has none of the parameters that replicas train; "
                "name the one that steps them"
            )
        self._unfollow()
        self._optimizer = optimizer
        self._hook = optimizer.register_step_post_hook(lambda *_: self.on_optimizer_step())

    def close(self) -> None:
        self._unfollow()
        if self._machine is not None:
            self._machine.close()
        super().close()

    def _unfollow(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._optimizer = None

    # -- gradients ------------------------------------------------------------------------------

    def check_begin(self, lr: float | None) -> None:
        """Raises ValueError if no optimizer was named: replicas would never meet."""
        super().check_begin(lr)
        if self._hook is None:
            raise ValueError(
                f"{self.method} acts after the optimizer's step, and none was named: call "
                "follow(optimizer) before training"
            )

    def begin(
        self, *, loss_scale: float = 1.0, lr: float | None = None, compress: bool = True
    ) -> None:
        """Begins a step; where the first one does, all replicas are at their first anchor."""
        self.check_begin(lr)
        self._compress = compress
        self._gradients.clear()
        self._in_backward, self._expecting = True, False
        if self._connections.between is not None:  # else told where to go, and needs no anchor
            unknown = [name for name, end in self._state.ends.items() if not end.known]
            anchors = {f"own/{name}/{ANCHOR}": _flat(self._trained[name]) for name in unknown}
            self._state.load(anchors)
        if self._machine is not None:
            self._machine.step = self.step  # for what it draws, also where a run goes on
            self._machine.begin(loss_scale=loss_scale, lr=lr, compress=compress)

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes gradients, and leaves them as they are if they are finite on all replicas.

        Those of replicas on one machine are averaged.
        """
        if self._machine is not None:
            self._machine.add(gradients)
        if self._agrees:
            self._gradients += gradients.values()

    def finish(self) -> None:
        """Makes all gradients NaN, so that all replicas skip, if those of one are not finite."""
        self.nonfinite = False
        if self._machine is not None:
            self._machine.finish()
        if self._agrees:
            sums = [gradient.sum(dtype=torch.float32) for gradient in self._gradients]
            finite = bool(torch.stack(sums).isfinite().all()) if sums else True
            (bad,) = self._connections.sum([float(not finite)])
            self.nonfinite = bool(bad)
        if self.nonfinite:
            for gradient in self._gradients:
                gradient.fill_(torch.nan)
        self._gradients.clear()

    def leave_alone(self, names: Collection[str]) -> None:
        if self._machine is not None:
            self._machine.leave_alone(names)

    @property
    def averaged_over(self) -> dist.ProcessGroup | None:
        return None if self._machine is None else self._machine.averaged_over

    def finish_step(self, finite: bool) -> None:
        """Ends the backward; if it was finite everywhere, the optimizer's next step counts."""
        if self._machine is not None:
            self._machine.finish_step(finite)
        if self._in_backward:
            self._expecting = finite
        self._in_backward = False

    # -- parameters -----------------------------------------------------------------------------

    def on_optimizer_step(self) -> None:
        """Counts a step that the optimizer has taken, and averages what has its turn then.

        Raises:
            FloatingPointError: NaN or Inf in a parameter of some replica; on all of them.
            PeerError: another replica failed, where these are a pipeline's.
        """
        if not self._expecting:
            return
        self._expecting = False
        part = self._schedule.part_due(self.step)
        if part in self._part_of.values():
            self._sync_part({n: p for n, p in self._trained.items() if self._part_of[n] == part})
        else:
            self._count_step()

    def _sync_part(self, due: Mapping[str, Tensor]) -> None:
        """Moves all replicas to the next anchor of some parameters."""
        correction = self.method.correction
        before = [p.detach().clone() for p in due.values()] if correction else []
        with self._together(f"step {self.step}, exchanging parameters with other replicas"):
            super().begin(compress=self._compress)
            named = ((name, parameter.detach()) for name, parameter in due.items())
            for group in in_groups(named, alone=self._tied_alias):
                super().add(group)
            self._count_all(self._under_way)
            super().finish()
            super().finish_step(finite=not self.nonfinite)
        if self.nonfinite:
            raise FloatingPointError(
                f"NaN or Inf in a parameter of a replica after step {self.step}: the model has "
                "diverged. All replicas have NaN now, and remember what they did before; go on "
                "from a checkpoint"
            )
        if correction:
            assert self._optimizer is not None  # who calls this
            moved = {p: p.detach() - own for p, own in zip(due.values(), before, strict=True)}
            correct(self._optimizer, moved, self._schedule.period, correction)

    def _count_step(self) -> None:
        """Counts a step in which nothing is sent."""
        averaging = Averaging(self, 1.0, compress=True)
        averaging.traffic.messages = 1
        self._count_all(averaging)
        self._count(averaging.traffic)
        self.history.append(averaging.entry(finite=True))
        self.step += 1

    def _count_all(self, averaging: Averaging) -> None:
        """Compares a step with gradients, all of which would be sent."""
        averaging.traffic.dense_bytes = self._dense_bytes
        averaging.traffic.num_elements = self._num_elements


def _flat(parameter: Tensor) -> Tensor:
    """The elements in memory order, as an exchange has them."""
    return TensorMeta.of(parameter).flatten(parameter.detach()).reshape(-1)
