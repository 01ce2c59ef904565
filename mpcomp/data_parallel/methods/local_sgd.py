"""Local SGD: replicas train alone for many steps, and then average what they have moved by.

With ``correction``, each replica's Adam learns from an exchange where the others went. A replica
that trains alone follows its own noise, which Adam's first moment m keeps for about 1 / (1 - beta1)
steps. An exchange after H steps at a rate lr moves the replica by j, from where it had come to the
mean of all. Its steps, -lr m / (1 - beta1^t) / (sqrt(v^) + eps), would have made that move with
another m; a share c of the difference is put in::

    m <- m - c (1 - beta1^t) (sqrt(v^) + eps) j / (H lr)

so that each of its next steps has c j / H more, but for the decay of m. What j is all replicas have
been told anyway: nothing is sent for this, and nothing is kept.

SCAFFOLD (Karimireddy et al., ICML 2020, section 3, option II) likewise takes the mean gradient from
what parameters have moved by, and corrects gradients by its distance from a replica's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpcomp.compressors import Compressor
from mpcomp.core.spec import shown
from mpcomp.data_parallel.base import Controller, ReplicaMethod, RunInfo, SyncSchedule
from mpcomp.data_parallel.methods import Compressed, replica_method_of
from mpcomp.feedback.anchor import Anchored
from mpcomp.feedback.base import Feedback
from mpcomp.feedback.memory import Memory
from mpcomp.feedback.momentum import check_momentum

__all__ = ["LocalSGD", "correct"]


@dataclass(frozen=True)
class LocalSGD(ReplicaMethod):
    """DiLoCo: an exchange every ``period`` steps. Spec ``diloco:30+ef+topk:0.02+quant:2``.

    Each replica takes ``period`` steps of its own optimizer, by its own gradients. Then their
    distances from the anchor, where all of them last were, are averaged, as compressed as is
    wanted, and are the gradient of an outer step of SGD with Nesterov's momentum; the result is the
    next anchor, from which all go on::

        delta = anchor - parameters
        v <- momentum v + mean(delta)
        anchor <- anchor - lr (momentum v + mean(delta));  parameters <- anchor

    Defaults are the paper's lr and momentum. Deltas can do with little: 2 bits and error feedback
    in MuLoCo (Thérien et al. 2025), Top-1 to 3 % in 2 bits in SparseLoCo (Sarfi et al. 2025), where
    a residual with ``decay`` is in the place of the outer momentum.

    It acts after the optimizer's step, so it has to be named: ``handle.follow(optimizer)`` or
    ``pipe.follow(optimizer)``. Steps that a loss scaler skips do not count, and replicas that are
    given one all skip the same. Between two exchanges replicas differ; evaluate and keep models
    after a multiple of ``period`` steps.

    With ``correction`` c the first moments m of Adam inside learn from each exchange, and not a
    byte is sent for it. A replica alone follows the noise of its own gradients; the exchange moves
    it by j, to the mean of all, and c j / period is what its next steps are to have more of::

        m <- m - c (1 - beta1^t) (sqrt(v^) + eps) j / (period rate)

    With ``per_machine`` of `ReplicaNetwork` the replicas of a machine average their gradients in
    every step: machines are then what trains alone, and their first replicas are what meets.

    * Source: DiLoCo (Douillard et al., 2023, algorithm 1); ``parts`` from Streaming DiLoCo
      (Douillard et al., 2025), without its overlap of messages and steps. ``correction`` puts
      into Adam's first moments what SCAFFOLD (Karimireddy et al., ICML 2020, option II) puts into
      gradients.
    * State: on each replica that meets others the anchor and the outer velocity of each parameter,
      and what ``inner`` keeps.
    * Theory: of SGD inside and a plain mean outside (``lr=1:momentum=0``; Stich, ICLR 2019, "Local
      SGD converges fast and communicates little"). None that we know of for Adam inside,
      the outer momentum or compressed deltas: the evidence is the papers' experiments.

    Args:
        period: steps between two exchanges of a parameter, 1 or more.
        inner: what sends deltas: a compressor, alone or in `ErrorFeedback`, `EF21` or `ConEF`; None
            sends them as they are.
        lr: rate of the outer step.
        momentum: of the outer step, in [0, 1).
        parts: so many parts of the model take turns within a period.
        correction: share of what an exchange moves a replica by that goes into Adam's first
            moments, in [0, 1]; with a plain mean outside (``lr=1:momentum=0``) and torch's Adam or
            AdamW inside.

    Raises:
        ValueError: a setting outside those, or an ``inner`` that goes by gradients of every step.
        TypeError: an ``inner`` that sends nothing.
    """

    period: int
    inner: Compressor | Feedback | None = None
    lr: float = 0.7
    momentum: float = 0.9
    parts: int = 1
    correction: float = 0.0
    spec: ClassVar[str] = "diloco"
    spec_inner: ClassVar[str | None] = "inner"

    def __post_init__(self) -> None:
        self.sync_schedule  # noqa: B018  (raises for a bad period)
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr={self.lr}: expected a rate of the outer step above 0; 0.7, say")
        check_momentum(self.momentum)
        check_correction(self.correction)
        if self.correction and (self.lr != 1 or self.momentum):
            raise ValueError(
                f"correction={self.correction} with lr={self.lr:g}, momentum={self.momentum:g}: it "
                "goes by how far a replica was from the mean of all, and such an outer step goes "
                "elsewhere; pass lr=1:momentum=0"
            )
        method = replica_method_of(self.inner)
        if not isinstance(method, Compressed):
            raise ValueError(
                f"inner={shown(self.inner)}: it goes by the gradients of every step, of which "
                "replicas that train alone send none; use a compressor, ef+..., ef21+... or "
                "conef+..., as in diloco:30+ef+topk:0.02+quant:2"
            )
        if method.lr_scaled:
            raise ValueError(
                f"inner={shown(self.inner)}: a distance has the learning rate in it already; leave "
                "lr_scaled out"
            )

    @property
    def sync_schedule(self) -> SyncSchedule:  # type: ignore[override]
        return SyncSchedule(self.period, self.parts)

    @property
    def deltas(self) -> ReplicaMethod:
        """The inner one, which sends what parameters have moved by."""
        return replica_method_of(self.inner)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.correction and not has_first_moments(optimizer):
            raise ValueError(
                f"{self} corrects the first moments of torch's Adam or AdamW, and the optimizer is "
                f"{type(optimizer).__name__}: use one of those, or leave correction out"
            )

    def controller(self, run: RunInfo) -> Controller:
        return self.deltas.controller(run)

    def memory(self, *, compressed: bool) -> Memory:
        return Anchored(self.deltas.memory(compressed=compressed), self.lr, self.momentum)


def check_correction(correction: float) -> None:
    """Raises ValueError unless ``correction`` is a share, in [0, 1]."""
    if not 0 <= correction <= 1:
        raise ValueError(f"correction={correction}: expected a share in [0, 1]; 0.5, say")


def has_first_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's Adam or AdamW, whose moments `correct` can read."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


@torch.no_grad()
def correct(
    optimizer: torch.optim.Optimizer, moved: Mapping[Tensor, Tensor], period: int, share: float
) -> None:
    """Puts a share of what an exchange has moved parameters by into their first moments.

    Parameters that the optimizer has not stepped yet, and those at a rate of 0, are left alone.

    Args:
        optimizer: Adam or AdamW.
        moved: parameters -> j, of the same shapes.
        period: H, steps since the exchange before.
        share: c, in [0, 1].
    """
    for group in optimizer.param_groups:
        lr = float(group["lr"])
        for parameter in group["params"]:
            jump, state = moved.get(parameter), optimizer.state.get(parameter)
            if jump is None or not state or not lr:
                continue
            scale = _scale(state, group)
            state["exp_avg"].sub_((scale * jump).mul_(share / (period * lr)))


def _scale(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """The first moment that makes a step as long as the rate: (1 - beta1^t) (sqrt(v^) + eps)."""
    step = float(state["step"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    root: Tensor = second.float().sqrt() / math.sqrt(1 - beta2**step)
    return root.add_(float(group["eps"])).mul_(1 - beta1**step)
