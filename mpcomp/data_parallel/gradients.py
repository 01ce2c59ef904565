"""The handle of a model's compressed gradients that a user holds, whoever moves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpcomp.comm.handshake import check_alike, fingerprint
from mpcomp.data_parallel.exchange import Exchange

__all__ = ["CompressedGradients", "check_same_arguments"]


class CompressedGradients:
    """The state of a model's compressed gradients on this rank; see `compress_gradients`.

    Args:
        exchange: what does the work.
        scaler: the loss scaler in use, if any.

    Attributes:
        exchange: as given.
    """

    def __init__(self, exchange: Exchange, scaler: torch.amp.GradScaler | None) -> None:
        self.exchange = exchange
        self._scaler = scaler
        self._lr_of: torch.optim.Optimizer | None = None

    def begin(self, *, compress: bool = True) -> None:
        """Begins a step with the loss scale and the learning rate of the moment."""
        enabled = self._scaler is not None and self._scaler.is_enabled()
        scale = self._scaler.get_scale() if self._scaler is not None and enabled else 1.0
        lr = float(self._lr_of.param_groups[0]["lr"]) if self._lr_of is not None else None
        self.exchange.begin(loss_scale=scale, lr=lr, compress=compress)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Names the optimizer that steps by the gradients, for the methods that must know it.

        Some follow its (first group's) rate; `LocalSGD` acts after its steps.

        Raises:
            ValueError: the optimizer has momentum, and so has the method; or it has none of the
                parameters that `LocalSGD` is to average.
        """
        self.exchange.follow(optimizer)
        self._lr_of = optimizer

    @property
    def history(self) -> list[dict[str, Any]]:
        """An entry for each of the last 1,000 steps: bytes, floats, seconds, the method's state."""
        return list(self.exchange.history)

    def report(self) -> dict[str, Any]:
        """Totals of this replica: bytes, floats, ratio, seconds, and what the method is at."""
        return self.exchange.report()

    def state_dict(self) -> dict[str, Any]:
        """All that this replica needs to go on exactly: ``tensors``, and ``rest`` for JSON."""
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave on the same replica, of as many.

        Raises:
            ValueError: it was given by another method.
        """
        self.exchange.load_state_dict(state)


def check_same_arguments(
    words: Sequence[str], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises ValueError on all ranks if they were given different things."""
    own = torch.tensor([fingerprint(list(words))], device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    check_alike(
        [{"arguments": number.item()} for number in gathered],
        lambda found: (
            f"replicas {', '.join(str(d.rank) for d in found)} were given another model, method, "
            "network or seed than replica 0: give the same to all"
        ),
    )
