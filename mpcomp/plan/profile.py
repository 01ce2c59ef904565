"""The profile of a model: what its blocks compute, hold and hand on, for one microbatch.

Blocks of one structure that get inputs of one shape take the same time, so each kind is measured
once: a GPT-2 of 48 blocks costs what one of 3 does, and a model on the meta device, which fits no
memory here, is measured all the same, as only one block of each kind is ever made.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mpcomp.core.context import TensorMeta
from mpcomp.core.microbatch import map_tensors
from mpcomp.core.side_effects import attributes_kept
from mpcomp.plan.prediction import Compute
from mpcomp.plan.timing import Run, Settle, timed, typical
from stages.balance import partition
from stages.blocks import (
    Block,
    arguments,
    line_of,
    one_tensor,
    random_state_kept,
    side_inputs,
    units_of,
)
from stages.sharing import shared_parameters
from stages.stage import Stage
from stages.together import second_use

__all__ = ["BlockProfile", "CutTensors", "Profile", "count_profile", "measure_profile"]

#: Floating-point operations of a backward, to those of its forward: one product of each for the
#: gradient of the input, one for that of the weight.
BACKWARD_OVER_FORWARD = 2.0
#: Passes before the clock.
_WARMUPS = 1


class CutTensors(NamedTuple):
    """An activation and its gradient, [rows, ...]: one microbatch's, over a cut."""

    activation: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class BlockProfile:
    """One block.

    Attributes:
        name: of its last module.
        compute: of one microbatch.
        parameters: of each of its parameters the shape, by its name in the model.
        output: of one microbatch, which crosses a cut behind it.
    """

    name: str
    compute: Compute
    parameters: Mapping[str, TensorMeta]
    output: TensorMeta

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters."""
        return sum(meta.numel for meta in self.parameters.values())


class Tie(NamedTuple):
    """A parameter that two blocks share.

    Attributes:
        first: number of the first block.
        last: number of the last one.
        meta: of the parameter; [1, n] of one that has no rows.
        by_token: whether the first block's gradient has rows of the batch's tokens only.
    """

    first: int
    last: int
    meta: TensorMeta
    by_token: bool = False


@dataclass(frozen=True)
class Profile:
    """The blocks of a model.

    Attributes:
        blocks: in order.
        samples: of every shape that can cross a cut, tensors that do.
        ties: the parameters that two blocks share, each with one of its own.
        again: the block from which on they are a last stage on the first host, where a weight of
            the first is used again (`stages.split`, ``together``) and not held; None where none is.
        num_counted: blocks that block counts add up to: not the head that a last block was cut
            from for ``again``; None for all.
    """

    blocks: tuple[BlockProfile, ...]
    samples: Mapping[TensorMeta, CutTensors]
    ties: tuple[Tie, ...] = ()
    again: int | None = None
    num_counted: int | None = None

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters; one that two blocks share counts once."""
        shared = sum(tie.meta.numel for tie in self.ties)
        return sum(block.num_parameters for block in self.blocks) - shared

    @property
    def num_blocks(self) -> int:
        """Blocks that block counts add up to, as of `stages.blocks`."""
        return len(self.blocks) if self.num_counted is None else self.num_counted

    def stages(self, counts: Sequence[int]) -> list[slice]:
        """The blocks of each stage; of one more at the end, if there is ``again``.

        Args:
            counts: of blocks, as `stages.split` takes them.

        Raises:
            ValueError: the counts do not add up to the blocks, or leave a stage none.
        """
        if sum(counts) != self.num_blocks:
            raise ValueError(
                f"block counts {list(counts)} add up to {sum(counts)}, but the model has "
                f"{self.num_blocks} blocks"
            )
        ends = [0, *itertools.accumulate(counts)]
        if self.again is not None:
            if ends[-2] >= self.again:
                raise ValueError(
                    f"block counts {list(counts)} leave no block between the last cut and the "
                    f"second use of the first one's weight, in {self.blocks[self.again].name!r}; "
                    "cut earlier"
                )
            ends[-1:] = [self.again, len(self.blocks)]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def balanced(
        self,
        num_hosts: int,
        seconds: Sequence[Sequence[float]],
        *,
        slack: float = 0.0,
        prices: Sequence[float] | None = None,
    ) -> list[int]:
        """Block counts for so many hosts, as `stages.partition` finds them.

        Args:
            num_hosts: each has one stage, and the first what is from ``again`` on.
            seconds: of each host for each block.
            slack: as there.
            prices: of a cut after each block.
        """
        if self.again is None:
            return partition(seconds, num_hosts, slack=slack, prices=prices)
        own = [[each[0] + sum(each[self.again :]), *each[1 : self.again]] for each in seconds]
        prices = None if prices is None else prices[: self.again]
        *others, last = partition(own, num_hosts, slack=slack, prices=prices)
        return [*others, last + self.num_blocks - self.again]


