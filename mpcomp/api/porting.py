"""Lines of a plain training loop that have another meaning here, each refused with its cure."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mpcomp.core.microbatch import map_tensors
from mpcomp.links.tied_weights import Tie

__all__ = [
    "WRAPPED",
    "DifferentiatedLoss",
    "check_differentiable",
    "check_function",
    "check_no_graph",
    "check_trainable",
    "refuses_unpacked",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_DONE = (
    "forward_backward has done the backward pass, and its loss is a number: gradients are in "
    ".grad. Leave out .backward() or torch.autograd.grad, and go on with optimizer.step(). Leave "
    "out scaler.scale too, and pass mpcomp.pipeline(..., scaler=scaler)"
)
#: What is wrong with DistributedDataParallel round a pipeline, and what to do.
WRAPPED = (
    "a pipeline in DistributedDataParallel, which accelerate's prepare and Lightning's strategy "
    "'ddp' wrap models in: ranks hold stages, not copies, of the model. Leave the pipeline out of "
    "prepare and setup (prepare the optimizer alone: every rank sees the same batches), give "
    "Lightning's Trainer devices=1 and use_distributed_sampler=False, take "
    "mpcomp.hf.PipelineTrainer for transformers, and mpcomp.pipeline(..., replicas=n) for copies"
)

#: Functions by which a tensor leaves for a screen, a file or another process.
_SHOWN = {Tensor.__repr__, Tensor.__format__, Tensor.__deepcopy__, Tensor.__reduce_ex__}


class DifferentiatedLoss(Tensor):
    """The loss that `forward_backward` returns: a tensor that has no backward left.

    Numbers computed from it are such losses too, as ``loss / n`` or ``scaler.scale(loss)``. Shown,
    copied or saved it is a plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls a function of torch.

        Raises:
            RuntimeError: it differentiates, and nothing has a graph.
        """
        if func in (Tensor.backward, torch.autograd.grad):
            losses = args[0] if isinstance(args[0], tuple) else args[:1]
            if not any(loss.requires_grad for loss in losses):
                raise RuntimeError(_DONE)
        if func in _SHOWN:
            return func(args[0].as_subclass(Tensor), *args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def check_function(name: str, function: object, hint: str = "") -> None:
    """Refuses a loss function or metric that cannot be called with output and target.

    Args:
        name: of the argument.
        function: given for it; None is left to the caller.
        hint: what else may have been meant.

    Raises:
        TypeError: a class, as in ``nn.CrossEntropyLoss`` without brackets, or no function.
    """
    if isinstance(function, type):
        raise TypeError(
            f"{name}={function.__name__} is a class: pass an object of it, {function.__name__}()"
        )
    if function is not None and not callable(function):
        raise TypeError(
            f"{name} is a {type(function).__name__}: expected a function of output and target, "
            f"such as F.cross_entropy{hint}"
        )


def check_trainable(training: bool, weight: float) -> None:
    """Refuses a call of `forward_backward` that could not train as a plain step would.

    Args:
        training: the pipeline's mode.
        weight: on the gradients.

    Raises:
        ValueError: evaluation or inference mode, or a weight that is no number.
        TypeError: a `DistributedDataParallel` round the pipeline.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "forward_backward under torch.inference_mode(), in which nothing has a gradient: "
            "leave it for training"
        )
    _refuse_within_ddp()
    if not training:
        raise ValueError(
            "forward_backward in evaluation mode: call pipe.train() first, or dropout and "
            "BatchNorm would do what they do in evaluation. A model that transformers' "
            "from_pretrained gives is in that mode, and so is its pipeline"
        )
    if not math.isfinite(weight):
        raise ValueError(f"weight={weight!r}: expected a finite number, such as 1 / n")


def check_differentiable(num_ranks: int, ties: Sequence[Tie]) -> None:
    """Refuses to give an output with its graph where ``backward`` would not do all there is to do.

    Args:
        num_ranks: processes.
        ties: weights that two stages share.

    Raises:
        ValueError: another process, or another use of a weight, has a part of the gradients.
    """
    if num_ranks > 1:
        raise ValueError(
            "pipe(x) with gradients: autograd does not reach other processes; train with "
            "pipe.forward_backward(x, y), or infer under torch.no_grad() or pipe.eval()"
        )
    shared = [tie.name for tie in ties if tie.trains]
    if shared:
        raise ValueError(
            f"pipe(x) with gradients: two stages share {shared[0]}, and its gradients "
            "are added up at the end of pipe.forward_backward(x, y); train with that, or infer "
            "under torch.no_grad() or pipe.eval()"
        )


def check_no_graph(name: str, batch: Any, *, alone: bool) -> None:
    """Refuses a batch or target by which something else than the stages would be trained.

    Args:
        name: of it in messages.
        batch: tensor, tuple or mapping.
        alone: whether there is one process, in which a leaf gets its whole gradient.

    Raises:
        ValueError: a tensor of it requires a gradient that it or what computed it would not get.
    """

    def check(tensor: Tensor) -> None:
        if tensor.requires_grad and not (alone and tensor.is_leaf):
            computed = "" if tensor.grad_fn is None else f", computed by {tensor.grad_fn.name()}"
            raise ValueError(
                f"a tensor of the {name} requires a gradient{computed}: forward_backward trains "
                "the stages alone, so nothing before them would be trained. Put that into the "
                "model, mpcomp.pipeline(nn.Sequential(encoder, model), ...), or take "
                f"{name}.detach() if it is not to be trained. One process can also train by "
                "loss_fn(pipe(x), y).backward()"
            )

    map_tensors(batch, check)


def refuses_unpacked(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """A method whose error for an unknown keyword names the cure for ``method(**batch)``."""
    known = inspect.signature(method).parameters.keys()
    shown = {"forward": "pipe"}.get(method.__name__, f"pipe.{method.__name__}")

    @functools.wraps(method)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if unknown := kwargs.keys() - known:
            names = ", ".join(repr(name) for name in kwargs if name in unknown)
            raise TypeError(
                f"{shown} got an unexpected keyword argument {names}: a batch that is a mapping "
                f"goes in whole, {shown}(batch), not {shown}(**batch)"
            )
        return method(*args, **kwargs)

    return checked


def _refuse_within_ddp() -> None:
    """Refuses to train in a `DistributedDataParallel` that holds the pipeline within a module.

    It asks only the outermost module whether it may be wrapped. Of stages with unlike parameters
    it then says that their number differs; those of like stages it would average, without a word.

    Raises:
        TypeError: one is running its forward pass.
    """
    if DistributedDataParallel._active_ddp_module is not None:
        raise TypeError(WRAPPED)
