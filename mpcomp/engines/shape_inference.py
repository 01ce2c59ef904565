"""Shapes and dtypes at each cut, found without running the model.

Fake tensors go through all stages: shapes, dtypes and memory order come out, nothing is computed,
and neither buffers nor generators notice. Both ends of a cut do this alike, so no shape ever
crosses the network. One plan serves every batch of the same shapes. A number or word in a batch may
decide on shapes, so another one runs the stages that take it again, and these alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import stages as staging
from mpcomp.core.checks import check_tensor
from mpcomp.core.context import TensorMeta
from mpcomp.core.microbatch import map_tensors
from mpcomp.core.side_effects import attributes_kept
from mpcomp.engines.outline import Told
from mpcomp.engines.stage_runner import Autocast, call

__all__ = ["Planner"]

#: Outputs of each stage that are remembered: the shapes of batches, and numbers in them.
_REMEMBERED: Final = 32
#: Runs without data after which torch forgets what it noted of each operation's arguments.
_RUNS: Final = 1024


class Planner:
    """Makes plans for one pipeline.

    Args:
        stages: all stages, also those of other ranks (whose tensors may be on "meta").
        device: of this rank; those of the others are taken to be of the same type.
    """

    def __init__(self, stages: Sequence[staging.Stage], device: torch.device) -> None:
        self._stages = list(stages)
        self._device = device
        #: Of a stage and what it is called with: what it gives; the last used at the end.
        self._known: OrderedDict[Any, TensorMeta] = OrderedDict()
        self._num_runs = 0

    def plan(self, microbatch: Any, autocast: Autocast) -> list[TensorMeta]:
        """The tensors that cross the cuts for this microbatch, in order.

        Raises:
            TypeError, ValueError: a stage's output cannot cross a cut.
            RuntimeError: a stage's forward depends on values, or failed.
        """
        if isinstance(microbatch, Told):
            return microbatch.metas
        training = tuple(stage.training for stage in self._stages)
        batch = value = _without_state(microbatch)
        given = _signature(batch)
        metas: list[TensorMeta] = []
        for i, stage in enumerate(self._stages[:-1]):
            beside = stage.takes(batch)
            key = i, given, _signature(beside) if beside else None, autocast, training
            if key not in self._known:
                self._known[key] = self._run(i, value, beside, autocast)
            self._known.move_to_end(key)
            value = given = self._known[key]
            metas.append(value)
        while len(self._known) > _REMEMBERED * len(metas):
            self._known.popitem(last=False)
        return metas

    def forget(self) -> None:
        """Drops all plans."""
        self._known.clear()

    def _run(self, i: int, value: Any, beside: Mapping[str, Any], autocast: Autocast) -> TensorMeta:
        """The output of a stage for a batch, or for what crosses the cut before it."""
        self._num_runs += 1
        if self._num_runs % _RUNS == 0:
            FakeTensorMode.cache_clear()
        stage = self._stages[i]
        fakes = FakeTensorMode(allow_non_fake_inputs=True)  # tensors that are plain attributes
        grouped: Any = _GroupedProducts()  # type: ignore[no-untyped-call]
        kept = attributes_kept(stage, self._device)  # a cache of positions would be fake
        with kept, fakes, grouped, _no_nested_tensors(), torch.no_grad(), autocast.enter():
            if isinstance(value, TensorMeta):
                # As it arrives: in memory order, whatever its strides were.
                flat = torch.empty(value.numel, dtype=value.dtype, device=self._device)
                value = value.unflatten(flat)
            else:
                value = map_tensors(value, self._fake)
            beside = map_tensors(beside, self._fake)
            try:
                output = call(_Fake(stage, self._state(stage)), value, beside)
            except (TypeError, ValueError):
                raise
            except Exception as error:
                raise RuntimeError(
                    f"{stage.name} cannot be run without data to find the shapes at its cut: "
                    f"{type(error).__name__}: {error}. Either the batch does not fit the "
                    "model, or its forward depends on the values of tensors, which it must not"
                ) from error
        check_tensor(output, f"boundary {i} act")
        return TensorMeta.of(output)

    def _state(self, stage: staging.Stage) -> dict[str, Tensor]:
        """Fake parameters and buffers by name; what is tied stays tied."""
        made: dict[int, Tensor] = {}
        return {
            name: made.setdefault(id(tensor), self._fake(tensor))
            for part in (stage.named_parameters, stage.named_buffers)
            for name, tensor in part(remove_duplicate=False)
        }

    def _fake(self, x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self._device)


@contextmanager
def _no_nested_tensors() -> Iterator[None]:
    """Plain tensors in encoders, whose fast path in evaluation drops padding by its values."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _GroupedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products of experts in any dtype: torch computes them, but knows bf16's shapes alone."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **kwargs)
        x, weight, *others = args
        return func(x.bfloat16(), weight.bfloat16(), *others, **kwargs).to(x.dtype)


class _Fake:
    """A stage on fake parameters and buffers."""

    def __init__(self, stage: staging.Stage, state: dict[str, Tensor]) -> None:
        self._stage = stage
        self._state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self._stage, self._state, args, kwargs)


def _without_state(batch: Any) -> Any:
    """The batch as far as shapes depend on it."""
    values = batch.values() if isinstance(batch, Mapping) else ()
    for value in values:
        if isinstance(value, staging.StageState):
            return value.shaping(batch)
    return batch


def _signature(value: Any) -> Any:
    """All of a microbatch that shapes depend on, hashable."""
    parts: list[Any] = []
    rest = map_tensors(value, lambda t: parts.append((tuple(t.shape), t.stride(), t.dtype)))
    return repr(rest), tuple(parts)
