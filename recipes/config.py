"""The options of every training run: one frozen value, checked when made, kept in the run folder.

And what is drawn from its seed: a generator of its own for each purpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import torch

import mpcomp
from mpcomp.data_parallel.methods import param_comp_of, replica_method_of
from mpcomp.engines.schedules import schedule_named
from mpcomp.links.build import method_of

PRECISIONS: Final = ("fp32", "bf16", "fp16", "auto")
OPTIMIZERS: Final = ("sgd", "adamw", "nadam", "lars", "lamb", "muon")
WITH_MOMENTUM: Final = ("sgd", "lars")
#: What gradients too small to be compressed can be rounded to.
SMALL: Final = ("none", "bf16", "fp16")
#: Options with several values.
LISTS: Final = ("act", "grad", "lr_milestones")

AnyConfig = TypeVar("AnyConfig", bound="RunConfig")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run, as far as it is the same for images and for text.

    Each recipe derives its own, with defaults where there are none here.

    Raises:
        ValueError: an option is out of range; the message names it, what is accepted, and the fix.
    """

    sample: ClassVar[str]  # what a batch has several of, in words
    data_options: ClassVar[tuple[str, ...]]  # those that decide which data it needs
    at_least_0: ClassVar[tuple[str, ...]] = (
        "warmup_steps",
        "warmup_epochs",
        "lr_warmup_epochs",
        "momentum",
        "weight_decay",
        "seed",
    )
    at_least_1: ClassVar[tuple[str, ...]] = (
        *("chunks", "epochs", "eval_every", "batch_size", "threads", "train_limit", "replicas"),
        "base_batch",
        *("save_every_steps", "keep", "connections", "updates"),
    )

    data: str
    model: str
    split: str  # "paper", a number of stages, block counts "3,2,2,3", or block names
    chunks: int = 4  # microbatches of one batch
    act: tuple[str, ...] = ("topk:0.1",)  # one spec for all boundaries, or one for each
    grad: tuple[str, ...] = ("topk:0.1",)
    budget: str | None = None  # of quality, which steps of words in act and grad follow
    warmup_steps: int = 0  # steps without compression; excludes warmup_epochs
    warmup_epochs: int = 0
    epochs: int
    eval_every: int = 1  # epochs; the last epoch is always evaluated
    batch_size: int  # of all replicas together
    updates: int = 1  # steps in a call of the pipeline, which does not drain between them
    optimizer: str  # one of OPTIMIZERS
    lr: float
    base_batch: int | None = None  # that `lr` is for: it grows as the batch of a step does
    lr_warmup_epochs: int = 0  # in which the rate rises
    lr_milestones: tuple[int, ...] = ()  # epochs after which the rate is `lr_factor` times what
    lr_factor: float = 0.1  # it was, in place of a recipe's own schedule
    momentum: float = 0.9  # of sgd and lars
    nesterov: bool = False
    weight_decay: float
    clip: float | None = None  # largest global gradient norm; with updates, that of each stage
    precision: str  # "auto": bf16 where the device computes in it
    recompute: bool = False
    device: str = "auto"  # one for all stages, or one for each: "cuda:0,cuda:1"
    threads: int | None = None  # of torch on CPU; None leaves them
    train_limit: int | None = None
    seed: int = 0
    save_every_steps: int | None = None  # of the optimizer, beside the end of each epoch
    save_every_minutes: float | None = None
    keep: int = 1  # checkpoints
    # Of several processes, under torchrun:
    replicas: int = 1  # copies of the pipeline, each with its part of every batch
    dp_comp: str = "none"  # what compresses their gradients
    dp_path: str = "auto"  # of gradients: one of PATHS
    dp_small: str = "none"  # of gradients too small to compress: one of SMALL
    per_machine: int = 1  # replicas on a machine, which average their gradients first
    shard: bool = False  # replicas share parameters and the optimizer's state (ZeRO, FSDP2)
    param_comp: str = "none"  # what compresses the parameters that they gather then
    schedule: str | None = None  # one of torch's; None is the engine's own
    in_flight: int | str | None = None  # depth of the engine's own, or "auto"
    connections: int = 1  # between the ranks of a cut, each way
    mbps: float | None = None  # Mbit/s of simulated links between ranks; None leaves links alone
    timeout: float = 300.0  # seconds that a rank waits for another

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, PRECISIONS)
        for name in self.at_least_1:
            check_at_least(name, getattr(self, name), 1)
        for name in self.at_least_0:
            check_at_least(name, getattr(self, name), 0)
        for name in ("lr", "clip", "timeout", "save_every_minutes", "mbps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; pass a number above 0")
        if self.warmup_steps and self.warmup_epochs:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and warmup_epochs is {self.warmup_epochs}; "
                "pass one of the two"
            )
        self._check_batch()
        self._check_optimizer()
        schedule_named(self.schedule)
        if isinstance(self.in_flight, str) and self.in_flight != "auto":
            raise ValueError(
                f"in_flight is {self.in_flight!r}; pass a number of microbatches, or auto"
            )
        if isinstance(self.in_flight, int):
            check_at_least("in_flight", self.in_flight, 1)
        if not self.act or not self.grad:
            raise ValueError(
                "act and grad need at least one spec each; pass none for no compression"
            )
        for argument, specs in (("act_comp", self.act), ("grad_comp", self.grad)):
            for spec in specs:
                method_of(argument, spec)  # fails here, before any work, with the nearest name
        self._check_replicas()
        self._check_updates()
        if self.mbps is not None and self.replicas > 1:
            raise ValueError(
                f"mbps is {self.mbps:g}, replicas is {self.replicas}; links are simulated between "
                "stages, and those of replicas would stay fast, so drop one of the two"
            )

    def _check_updates(self) -> None:
        """Raises ValueError for what cannot be where weights change within a call."""
        if self.updates == 1:
            return
        for name, value, accepted in (
            ("replicas", self.replicas, 1),
            ("schedule", self.schedule, None),
        ):
            if value != accepted:
                raise ValueError(
                    f"updates is {self.updates}, {name} is {value}; weights that change within a "
                    f"call do not go with {name}, so drop one of the two"
                )
        if self.precision == "fp16":
            raise ValueError(
                f"updates is {self.updates}, precision is fp16, whose loss scaler skips a call as "
                "a whole; pass --precision bf16 or fp32"
            )
        for name in ("warmup_steps", "save_every_steps"):
            if (getattr(self, name) or 0) % self.updates:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, updates is {self.updates}; a call has so "
                    f"many steps, so pass a multiple of {self.updates}"
                )

    def _check_replicas(self) -> None:
        """Raises ValueError for compression between replicas that cannot be."""
        replica_method_of(self.dp_comp)  # fails here, before any work
        self.network()
        if self.dp_comp != "none" and self.replicas == 1:
            raise ValueError(
                f"dp_comp is {self.dp_comp}, replicas is 1; there is nobody to exchange gradients "
                "with, so pass --replicas 2 or more, with as many processes"
            )
        if self.dp_small != "none" and self.dp_comp == "none":
            raise ValueError(
                f"dp_small is {self.dp_small}, dp_comp is none; nothing is compressed, so pass "
                f"--dp-comp {self.dp_small} to round all gradients"
            )
        if self.shard and self.replicas == 1:
            raise ValueError(
                "shard is set, replicas is 1; there is nobody to share parameters with, so pass "
                "--replicas 2 or more, with as many processes"
            )
        if param_comp_of(self.param_comp) != mpcomp.Identity() and not self.shard:
            raise ValueError(
                f"param_comp is {self.param_comp}, shard is not set; replicas that have all "
                "parameters send none, so pass --shard as well"
            )
        if self.replica_momentum and (self.optimizer != "sgd" or self.momentum):
            raise ValueError(
                f"dp_comp is {self.dp_comp}, optimizer is {self.optimizer}, momentum is "
                f"{self.momentum}; this method has the momentum itself, on each replica, so pass "
                "--optimizer sgd --momentum 0 (and its own as in dgc:0.001:momentum=0.9)"
            )

    def network(self) -> mpcomp.ReplicaNetwork:
        """Connection of replicas."""
        check_choice("dp_small", self.dp_small, SMALL)
        small = None if self.dp_small == "none" else mpcomp.Cast(self.dp_small)
        return mpcomp.ReplicaNetwork(path=self.dp_path, per_machine=self.per_machine, small=small)

    def _check_batch(self) -> None:
        """Raises ValueError if a batch cannot be shared by the replicas and their microbatches."""
        share, rest = divmod(self.batch_size, self.replicas)
        if rest:
            raise ValueError(
                f"batch_size is {self.batch_size}, replicas is {self.replicas}; each replica gets "
                f"an equal part of a batch, so pass a multiple of {self.replicas}"
            )
        if self.chunks > share:
            whose = "" if self.replicas == 1 else f", {share} for each of {self.replicas} replicas"
            raise ValueError(
                f"chunks is {self.chunks}, batch_size is {self.batch_size}{whose}; a microbatch "
                f"holds at least one {self.sample}, so pass at most as many chunks as the batch "
                f"has {self.sample}s"
            )

    def _check_optimizer(self) -> None:
        """Raises ValueError for what the optimizer cannot do, or a warm-up that never ends."""
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        if not self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; pass at least 0 and less than 1")
        if self.nesterov and not (self.optimizer in WITH_MOMENTUM and self.momentum):
            raise ValueError(
                f"nesterov is set, optimizer is {self.optimizer}, momentum is {self.momentum}; "
                f"leave it out, or pass {' or '.join(WITH_MOMENTUM)} and a momentum above 0"
            )
        if self.lr_warmup_epochs >= self.epochs:
            raise ValueError(
                f"lr_warmup_epochs is {self.lr_warmup_epochs}, epochs is {self.epochs}; pass fewer "
                "epochs of warm-up than of training"
            )
        if not 0 < self.lr_factor <= 1:
            raise ValueError(f"lr_factor is {self.lr_factor}; pass more than 0 and at most 1")
        bounds = (max(1, self.lr_warmup_epochs), *self.lr_milestones, self.epochs)
        ascending = all(one < later for one, later in pairwise(bounds[1:]))
        if self.lr_milestones and not (bounds[0] <= bounds[1] and ascending):
            raise ValueError(
                f"lr_milestones is {' '.join(map(str, self.lr_milestones))}, epochs is "
                f"{self.epochs}, lr_warmup_epochs is {self.lr_warmup_epochs}; pass numbers of "
                "epochs that rise, none before the end of the warm-up and all before that of the "
                "training"
            )

    @property
    def step_batch(self) -> int:
        """Number of samples that a step of the optimizer sees."""
        return self.batch_size

    @property
    def call_batch(self) -> int:
        """Number of samples in a call of the pipeline."""
        return self.batch_size * self.updates

    @property
    def call_chunks(self) -> int:
        """Number of microbatches in a call of the pipeline."""
        return self.chunks * self.updates

    @property
    def peak_lr(self) -> float:
        """The highest learning rate, by the linear scaling rule (Goyal et al. 2017)."""
        if self.base_batch is None:
            return self.lr
        return self.lr * self.step_batch / self.base_batch

    @property
    def replica_momentum(self) -> float:
        """The momentum of a method that has it on each replica; 0 of others."""
        return replica_method_of(self.dp_comp).own_momentum

    @property
    def optimizer_decay(self) -> float:
        """The optimizer's weight decay, for the effect that `weight_decay` has under momentum.

        Momentum SGD has the decay in its velocity, which makes 1 / (1 - momentum) of it in the long
        run. Where replicas have the momentum the optimizer has none, and gets that much more.
        """
        return self.weight_decay / (1 - self.replica_momentum)

    @property
    def label(self) -> str:
        """Name of the run in plots and tables: ``act / grad``, or once where both are the same."""
        act, grad = " ".join(self.act), " ".join(self.grad)
        cuts = act if act == grad else f"act {act} / grad {grad}"
        if self.dp_comp == self.param_comp == "none":
            return "uncompressed" if cuts == "none" else cuts
        replicas = f"replicas {self.dp_comp}"
        if self.param_comp != "none":
            replicas += f", parameters {self.param_comp}"
        return replicas if cuts == "none" else f"{cuts} / {replicas}"

    def uncompressed(self: AnyConfig) -> AnyConfig:
        """The same training without compression, to compare with."""
        nothing: dict[str, Any] = {"act": ("none",), "grad": ("none",), "dp_comp": "none"}
        nothing |= {"dp_small": "none", "param_comp": "none"}
        nothing |= {"budget": None, "warmup_steps": 0, "warmup_epochs": 0}
        return dataclasses.replace(self, **nothing)

    def compared_to(self: AnyConfig, spec: str) -> AnyConfig:
        """The same training with this at all cuts, and nothing else compressed."""
        return dataclasses.replace(self.uncompressed(), act=(spec,), grad=(spec,))

    def check_fills_call(self, num_samples: int) -> None:
        """Raises ValueError if the training data have too few samples for one call."""
        if self.updates > 1 and num_samples < self.call_batch:
            raise ValueError(
                f"batch_size is {self.batch_size}, updates is {self.updates}; a call takes "
                f"{self.call_batch} {self.sample}s, and there are {num_samples} to train on, so "
                "pass a smaller --batch-size or --updates"
            )

    def extended(self: AnyConfig, epochs: int) -> AnyConfig:
        """The same run, going on for longer.

        Raises:
            ValueError: that is no longer.
        """
        if epochs < self.epochs:
            raise ValueError(
                f"epochs is {epochs}, and the run is of {self.epochs}; pass more to go on for "
                "longer, or --stop-after to end earlier"
            )
        return dataclasses.replace(self, epochs=epochs)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls: type[AnyConfig], values: Mapping[str, Any]) -> AnyConfig:
        """A configuration as it was written by `to_json`."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"the configuration has unknown options {unknown}; known are {sorted(known)}; "
                "it was written by another version, start the run anew"
            )
        lists = {key: tuple(values[key]) for key in LISTS if key in values}
        return cls(**{**values, **lists})


def check_choice(name: str, value: str, accepted: tuple[str, ...]) -> None:
    """Raises ValueError for what is not accepted."""
    if value not in accepted:
        raise ValueError(f"{name} is {value!r}; pass one of {', '.join(accepted)}")


def check_rate_chosen(default: str, chosen: Mapping[str, Any]) -> None:
    """Raises ValueError for another optimizer than the default one, but at that one's rate."""
    if chosen.get("optimizer", default) != default and "lr" not in chosen:
        raise ValueError(
            f"optimizer is {chosen['optimizer']!r}, and lr is not given; pass both: the default "
            f"rate is for {default}"
        )


def check_at_least(name: str, value: float | None, least: float) -> None:
    """Raises ValueError for a number that is too small, or none."""
    if value is not None and not value >= least:
        raise ValueError(f"{name} is {value}; pass at least {least}")


def seeded(*key: int) -> torch.Generator:
    """A generator of its own for each key, unrelated for neighbouring keys."""
    # SeedSequence counts trailing zeros as absent; the length keeps (1,) and (1, 0) apart.
    state = np.random.SeedSequence([len(key), *key]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))
