"""Tiny models for the tests of the core, the plain way to train them, and exact comparisons."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from methods import same_bits
from torch import Tensor, nn

from mpcomp import Pipeline, pipeline
from mpcomp.core.randomness import stage_randomness
from mpcomp.feedback.state import EndState
from mpcomp.feedback.store import SlotStore
from stages import resnet18, split

CLASSES = 5


def mlp() -> nn.Sequential:
    """Odd sizes: nothing is a multiple of a byte's bits. Three stages with `MLP_SPLIT`."""
    return nn.Sequential(
        OrderedDict(
            one=nn.Linear(13, 19),
            tanh=nn.Tanh(),
            two=nn.Linear(19, 17),
            relu=nn.ReLU(),
            three=nn.Linear(17, CLASSES),
        )
    )


def convnet() -> nn.Sequential:
    """BatchNorm and dropout in every stage. Three stages with `CONV_SPLIT`."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 6, 3, padding=1),
            bn1=nn.BatchNorm2d(6),
            relu1=nn.ReLU(),
            drop1=nn.Dropout(0.3),
            conv2=nn.Conv2d(6, 7, 3, stride=2, padding=1),
            bn2=nn.BatchNorm2d(7),
            relu2=nn.ReLU(),
            drop2=nn.Dropout2d(0.3),
            conv3=nn.Conv2d(7, 9, 3, padding=1),
            bn3=nn.BatchNorm2d(9),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            drop3=nn.Dropout(0.3),
            linear=nn.Linear(9, CLASSES),
        )
    )


def convnet_channels_last() -> nn.Sequential:
    return convnet().to(memory_format=torch.channels_last)


def resnet() -> nn.Sequential:
    return resnet18(CLASSES, width=4)


def resnet_channels_last() -> nn.Sequential:
    """Of as few channels as may lie last: oneDNN for AVX2 overruns its memory with fewer (6035)."""
    return resnet18(CLASSES, width=8).to(memory_format=torch.channels_last)


MLP_SPLIT = ("tanh", "relu")
CONV_SPLIT = ("drop1", "drop2")
RESNET_SPLIT = "paper"


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch for `mlp`: inputs [count, 13] and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 13, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def images(count: int, seed: int = 0, side: int = 8) -> tuple[Tensor, Tensor]:
    """A batch for `convnet` and `resnet`: images [count, 3, side, side] and classes."""
    generator = torch.Generator().manual_seed(seed)
    # Means that differ from sample to sample: statistics that miss one cannot pass by luck.
    x = torch.randn(count, 3, side, side, generator=generator)
    x += torch.arange(count).reshape(-1, 1, 1, 1)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def pipe_of(model: nn.Module | None = None, chunks: int = 2, **options: Any) -> Pipeline:
    """A pipeline of `mlp`, with weights by seed 0, or of another model."""
    torch.manual_seed(0)
    options = {"loss_fn": F.cross_entropy, "split": MLP_SPLIT, **options}
    return pipeline(mlp() if model is None else model, chunks, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Without momentum, which some methods between replicas have themselves."""
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=1e-4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def plain_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    sizes: Sequence[int],
    *,
    where: object = 1,
    seed: int = 0,
    step: int = 0,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> Tensor:
    """Law 1's right-hand side: microbatches in ascending order, losses weighted by their share.

    ``where`` is the cut, which matters to dropout alone: it is drawn per stage and microbatch.
    """
    total = torch.zeros(())
    parts = [model] if where == 1 else split(model, where)
    for i, (xs, ys) in enumerate(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True)):
        for j, part in enumerate(parts):
            with stage_randomness(torch.device("cpu"), seed, step, j, i):
                xs = part(xs)
        loss = loss_fn(xs, ys) * (len(ys) / len(y))
        loss.backward()
        total = loss.detach() if i == 0 else total + loss.detach()
    return total


def names_in(folder: Path) -> list[str]:
    """Names in a folder, but of locks, which a pipeline that saves holds as long as it lives."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def clone(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def assert_same_training(pipe: nn.Module, plain: nn.Module) -> None:
    """Parameters, gradients and buffers agree in every bit, under the same names."""
    ours, theirs = dict(pipe.named_parameters()), dict(plain.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert same_bits(ours[name], parameter), f"parameter {name}"
        mine, other = ours[name].grad, parameter.grad
        assert (mine is None) == (other is None), f"gradient {name}"
        assert mine is None or same_bits(mine, other), f"gradient {name}"
    buffers = dict(pipe.named_buffers())
    assert list(buffers) == [name for name, _ in plain.named_buffers()]
    for name, buffer in plain.named_buffers():
        assert same_bits(buffers[name], buffer), f"buffer {name}"


def links_state(pipe: Pipeline) -> dict[str, dict[str, object]]:
    """A deep copy of what every link remembers."""
    return {link.name: copy.deepcopy(link.endpoint.state_dict()) for link in pipe.links}


def assert_same_state(a: dict[str, dict[str, object]], b: dict[str, dict[str, object]]) -> None:
    """Two results of `links_state` agree in every bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].keys() == b[name].keys(), name
        for key, value in a[name].items():
            other = b[name][key]
            if isinstance(value, Tensor):
                assert same_bits(value, other), f"{name} {key}"
            else:
                assert value == other, f"{name} {key}"


def num_stored_rows(pipe: Pipeline) -> int:
    """Rows of state that all links hold together."""
    ends = [end for link in pipe.links for end in link.endpoint.ends.values()]
    return sum(len(store_of(end)) for end in ends if store_of(end) is not None)


def assert_ends_agree(sender: EndState, receiver: EndState) -> None:
    """What both ends keep: the sender's fields that mirror the receiver's."""
    assert sender.mirrored
    for theirs, mine in sender.mirrored.items():
        stores = sender.fields[mine].store, receiver.fields[theirs].store
        a, b = (store.state_dict() for store in stores if store is not None)
        assert a.keys() == b.keys()
        assert all(same_bits(a[key], b[key]) for key in a)


def store_of(end: EndState) -> SlotStore | None:
    """The rows of an end's estimate, or of what else it keeps; None of an end that keeps none."""
    if end.estimate is not None:
        return end.fields[end.estimate].store
    return next((field.store for field in end.fields.values()), None)
