"""The exchanges of all replicas in one process, each in a thread of its own.

    with InOneProcess(parameters, method, 4) as together:
        mean = together.average([gradients of replica 0, of replica 1, ...], lr=0.1)

Replicas hold the same weights after every step, as they apply the same mean. So one model and one
optimizer do for all of them; an exchange, with what it remembers, is each one's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.exchange import Exchange, in_groups
from mpcomp.data_parallel.network import ReplicaNetwork
from recipes.lab.thread_group import Meeting, NobodyComes, thread_group

__all__ = ["InOneProcess"]

AnyExchange = TypeVar("AnyExchange", bound=Exchange)


class _First(Exchange):
    """The first replica's exchange; a checkpoint, which asks it alone, gets the state of all."""

    others: Sequence[Exchange] = ()

    def state_dict(self) -> dict[str, Any]:
        states = [super().state_dict(), *(other.state_dict() for other in self.others)]
        tensors = {
            _numbered(key, i): value
            for i, state in enumerate(states)
            for key, value in state["tensors"].items()
        }
        # The one entry of a checkpoint's form that may hold anything.
        rests = {"replicas": [state["rest"] for state in states]}
        return {"tensors": tensors, "rest": {**states[0]["rest"], "controller": rests}}


def _numbered(key: str, replica: int) -> str:
    """The name of a tensor of one replica; see `Exchange.state_dict`."""
    kind, name, *field = key.split("/", 2)
    return "/".join((kind, name, str(replica), *field))


def _own_states(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The state of each replica, from the state of all."""
    own: list[dict[str, Any]] = [
        {"tensors": {}, "rest": rest} for rest in state["rest"]["controller"]["replicas"]
    ]
    for key, value in state["tensors"].items():
        kind, name, i, *field = key.split("/", 3)
        own[int(i)]["tensors"]["/".join((kind, name, *field))] = value
    return own


class InOneProcess:
    """The exchanges of all replicas of a model, each in a thread of its own; a context manager.

    Args:
        parameters: of the one model, those that require gradients.
        method: between replicas.
        num_replicas: how many.
        network: how they would be connected, on one level.
        seed: of all random choices.
        optimizer: steps by the results, for methods that must know it.

    Attributes:
        first: the exchange of the first replica.
        exchanges: of all.

    Raises:
        ValueError: the method does not suit the parameters or the optimizer, replicas would have
            weights of their own or two levels, or this process is one of several.
        TypeError: parameters of fp64.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        method: ReplicaMethod,
        num_replicas: int,
        *,
        network: ReplicaNetwork | None = None,
        seed: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if method.sync_schedule is not None:
            raise ValueError(f"{method}: replicas train apart, and there is one model for all")
        if network is not None and network.per_machine > 1:
            raise ValueError(
                f"per_machine={network.per_machine}: pass 1, for replicas on one level"
            )
        if dist.is_initialized():
            raise ValueError("this process is one of several; start it alone, without torchrun")
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._meeting = Meeting(num_replicas)
        self._errors: list[BaseException] = []
        self._is_open = True

        def made(kind: type[AnyExchange], replica: int) -> AnyExchange:
            with thread_group(replica, num_replicas, self._meeting) as group:
                return kind(parameters, method, group, network=network, seed=seed)

        self.first = made(_First, 0)
        self.first.others = [made(Exchange, i) for i in range(1, num_replicas)]
        self.exchanges: list[Exchange] = [self.first, *self.first.others]
        if optimizer is not None:
            self.first.follow(optimizer)
        # Its threads start with the first step.
        self._pool = ThreadPoolExecutor(num_replicas, thread_name_prefix="replica")

    def average(
        self,
        gradients: Sequence[Mapping[str, Tensor]],
        *,
        lr: float | None = None,
        loss_scale: float = 1.0,
        compress: bool = True,
    ) -> Mapping[str, Tensor]:
        """Averages the gradients of a step.

        If a gradient is not finite on some replica, all results are NaN, and what replicas
        remember is as before the step.

        Args:
            gradients: of each replica, by the names of all parameters in one order; overwritten.
            lr: as of `Exchange.begin`, like the others.
            loss_scale: likewise.
            compress: likewise.

        Returns:
            The first replica's gradients, which hold the result; every replica has the same.

        Raises:
            ValueError: gradients of more or fewer replicas.
            Exception: the first error of a replica; this is closed then.
        """
        if len(gradients) != len(self.exchanges):
            raise ValueError(
                f"gradients of {len(gradients)} replicas, and there are {len(self.exchanges)}"
            )
        # A stream is a thread's own choice, and so is whether autograd records.
        on_cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if on_cuda else None

        def step(exchange: Exchange, own: Mapping[str, Tensor]) -> None:
            with self._meeting.turn, torch.no_grad(), torch.cuda.stream(stream):
                try:
                    exchange.begin(lr=lr, loss_scale=loss_scale, compress=compress)
                    for group in in_groups(own.items(), alone=()):
                        exchange.add(group)
                    exchange.finish()
                    exchange.finish_step(finite=not exchange.nonfinite)
                except BaseException as error:
                    self._errors.append(error)
                    self._meeting.end()

        pairs = zip(self.exchanges, gradients, strict=True)
        wait([self._pool.submit(step, *pair) for pair in pairs])
        if self._errors:
            self.close()
            raise min(self._errors, key=lambda error: isinstance(error, NobodyComes))
        return gradients[0]

    def report(self) -> dict[str, Any]:
        """The totals of the first replica, and what the method is at."""
        return self.first.report()

    def state_dict(self) -> dict[str, Any]:
        """The state of all replicas, to go on exactly: ``tensors``, and ``rest`` for JSON."""
        return self.first.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave, with as many replicas.

        Raises:
            ValueError: it was given by another method, or for other replicas or parameters.
        """
        states = _own_states(state)
        if len(states) != len(self.exchanges):
            raise ValueError(
                f"the state has {len(states)} replicas, and here are {len(self.exchanges)}: "
                "use as many"
            )
        for exchange, own in zip(self.exchanges, states, strict=True):
            exchange.check_state(own)
        for exchange, own in zip(self.exchanges, states, strict=True):
            exchange.load_state_dict(own)

    def close(self) -> None:
        """Ends the threads, and lets go of the exchanges; only figures are left."""
        if not self._is_open:
            return
        self._is_open = False
        self._meeting.end()
        self._pool.shutdown()
        for exchange in self.exchanges:
            exchange.close()

    def __enter__(self) -> InOneProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