def measure_profile(
    model: nn.Module,
    sample: Any,
    loss: Callable[[Tensor], Tensor],
    *,
    autocast: torch.dtype | None = None,
    repeats: int = 3,
    settle: Settle = typical,
    together: bool = False,
) -> Profile:
    """Runs every kind of block here, forward and backward.

    The model stays as it is. Blocks on the meta device are made with random weights, one of a kind
    at a time.

    Args:
        model: any that `stages.split` can cut; trained weights give true messages.
        sample: a microbatch (tensor, tuple of arguments or mapping of keywords).
        loss: of the last block's output, 0-d.
        autocast: the dtype that is computed in; None for that of the weights.
        repeats: that are measured.
        settle: what repeats of one kind of block stand for; by default their median.
        together: whether both uses of a weight are to be on one host, as of `stages.split`.

    Raises:
        ValueError: the model cannot be cut, or repeats is below 1.
        TypeError: a block gives something else than one tensor.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}: pass at least 1")
    with random_state_kept(), torch.enable_grad():
        laid_out = _LaidOut.of(model, together)
        walk = _Walk(laid_out.units, sample, loss, autocast)
        for _ in range(_WARMUPS + repeats):
            walk.forward()
            walk.backward()
        return laid_out.profile(model, *walk.measured(settle, skip=_WARMUPS))


class _LaidOut(NamedTuple):
    """A model's blocks, and what a profile says of them; attributes as there."""

    units: list[Block]
    again: int | None
    num_counted: int

    @classmethod
    def of(cls, model: nn.Module, together: bool) -> _LaidOut:
        line = line_of(model)
        place = second_use(model, line) if together else None
        again = None if place is None else 1 + sum(own < place for own in line.places)
        units = units_of(model, line, with_head=place is not None)
        return cls(units, again, len(line.units))

    def profile(
        self,
        model: nn.Module,
        found: list[BlockProfile],
        samples: Mapping[TensorMeta, CutTensors],
    ) -> Profile:
        ties = []
        for tie, names in _ties(model, self.units):
            if self.again is None:
                ties.append(tie)
                continue
            user = found[tie.last]
            own = {name: meta for name, meta in user.parameters.items() if name not in names}
            found[tie.last] = replace(user, parameters=own)
        return Profile(tuple(found), samples, tuple(ties), self.again, self.num_counted)


