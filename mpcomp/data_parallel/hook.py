"""Compressed gradients for any model in torch's DistributedDataParallel."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types.
import hashlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.network import ReplicaNetwork

__all__ = ["CompressedGradients", "compress_gradients"]

_hooked: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class CompressedGradients:
    """The state of a model's compressed gradients on this replica; see `compress_gradients`.

    Attributes:
        exchange: what does the work.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        exchange: Exchange,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.exchange = exchange
        self._scaler = scaler
        self._lr_of: torch.optim.Optimizer | None = None
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        #: Buckets whose results DDP waits for.
        self._open: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        ddp.register_comm_hook(None, self._hook)

    def _hook(self, _: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Called by DDP for each bucket in turn, on every rank in the same order."""
        if bucket.index() == 0:
            self._open.clear()
            self.exchange.settle(finite=False)  # of a step that ended with an error
            enabled = self._scaler is not None and self._scaler.is_enabled()
            scale = self._scaler.get_scale() if self._scaler is not None and enabled else 1.0
            lr = float(self._lr_of.param_groups[0]["lr"]) if self._lr_of is not None else None
            self.exchange.begin(loss_scale=scale, lr=lr)
        names = [self._names[id(p)] for p in bucket.parameters()]
        self.exchange.add(dict(zip(names, bucket.gradients(), strict=True)))
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] | None = None
        if buffer.device.type == "cuda":
            devices = [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._open.append((future, buffer))
        if bucket.is_last():
            self.exchange.finish()
            self.exchange.settle(finite=not self.exchange.nonfinite)
            for waiting, result in self._open:
                waiting.set_result(result)
            self._open.clear()
        return future

    def follow_lr(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets methods follow this optimizer's (first group's) learning rate.

        Raises:
            ValueError: the optimizer has momentum, and so has the method.
        """
        self.exchange.method.check_optimizer(optimizer)
        self._lr_of = optimizer

    @property
    def history(self) -> list[dict[str, Any]]:
        """An entry for each step: bytes, floats, seconds, and what the method was at."""
        return list(self.exchange.history)

    def report(self) -> dict[str, Any]:
        """Totals of this replica: bytes, floats, ratio, seconds, and what the method is at."""
        return self.exchange.report()

    def state_dict(self) -> dict[str, Any]:
        """What this replica needs to go on exactly: ``tensors``, and ``rest`` for JSON."""
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave on the same replica, of as many.

        Raises:
            ValueError: it was given by another method.
        """
        self.exchange.load_state_dict(state)


def compress_gradients(
    ddp_model: DistributedDataParallel,
    dp_comp: Any,
    *,
    network: ReplicaNetwork | None = None,
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> CompressedGradients:
    """Makes a DDP model's replicas exchange compressed gradients.

    Every rank calls this once, after DDP and before the first backward, with the same arguments.
    From then on ``loss.backward()`` leaves in ``.grad`` what the method makes of all replicas'
    gradients, the same bits on each. It works with ``no_sync`` (what has been added up is sent),
    unused parameters, and gradients in bf16.

    Args:
        ddp_model: all of its parameters on one device.
        dp_comp: a method such as ``GraVAC(TopK(0.1))``, ``DGC(0.001)`` or ``PowerSGD(2)``, a
            compressor, `ErrorFeedback` or `EF21` round one, or a spec string.
        network: how replicas are connected.
        seed: of all random choices.
        scaler: the loss scaler in use, if any: what is kept is free of its scale. A step with NaN
            or Inf on any replica gives NaN on all, which it skips, and leaves no trace here.

    Returns:
        A handle with `report`, `history`, `state_dict` and `follow_lr`.

    Raises:
        TypeError: no DDP model, or no method.
        ValueError: the model has a hook already, the method does not suit it, or ranks were given
            different arguments or models; on every rank.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"{type(ddp_model).__name__} is no DistributedDataParallel model: wrap it first, "
            "mpcomp.compress_gradients(DistributedDataParallel(model), ...)"
        )
    method = replica_method_of(dp_comp)
    group = ddp_model.process_group
    parameters = {n: p for n, p in ddp_model.module.named_parameters() if p.requires_grad}
    words = [
        f"{method}, {network or ReplicaNetwork()}, seed {seed}",
        *(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters.items()),
    ]
    _check_alike(words, group, next(iter(parameters.values())).device)
    if ddp_model in _hooked:
        raise ValueError(
            "this model's gradients are compressed already, and DDP takes one hook for ever: wrap "
            "the plain model in a new DistributedDataParallel to change the method"
        )
    exchange = Exchange(
        parameters,
        method,
        group,
        network=network,
        seed=seed,
        unused=ddp_model.find_unused_parameters,
    )
    handle = CompressedGradients(ddp_model, exchange, scaler)
    _hooked.add(ddp_model)
    return handle


def _check_alike(words: list[str], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises ValueError on all ranks if they were given different things."""
    digest = hashlib.blake2b("\n".join(words).encode(), digest_size=8).digest()
    own = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device)
    said = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(said, own, group=group)
    other = [rank for rank, number in enumerate(said) if number.item() != said[0].item()]
    if other:
        raise ValueError(
            f"replicas {', '.join(map(str, other))} were given another model, method, network or "
            "seed than replica 0: give the same to all"
        )
