"""A race to a loss: one small GPT, a block a stage, trained until its validation loss is reached.

The rules are those of the Protocol NanoGPT benchmark: what counts is the number of steps until the
loss on held-out text is at most a given one, and what each step sends. All entrants have the same
text, order and rate, which is constant after its warm-up, so that an entrant which needs longer
meets no schedule that has ended. The loss is read every few steps, with compression on and off, and
the better of the two counts, as a user can have either. One reading is up to 0.03 nats off for no
reason, so the mean of three is compared with the target, and interpolated between.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from tqdm import tqdm

import mpcomp
from mpcomp.engines.updates import StashedWeights, Updates, lag_of
from recipes.config import RunConfig, check_choice
from recipes.decoder import SIZES, Size, decoder, equal_stages, token_loss
from recipes.lab.rivals.learned_basis import LearnedBasisDecoder
from recipes.lab.rivals.subspace import SubspaceDecoder
from recipes.lab.rivals.wire import NUMBER_BYTES
from recipes.lab.study import Line
from recipes.optimizers import make_optimizer
from recipes.text import load_text
from recipes.tokens import TokenLoader, blocks_of, tokenizer_of

#: Readings of the loss that are taken together.
SMOOTHED: Final = 3
#: Inputs and targets, both [batch, time].
Batch: TypeAlias = tuple[Tensor, Tensor]


RIVALS: Final[Mapping[str, type[SubspaceDecoder | LearnedBasisDecoder]]] = {
    "subspace": SubspaceDecoder,
    "learned-basis": LearnedBasisDecoder,
}


@dataclass(frozen=True, kw_only=True)
class RaceConfig(RunConfig):
    """One entrant's race.

    Raises:
        ValueError: an option is out of range; the message names it, what is accepted, and the fix.
    """

    sample: ClassVar[str] = "sequence"
    data_options: ClassVar[tuple[str, ...]] = ("data", "model")
    at_least_1: ClassVar[tuple[str, ...]] = (
        *(*RunConfig.at_least_1, "max_steps", "read_every", "eval_blocks"),
    )

    rival: str | None = None  # a name in RIVALS and its rank ÷ the width, as in subspace:5/32
    tied: bool = False  # the head's weight is the embedding's
    unit: bool = False  # the tied embedding's output is N(0, 1), as without a tie
    model: str = "small"  # one of SIZES
    split: str = "8"
    epochs: int = 1
    batch_size: int = SIZES["small"].batch
    chunks: int = SIZES["small"].chunks
    optimizer: str = "adamw"
    lr: float = 2e-3
    weight_decay: float = 0.0
    clip: float | None = 1.0
    precision: str = "fp32"
    target: float  # loss in nats
    max_steps: int
    read_every: int = 25  # steps between two readings of the loss
    eval_blocks: int = 32
    rise: int = 50  # steps in which the rate rises

    def __post_init__(self) -> None:
        check_choice("model", self.model, tuple(SIZES))
        super().__post_init__()
        if self.read_every % self.updates or self.max_steps % self.updates:
            raise ValueError(
                f"updates is {self.updates}, read_every {self.read_every}, max_steps "
                f"{self.max_steps}; pass multiples of updates, as a call has so many steps"
            )

    @property
    def size(self) -> Size:
        """Sizes of the model and of a step."""
        return SIZES[self.model]


class RaceText(NamedTuple):
    """Text as batches: endless ones to train on, and those that the loss is read from."""

    loader: TokenLoader
    held_out: list[Batch]


def load(config: RaceConfig) -> RaceText:
    """The text of a race, in sequences of a token more than the context, on the CPU.

    Raises:
        ValueError: there is no such text.
    """
    size = config.size
    text = load_text(config.data)
    tokenizer = tokenizer_of(None, text.train, vocab_size=size.vocab)
    train, held_out = (
        blocks_of(articles, tokenizer, size.context + 1, keep_tail=False, limit=limit)
        for articles, limit in ((text.train, None), (text.validation, config.eval_blocks))
    )
    shared = TokenLoader(blocks=held_out, batch_size=size.batch)
    loader = TokenLoader(blocks=train, batch_size=size.batch)
    return RaceText(loader, [_batch_of(one["input_ids"]) for one in shared])


def _batch_of(tokens: Tensor) -> Batch:
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _on(device: torch.device, batch: Batch) -> Batch:
    x, y = batch
    return x.to(device), y.to(device)


def decoder_of(config: RaceConfig) -> nn.Sequential:
    """The plain model of all entrants but rivals."""
    size = config.size
    return decoder(
        num_blocks=size.num_blocks,
        width=size.width,
        num_heads=size.num_heads,
        vocab=size.vocab,
        context=size.context,
        seed=config.seed,
        tied=config.tied,
        scale=size.width**0.5 if config.unit else 1.0,
    )


class Entrant(ABC):
    """A model in training, and the account of what its cuts carry.

    Attributes:
        module: whose parameters are trained.
        num_cuts: between its stages.
        act_bytes: that crossed all cuts forward so far, in training.
        grad_bytes: and backward.
    """

    module: nn.Module
    num_cuts: int
    act_bytes: float
    grad_bytes: float

    @abstractmethod
    def train(self, batches: Sequence[Batch], update: Callable[[], None]) -> None:
        """Takes a step by each batch.

        Args:
            batches: of inputs and targets.
            update: changes the weights by gradients that have been clipped.
        """

    @abstractmethod
    def losses(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The loss on held-out batches, with compression on and off where that can be."""