class _Walk:
    """A model's blocks, one after the other, forward and back; repeated kinds only once."""

    def __init__(
        self,
        units: Sequence[Block],
        sample: Any,
        loss: Callable[[Tensor], Tensor],
        autocast: torch.dtype | None,
    ) -> None:
        self._units, self._sample, self._loss, self._autocast = units, sample, loss, autocast
        self._outputs: list[Tensor] = []
        self._gradients: list[Tensor | None] = [None] * len(units)
        #: Of each block the first of its kind, once its input is known.
        self._kinds: list[int] = []
        self._modules: dict[int, nn.Module] = {}
        self._open: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._times: dict[int, tuple[list[Run], list[Run]]] = {}

    def forward(self) -> None:
        first_time = not self._kinds
        found: dict[Any, int] = {}
        for i, unit in enumerate(self._units):
            args, kwargs = self._inputs(i)
            if first_time:
                # The last one has the loss to compute as well.
                last = i == len(self._units) - 1
                kind = found.setdefault((_kind(unit, args), last), i)
                self._kinds.append(kind)
                if kind == i:
                    self._modules[i] = _runnable(unit.module)
                    self._times[i] = ([], [])
                self._outputs.append(self._first(i, unit, args, kwargs))
            elif self._kinds[i] == i:
                self._timed_forward(i, unit, args, kwargs)

    def backward(self) -> None:
        gradient: Tensor | None = None
        for i in reversed(range(len(self._units))):
            self._gradients[i] = gradient
            if self._kinds[i] != i:
                continue  # the next one's gradient has the shape of its own, and about its size
            x, out = self._open.pop(i)
            _, run = timed(torch.autograd.backward, out, gradient)
            self._times[i][1].append(run)
            gradient = None if x is None else x.grad

    def measured(
        self, settle: Settle, skip: int
    ) -> tuple[list[BlockProfile], dict[TensorMeta, CutTensors]]:
        measured = {
            i: Compute(*(settle(times[skip:]) for times in both)) for i, both in self._times.items()
        }
        found = [
            BlockProfile(
                unit.name, measured[self._kinds[i]], _parameters(unit), TensorMeta.of(output)
            )
            for i, (unit, output) in enumerate(zip(self._units, self._outputs, strict=True))
        ]
        # Of the middle of the model rather than of its beginning, where there are several.
        samples: dict[TensorMeta, CutTensors] = {}
        middle = len(found) / 2
        for i in sorted(range(len(found) - 1), key=lambda i: abs(i + 1 - middle)):
            gradient = self._gradients[i]
            if gradient is not None:
                samples.setdefault(found[i].output, CutTensors(self._outputs[i], gradient))
        return found, samples

    def _inputs(self, i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if i == 0:
            return arguments(self._sample)
        return (self._outputs[i - 1],), side_inputs(self._units[i], self._sample)

    def _first(self, i: int, unit: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The output of a block; of one like an earlier one that is on "meta", that one's."""
        kind = self._kinds[i]
        if kind == i:
            return self._timed_forward(i, unit, args, kwargs)
        if any(p.is_meta for p in unit.module.parameters()):
            return self._outputs[kind]
        with torch.no_grad(), self._casting():
            return one_tensor(unit, copy.deepcopy(unit.module).train()(*args, **kwargs))

    def _timed_forward(
        self, i: int, unit: Block, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        module = self._modules[i]
        x = None
        if i:
            # As a stage receives it: a leaf; and an in-place block may write to what it is given.
            x = args[0].detach().clone().requires_grad_()
            args = (x.mul(1),)
        module.zero_grad()

        def compute() -> tuple[Tensor, Tensor]:
            with self._casting():
                out = one_tensor(unit, module(*args, **kwargs))
            return out, self._loss(out) if i == len(self._units) - 1 else out

        (out, end), run = timed(compute)
        self._times[i][0].append(run)
        self._open[i] = (x, end)
        return out.detach()

    def _casting(self) -> torch.autocast:
        parameters = (p for module in self._modules.values() for p in module.parameters())
        device = next((p.device.type for p in parameters), "cpu")
        dtype = self._autocast
        return torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def count_profile(
    model: nn.Module, sample: Any, *, flops_per_s: float, together: bool = False
) -> Profile:
    """Counts every block's operations, for a machine of a given speed that is not here.

    Nothing is computed, and the model may be on the meta device. What crosses the cuts is Gaussian.

    Args:
        model: any that `stages.split` can cut.
        sample: a microbatch; only its shapes matter.
        flops_per_s: floating-point operations a second that the machine reaches in training.
        together: whether both uses of a weight are to be on one host, as of `stages.split`.

    Raises:
        ValueError: the model cannot be cut, or a speed that is not above 0.
        TypeError: a block gives something else than one tensor.
    """
    if not flops_per_s > 0:
        raise ValueError(f"flops_per_s is {flops_per_s}: pass a number above 0")
    laid_out = _LaidOut.of(model, together)
    units = laid_out.units
    found: list[BlockProfile] = []
    seen: dict[Any, tuple[Compute, Tensor]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        sample = map_tensors(sample, _fake)
        args, kwargs = arguments(sample)
        for i, unit in enumerate(units):
            if i:
                kwargs = side_inputs(unit, sample)
            kind = _kind(unit, args)
            if kind not in seen:
                tensors = (*unit.module.named_parameters(), *unit.module.named_buffers())
                state = {name: _fake(tensor) for name, tensor in tensors}
                call = functools.partial(torch.func.functional_call, unit.module, state)
                kept = attributes_kept(unit.module, torch.device("cpu"))
                # The counter knows no fused attention of CPUs, but the products that it stands for.
                fused = sdpa_kernel(SDPBackend.MATH)
                with kept, fused, FlopCounterMode(display=False) as counter:
                    out = one_tensor(unit, call(args, kwargs))
                seconds = counter.get_total_flops() / flops_per_s
                seen[kind] = Compute(seconds, BACKWARD_OVER_FORWARD * seconds), out
            compute, out = seen[kind]
            found.append(BlockProfile(unit.name, compute, _parameters(unit), TensorMeta.of(out)))
            args = (out,)
    generator = torch.Generator().manual_seed(0)
    samples = {
        meta: CutTensors(*(_gaussian(meta, generator) for _ in range(2)))
        for meta in dict.fromkeys(block.output for block in found[:-1])
    }
    return laid_out.profile(model, found, samples)


def _ties(model: nn.Module, units: Sequence[Block]) -> Iterator[tuple[Tie, tuple[str, ...]]]:
    """The parameters that several blocks share, with their names."""
    for names in shared_parameters(model):
        users = [
            i
            for i, unit in enumerate(units)
            if set(names) & dict(_named(unit, remove_duplicate=False)).keys()
        ]
        if len(users) > 1:
            parameter = model.get_parameter(names[0])
            shape = parameter.shape if parameter.dim() > 1 else (1, parameter.numel())
            meta = TensorMeta(tuple(shape), parameter.dtype)
            yield Tie(users[0], users[-1], meta, _embeds(units[users[0]], names)), names


def _embeds(unit: Block, names: Sequence[str]) -> bool:
    """Whether a block looks tokens up in the parameter of these names."""
    own = [p for name, p in _named(unit, remove_duplicate=False) if name in names]
    embeddings = (m for m in unit.module.modules() if isinstance(m, nn.Embedding))
    return any(embedding.weight is p for embedding in embeddings for p in own)


def _named(unit: Block, *, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a block under the model's names."""
    own = "" if isinstance(unit.module, Stage) else f"{unit.name}."
    named = unit.module.named_parameters(remove_duplicate=remove_duplicate)
    return ((own + name, p) for name, p in named)


def _gaussian(meta: TensorMeta, generator: torch.Generator) -> Tensor:
    return meta.unflatten(torch.randn(meta.numel, generator=generator).to(meta.dtype))


def _fake(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


def _kind(unit: Block, args: Sequence[Any]) -> Any:
    """All that a block's time depends on, hashable: structure, settings, and shape of its input."""
    inputs = [(tuple(x.shape), x.dtype) for x in args if isinstance(x, Tensor)]
    modules = [m for m in unit.module.modules() if not isinstance(m, Stage)]  # says its number
    parts = [(type(m).__name__, m.extra_repr()) for m in modules]
    shapes = [tuple(p.shape) for p in (*unit.module.parameters(), *unit.module.buffers())]
    return tuple(inputs), tuple(parts), tuple(shapes)


def _parameters(unit: Block) -> dict[str, TensorMeta]:
    return {name: TensorMeta.of(p) for name, p in _named(unit, remove_duplicate=True)}


def _runnable(module: nn.Module) -> nn.Module:
    """A copy in training: gradients, BatchNorm's statistics and flags of the model stay."""
    own = copy.deepcopy(module).train()
    if not any(p.is_meta for p in own.parameters()):
        return own
    own = own.to_empty(device="cpu")
    for part in own.modules():
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            _fill(tensor)
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
    return own


def _fill(tensor: Tensor) -> None:
    """Numbers as new models have them; matrices small, as sums over them stay of order 1."""
    with torch.no_grad():
        if not tensor.is_floating_point():
            tensor.fill_(1)
        elif tensor.dim() < 2:
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=0.02)
