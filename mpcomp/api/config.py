"""The arguments of `mpcomp.pipeline`: each is written there and here, and nowhere else.

What is wrong by itself is refused here. Each field also says whether all ranks must have been given
the same, and under which name they compare it, or why they need not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

import stages as staging
from mpcomp.api.porting import check_function
from mpcomp.core.loss import CausalLMLoss, LossFn
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.engines.schedules import schedule_named
from mpcomp.links.budget import percent_of
from mpcomp.links.build import MethodLike, Methods
from mpcomp.plan.network import link_of
from stages.encoders import check_head_loss
from stages.language_models import check_own_loss
from stages.split import Where

__all__ = ["PipelineConfig"]

_ENGINES = ("local", "distributed")
_CHECKS = ("none", "state", "message")
_TIES = ("together", "apart")
_DATA = ("all", "first")


def _same(shown: Callable[[Any], Any] = lambda value: value, name: str = "") -> dict[str, Any]:
    """Of a field that all ranks compare: by what ``shown`` makes of it, under a name of its own."""
    return {"same": shown, "name": name}


def _of_rank(why: str) -> dict[str, Any]:
    """Of a field that ranks need not compare."""
    return {"of_rank": why}


def _method_name(dp_comp: Any) -> str:
    return str(None if dp_comp is None else replica_method_of(dp_comp))


def _loss_name(loss_fn: LossFn | None) -> str:
    name: str = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
    return name


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Arguments of `mpcomp.pipeline`, which documents them.

    Raises:
        ValueError: one that is wrong by itself.
        TypeError: a loss function that is none.
    """

    chunks: int = field(metadata=_same())
    act_comp: Methods = field(metadata=_of_rank("links compare the methods that it comes to"))
    grad_comp: Methods = field(metadata=_of_rank("links compare the methods that it comes to"))
    budget: str | float | None = field(metadata=_same(str))
    link: str | None = field(metadata=_same())
    dp_comp: Any = field(metadata=_same(_method_name))
    tie_comp: MethodLike = field(metadata=_of_rank("links compare the methods that it comes to"))
    ties: str | None = field(metadata=_of_rank("ranks compare the stages that it comes to"))
    network: ReplicaNetwork | None = field(metadata=_same(str))
    data: str = field(metadata=_same())
    split: Where | None = field(metadata=_of_rank("ranks compare the stages that it comes to"))
    sample: Any = field(
        metadata=_of_rank("a batch to measure with, and every rank measures itself")
    )
    devices: str | torch.device | Sequence[str | torch.device] | None = field(
        metadata=_of_rank("ranks compare the type of their devices")
    )
    replicas: int = field(metadata=_same())
    shard: bool = field(metadata=_same())
    param_comp: Any = field(metadata=_same(str))
    schedule: str | None = field(metadata=_same(lambda given: schedule_named(given).name))
    in_flight: int | str | None = field(metadata=_same())
    in_flight_bytes: int | None = field(metadata=_same())
    connections: int | str = field(metadata=_same())
    loss_fn: LossFn | None = field(metadata=_same(_loss_name, "loss"))
    recompute: bool = field(metadata=_same())
    seed: int = field(metadata=_same())
    engine: str | None = field(metadata=_of_rank("one that is not distributed compares nothing"))
    warmup_steps: int = field(metadata=_same())
    scaler: torch.amp.GradScaler | None = field(
        metadata=_same(lambda scaler: scaler is not None and scaler.is_enabled(), "loss scaler")
    )
    weights: str | Path | None = field(metadata=_of_rank("a folder on the rank's own disk"))
    timeout: float = field(metadata=_same())
    checks: str = field(metadata=_same())

    def __post_init__(self) -> None:
        in_flight = self.in_flight
        if not _counts(self.chunks):
            raise ValueError(
                f"chunks={self.chunks!r}: expected a whole number of microbatches, 1 or more"
            )
        if self.budget is not None:
            percent_of(self.budget)
        if self.link is not None:
            link_of(self.link)
        check_function("loss_fn", self.loss_fn)
        if self.split == "time" and self.sample is None:
            raise ValueError(
                "split='time' measures the model's blocks: pass sample=x, a batch of the size of a "
                "microbatch"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps}: expected 0 or more steps")
        if not (in_flight in (None, "auto") or _counts(in_flight)):
            raise ValueError(
                f"in_flight={in_flight!r}: expected a number of microbatches, 1 or more, 'auto' "
                "or None"
            )
        if self.in_flight_bytes is not None and not _positive(self.in_flight_bytes):
            raise ValueError(
                f"in_flight_bytes={self.in_flight_bytes!r}: expected a positive number of bytes"
            )
        if self.ties not in (None, *_TIES):
            raise ValueError(f"ties={self.ties!r}: expected one of {', '.join(_TIES)}, or None")
        if self.ties == "together":
            self._check_together()
        if self.data not in _DATA:
            raise ValueError(f"data={self.data!r}: expected one of {', '.join(_DATA)}")
        for name in ("in_flight", "in_flight_bytes"):
            if getattr(self, name) is not None and self.schedule is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} with schedule={self.schedule!r}: torch's "
                    "schedules have their own depth; leave one of the two out"
                )
        if not (self.connections == "auto" or _counts(self.connections)):
            raise ValueError(
                f"connections={self.connections!r}: expected a whole number, 1 or more, or 'auto'"
            )
        if self.replicas == 1 and not (self.dp_comp is None and self.network is None):
            raise ValueError(
                f"dp_comp={self.dp_comp!r}, network={self.network!r} with replicas=1: there is "
                "nobody to exchange gradients with; leave them out, or pass replicas=2 and start "
                "twice as many processes"
            )
        if self.shard and self.replicas == 1:
            raise ValueError(
                "shard=True with replicas=1: there is nobody to share parameters with; pass "
                "replicas=2 and start twice as many processes"
            )
        if self.param_comp is not None and not self.shard:
            raise ValueError(
                f"param_comp={self.param_comp!r} without shard=True: replicas that have all "
                "parameters send none; leave it out, or shard them"
            )
        if not _positive(self.timeout):
            raise ValueError(f"timeout={self.timeout!r}: expected seconds, more than 0")
        if self.checks not in _CHECKS:
            raise ValueError(f"checks={self.checks!r}: expected one of {', '.join(_CHECKS)}")
        if self.engine not in (None, *_ENGINES):
            raise ValueError(
                f"engine={self.engine!r}: expected one of {', '.join(_ENGINES)}, or None"
            )

    @property
    def together(self) -> bool:
        """Whether both uses of a weight go to one rank, where the model's cut allows that."""
        return self.ties == "together" or (
            self.ties is None and self.tie_comp is None and self.schedule is None
        )

    @property
    def ends_first(self) -> bool:
        """Whether the last stage goes to the first rank in any case, for the sake of the data."""
        return self.data == "first" and self.together

    def _check_together(self) -> None:
        for name, why in {
            "tie_comp": "nothing is exchanged then",
            "schedule": "torch's schedules do not place the last stage on the first rank",
        }.items():
            if value := getattr(self, name):
                raise ValueError(
                    f"ties='together' with {name}={value!r}: {why}; leave one of the two out"
                )

    def check_data(self, cut: Sequence[staging.Stage]) -> None:
        """Checks that the first rank can be the only one with data.

        Raises:
            ValueError: another has the last stage.
        """
        v_shaped = schedule_named(self.schedule).v_shaped
        if self.data == "all" or len(cut) == 1 or cut[0].together or v_shaped:
            return
        apart = {"ties": self.ties, "tie_comp": self.tie_comp}
        given = {name: value for name, value in apart.items() if value}
        if self.schedule is not None:
            why = (
                f"schedule={self.schedule!r} places it on the last rank; leave schedule out, or "
                "take 'ZBVZeroBubble' or 'DualPipeV'"
            )
        elif given and not self.together:
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            why = f"with {shown} it is on the last rank; leave that out"
        else:
            why = f"{cut[0].why_apart}; or leave data out, and give every rank the batches"
        raise ValueError(
            "data='first', but the last stage, which needs targets, is not on the first rank: "
            + why
        )

    def compared(self) -> dict[str, Any]:
        """The fields that must be the same on all ranks, as words and numbers."""
        return {
            f.metadata["name"] or f.name: f.metadata["same"](getattr(self, f.name))
            for f in fields(self)
            if "same" in f.metadata
        }

    def loss_for(self, cut: Sequence[staging.Stage]) -> LossFn | None:
        """The loss function that is given, else the language models' or the model's own.

        Raises:
            ValueError: the own loss of a model of transformers is another than that.
        """
        if self.loss_fn is not None:
            return self.loss_fn
        if not cut[0].is_causal_lm:
            if cut[0].of_transformers and cut[0].own_loss is not None:
                check_head_loss(cut[0].original)
            return cut[0].own_loss
        check_own_loss(cut[0].original)
        return CausalLMLoss()


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < float("inf")