class Piped(Entrant):
    """The plain decoder in a pipeline of the library."""

    def __init__(self, config: RaceConfig, device: torch.device) -> None:
        size = config.size
        self._clip, self._updates = config.clip, config.updates
        model = decoder_of(config)
        if config.tied:
            weight = model.get_parameter("0.token.weight")
            with torch.no_grad():  # logits of about 1, and tokens that positions do not drown
                weight.div_(weight.std() * size.width**0.5)
        self.module = self._pipe = mpcomp.pipeline(
            model,
            chunks=size.chunks * config.updates,
            split=equal_stages(size.num_blocks, size.num_blocks),
            devices=device,
            act_comp=config.act[0],
            grad_comp=config.grad[0],
            loss_fn=token_loss,
            seed=config.seed,
        )
        self.num_cuts = len(self._pipe.boundaries)

    def train(self, batches: Sequence[Batch], update: Callable[[], None]) -> None:
        if self._updates > 1:
            self._train_asynchronously(batches, update)
            return
        for x, y in batches:
            self._pipe.forward_backward(x, y)
            if self._clip is not None:
                mpcomp.clip_grad_norm_(self._pipe, self._clip)
            update()

    def _train_asynchronously(self, batches: Sequence[Batch], update: Callable[[], None]) -> None:
        def clipped() -> None:
            for stage in self._pipe.stages:  # none knows the norms of the others
                if self._clip is not None:
                    nn.utils.clip_grad_norm_(stage.parameters(), self._clip)
            update()

        x, y = (torch.cat(each) for each in zip(*batches, strict=True))
        self._pipe.forward_backward(x, y, update=clipped, updates=len(batches))

    def losses(self, batches: Sequence[Batch]) -> dict[str, float]:
        self._pipe.eval()
        found = {"on": float(self._pipe.evaluate(batches))}
        with self._pipe.uncompressed():
            found["off"] = float(self._pipe.evaluate(batches))
        self._pipe.train()
        return found

    @property
    def act_bytes(self) -> float:  # type: ignore[override]
        return self._sent(0)

    @property
    def grad_bytes(self) -> float:  # type: ignore[override]
        return self._sent(1)

    def _sent(self, direction: int) -> float:
        boundaries = self._pipe.boundaries
        return float(sum(one.links[direction].meter.train.wire_bytes for one in boundaries))


class Changed(Entrant):
    """A rival, which changes the model."""

    def __init__(self, config: RaceConfig, device: torch.device) -> None:
        assert config.rival is not None
        size = config.size
        name, share = config.rival.split(":")
        self._clip, self._updates = config.clip, config.updates
        self.module = self._model = RIVALS[name](
            num_blocks=size.num_blocks,
            width=size.width,
            rank=round(Fraction(share) * size.width),
            num_heads=size.num_heads,
            vocab=size.vocab,
            context=size.context,
            seed=config.seed,
        ).to(device)
        self.act_bytes = self.grad_bytes = 0.0
        self._num_stages = size.num_blocks
        self.num_cuts = size.num_blocks - 1
        self._stage_of = {name: self._stage(name) for name, _ in self._model.named_parameters()}

    def _stage(self, name: str) -> int:
        """The stage of a parameter: its block's, the first before them, and the last behind."""
        part, *rest = name.split(".")
        if part == "blocks":
            return int(rest[0])
        return self._num_stages - 1 if part == "head" else 0

    def train(self, batches: Sequence[Batch], update: Callable[[], None]) -> None:
        stashed = None
        if self._updates > 1:
            lags = {name: lag_of(of, self._num_stages) for name, of in self._stage_of.items()}
            updates = Updates(update, len(batches), microbatches=1)
            stashed = StashedWeights(self._model, updates, lags, kept=self._num_stages - 1)
        for i, (x, y) in enumerate(batches):
            model = self._model if stashed is None else stashed.stage_for(i)
            token_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            self._clip_gradients()
            sent = self.num_cuts * x.numel() * self._model.numbers_sent * NUMBER_BYTES
            self.act_bytes += sent
            self.grad_bytes += sent
            update()
            self._model.after_step()
            if stashed is not None:
                stashed.updated()

    def _clip_gradients(self) -> None:
        """By the norm of all, or of each stage, which knows no other's in asynchronous steps."""
        if self._clip is None:
            return
        parameters = dict(self._model.named_parameters())
        if self._updates == 1:
            nn.utils.clip_grad_norm_(parameters.values(), self._clip)
            return
        for stage in range(self._num_stages):
            own = [parameters[name] for name, of in self._stage_of.items() if of == stage]
            nn.utils.clip_grad_norm_(own, self._clip)

    @torch.no_grad()
    def losses(self, batches: Sequence[Batch]) -> dict[str, float]:
        return {"on": statistics.fmean(token_loss(self._model(x), y).item() for x, y in batches)}


def race(
    config: RaceConfig,
    text: RaceText,
    device: torch.device,
    make: Callable[[RaceConfig, torch.device], Entrant] | None = None,
) -> Line:
    """Trains until the target is reached, or for the most steps.

    Args:
        config: of one entrant.
        text: of all.
        device: of all stages.
        make: makes the entrant; None for the one that the configuration names.

    Returns:
        The line of a results file: ``steps`` to the target, None where it was not reached; the
        readings; and bits that an element took, each way.
    """
    start = time.perf_counter()
    entrant = (make or (Piped if config.rival is None else Changed))(config, device)
    optimizer = _optimizer(config, entrant.module)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / config.rise)
    )

    def update() -> None:
        optimizer.step()
        rate.step()
        optimizer.zero_grad()

    readings: list[dict[str, float]] = []
    batches = (_on(device, batch) for batch in _batches(text.loader, config.seed))
    held_out = [_on(device, batch) for batch in text.held_out]
    calls = range(config.updates, config.max_steps + 1, config.updates)
    for step in tqdm(calls, unit="call", leave=False, disable=None):
        entrant.train(list(itertools.islice(batches, config.updates)), update)
        if step % config.read_every == 0 or step == config.max_steps:
            readings.append({"step": step, **entrant.losses(held_out)})
            if smoothed(readings)[-1][1] <= config.target:
                break
    size = config.size
    elements = step * entrant.num_cuts * size.chunks * size.message_elements
    return {
        "steps": steps_to(config.target, readings),
        "trained_steps": step,
        "readings": readings,
        "act_bits": 8 * entrant.act_bytes / elements,
        "grad_bits": 8 * entrant.grad_bytes / elements,
        "wire_bytes": entrant.act_bytes + entrant.grad_bytes,
        "dense_bytes": 2 * 4 * elements,
        "seconds": time.perf_counter() - start,
        "rival": config.rival,
        "act": config.act[0],
        "grad": config.grad[0],
        "updates": config.updates,
        "tied": config.tied,
    }


def _optimizer(config: RaceConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer; with updates within a call NAdam, as Ajanthan et al. 2025 have it."""
    if config.updates > 1:
        config = dataclasses.replace(config, optimizer="nadam")
    return make_optimizer(config, model)


def _batches(loader: TokenLoader, seed: int) -> Iterator[Batch]:
    shuffled = TokenLoader(blocks=loader.blocks, batch_size=loader.batch_size, seed=seed)
    for epoch in itertools.count():
        for batch, _, _ in shuffled.epoch(epoch):
            yield _batch_of(batch["input_ids"])


def smoothed(readings: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """Steps and loss, on or off, whichever is less: means of up to `SMOOTHED` last readings."""
    best = [min(reading["on"], reading.get("off", reading["on"])) for reading in readings]
    return [
        (reading["step"], statistics.fmean(best[max(0, i + 1 - SMOOTHED) : i + 1]))
        for i, reading in enumerate(readings)
    ]


def steps_to(target: float, readings: Sequence[Mapping[str, float]]) -> float | None:
    """Steps until the smoothed loss was at most ``target``; None if it never was."""
    points = smoothed(readings)
    if points and points[0][1] <= target:
        return points[0][0]
    for (before, high), (after, low) in itertools.pairwise(points):
        if low <= target:
            return before + (high - target) / (high - low) * (after - before)
    return None
