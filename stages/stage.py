"""A stage: some consecutive blocks of a model as one module, under the model's own names.

    model            stage 0            stage 1
    |- conv1         |- conv1
    |- layer1        |- layer1          |- layer1       a container of the stage
    |  |- 0          |  |- 0            |
    |  |- 1          |                  |  |- 1         the very block of the model
    |- linear                           |- linear

So `stage.state_dict()` and `stage.named_parameters()` speak the model's names, a union over the
stages is the model's state, and training a stage trains the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from stages.containers import Containers

#: What a stage computes: called with the stage itself, then with what the stage was called with.
Run = Callable[..., object]

#: The name, in the last stage, of a loss that has a state of its own.
LOSS = "loss_fn"


@dataclass(frozen=True)
class Piece:
    """Contents of one stage, before it is built."""

    blocks: tuple[str, ...]  # qualified names of the modules that it calls, in order
    tensors: tuple[str, ...]  # parameters and buffers that it needs and no block of it holds
    run: Run
    copied: tuple[str, ...] = ()  # modules, blocks or not, of which it has a copy of its own


class Homes:
    """The pieces that modules, parameters and buffers are in, found by qualified name."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._blocks = _indices(piece.blocks for piece in pieces)
        self._tensors = _indices(piece.tensors for piece in pieces)
        self._copied = _indices(piece.copied for piece in pieces)

    def calling(self, name: str) -> list[int]:
        """The pieces with a block that has that name or holds it, in order."""
        return _found(self._blocks, *ancestors(name))

    def copying(self, name: str) -> list[int]:
        """The pieces that it is copied for, in order."""
        return _found(self._copied, *ancestors(name))

    def holding(self, name: str) -> list[int]:
        """The pieces that the parameter or buffer of that name is in, in order."""
        return sorted({*_found(self._tensors, name), *self.calling(name)})


def _indices(lists: Iterable[Sequence[str]]) -> dict[str, list[int]]:
    """The places of the lists that each name is in."""
    found: dict[str, list[int]] = {}
    for index, names in enumerate(lists):
        for name in names:
            found.setdefault(name, []).append(index)
    return found


def _found(indices: Mapping[str, list[int]], *names: str) -> list[int]:
    return sorted({index for name in names for index in indices.get(name, ())})


#: One parameter that several stages have: the stage and the qualified name of each copy.
Tie = tuple[tuple[int, str], ...]


class StageState:
    """State that stages keep for one batch from call to call, handed to them with the batch.

    It is no input: shapes do not depend on it, and finding them out must not touch it.
    """

    def shaping(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a batch with this state on which the shapes at the cuts depend."""
        return {name: value for name, value in batch.items() if value is not self}


@dataclass(frozen=True, eq=False)
class Origin:
    """The model that stages were cut from; held so that nn.Module does not register it."""

    model: nn.Module
    num_stages: int
    shared: tuple[tuple[str, ...], ...] = ()  # names of parameters that are one in the model
    ties: tuple[Tie, ...] = ()  # those of them that stages have copies of
    together: bool = False  # the last stage runs where the first does, and copies are one
    why_apart: str = ""  # if that was wanted and cannot be
    own_loss: Callable[..., Any] | None = None  # of output and targets, if the model computes it
    containers: Containers = field(default_factory=Containers)  # of the model

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The place of each module in the model's own order, parents before what is inside."""
        named = self.model.named_modules(remove_duplicate=False)
        return {name: place for place, (name, _) in enumerate(named)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self  # a copied stage must not drag a copy of the whole model along


class Stage(nn.Module):
    """Consecutive blocks of a model, from one tensor to one tensor. Built by `split`.

    It shares blocks and parameters with the model, keeps the whole model alive for `merge`,
    never changes its input in place and never returns a view: a schedule detaches the output
    in place, and an engine may reuse the buffer of the input. Blocks that write to their input
    are given a copy, as the first call shows.
    """

    def __init__(self, origin: Origin, index: int, piece: Piece) -> None:
        super().__init__()
        self.index = index
        self.block_names = piece.blocks
        self.training = origin.model.training
        self._origin = origin
        self._run = piece.run
        self._copied = piece.copied
        self._has_loss = False
        tensors: dict[str, set[str]] = {}  # by the module that they are in
        for qualified in piece.tensors:
            prefix, _, name = qualified.rpartition(".")
            tensors.setdefault(prefix, set()).add(name)
        # In the model's own order, so parents come before what is inside them and optimizers
        # see parameters in the order they would see in the model.
        own, copied = set(piece.blocks), set(piece.copied)
        for prefix in sorted({*own, *copied, *tensors}, key=origin.places.__getitem__):
            module = origin.model.get_submodule(prefix)
            if prefix in copied:
                self._adopt_module(prefix, _copied(module, origin))
            elif prefix in own:
                self._adopt_module(prefix, module)
            for name in (*module._parameters, *module._buffers):
                if name in tensors.get(prefix, ()):
                    self._adopt_tensor(prefix, module, name)
        #: Whether blocks write to what they are given: in evaluation, in training.
        self._writes: dict[bool, bool] = {}

    @property
    def name(self) -> str:
        """Name in messages: "stage 1 (layer2.0 to layer2.1)"."""
        first, last = self.block_names[0], self.block_names[-1]
        return f"stage {self.index} ({first if first == last else f'{first} to {last}'})"

    @property
    def num_stages(self) -> int:
        """Into how many stages the model was split."""
        return self._origin.num_stages

    @property
    def original(self) -> nn.Module:
        """The model that was split."""
        return self._origin.model

    @property
    def together(self) -> bool:
        """Whether the last stage is to run where the first does; weights of both are one."""
        return self._origin.together

    @property
    def why_apart(self) -> str:
        """Why stages are not together that were to be; empty if they are, or were not to be."""
        return self._origin.why_apart

    @property
    def is_causal_lm(self) -> bool:
        """Whether the model is a language model: tokens [b, s] to logits [b, s, vocabulary]."""
        return getattr(self._run, "is_causal_lm", False)

    @property
    def of_transformers(self) -> bool:
        """Whether the model is one of transformers, with its names of inputs and labels."""
        return getattr(self._run, "of_transformers", False)

    @property
    def own_loss(self) -> Callable[..., Any] | None:
        """The loss of output and targets that the model computes itself, if it does so."""
        return self._origin.own_loss

    def takes(self, batch: object) -> dict[str, Any]:
        """Inputs that this stage takes from a batch beside the activation, as keyword arguments.

        The first stage is called with the batch itself, and takes nothing beside it.
        """
        if self.index == 0 or not isinstance(batch, Mapping):
            return {}
        names = getattr(self._run, "side_inputs", ())
        return {name: batch[name] for name in names if name in batch}

    def completed(self, batch: Any, target: Any = None) -> Any:
        """A batch with what the model makes of it and its labels before the first block.

        Args:
            batch: what the first stage is called with, or a mapping that has labels as well.
            target: the labels, where they are not in the batch.
        """
        complete = getattr(self._run, "completed", None)
        return batch if complete is None else complete(self.original, batch, target)

    def positions(self, batch: object) -> Tensor | None:
        """Mask [b, s] of the positions at a cut that count; None if the batch has none.

        Only masks of transformers' models are known; one of the user's own may mean the opposite.
        """
        if not self.of_transformers or not isinstance(batch, Mapping):
            return None
        positions = getattr(self._run, "positions", None)
        return batch.get("attention_mask") if positions is None else positions(batch)

    def check_batch(self, batch: object) -> None:
        """Raise ValueError if the model cannot take this batch, where that can be told ahead.

        Also if it is not the model any more that was cut.
        """
        self._origin.containers.check()
        check = getattr(self._run, "check_batch", None)
        if check is not None:
            check(self.original, batch)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Give the arguments to the first block and each result to the next.

        Raises:
            TypeError: The result is not one tensor.
            ValueError: A block changed the stage's input in place, and did not in the first call.
        """
        known = self._writes.get(self.training)
        if known is not False:
            args = tuple(_cloned(value) for value in args)
            kwargs = {key: _cloned(value) for key, value in kwargs.items()}
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        versions = [_version(x) for x in given]
        output = self._run(self, *args, **kwargs)
        if not isinstance(output, Tensor):
            if self.index == self.num_stages - 1:
                raise TypeError(
                    f"{self.name} returned {_kind_of(output)}, as the whole model does; accepted "
                    f"is one tensor. Let the forward of {type(self.original).__name__} return its "
                    "output alone (logits), and compute the loss outside of it: "
                    "pipeline(..., loss_fn=...)"
                )
            raise TypeError(
                f"{self.name} returned a {type(output).__name__} from its last block "
                f"{self.block_names[-1]!r}; accepted is one tensor. Cut the model after another "
                "block, or wrap the block in a module that returns only the tensor"
            )
        written = versions != [_version(x) for x in given]
        if written and known is False:
            raise ValueError(
                f"{self.name} changed its input in place, and did not in its first call; an input "
                "is a received message, which must stay as it is. Change a copy, as in x = x + 1 "
                f"for x += 1, in {self.block_names[0]!r} or what follows it"
            )
        if known is None and None not in versions:
            self._writes[self.training] = written
        if output._is_view() or any(_storage(output) == _storage(x) for x in given):
            output = output.clone()
        return output

    @property
    def second_uses(self) -> set[str]:
        """Names of parameters here that are those of the first stage, with which this one is."""
        if not self.together:
            return set()
        return {name for tie in self._origin.ties for i, name in tie[1:] if i == self.index}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters, without duplicates of those that the first stage has for both."""
        names = self.second_uses if remove_duplicate else set()
        again = {f"{prefix}.{name}" if prefix else name for name in names}
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if name not in again:
                yield name, parameter

    def adopt_loss(self, loss: nn.Module) -> None:
        """Take a loss's parameters and buffers in, under names that begin with ``loss_fn.``.

        It is no part of the model: `merge` leaves it out, and its mode stays the user's.
        """
        assert not hasattr(self.original, LOSS), "the caller has checked that"
        self.add_module(LOSS, loss)
        self._has_loss = True

    def is_of_loss(self, name: str) -> bool:
        """Whether a parameter, buffer or module of that name is one of an adopted loss."""
        return self._has_loss and name.partition(".")[0] == LOSS

    def train(self, mode: bool = True) -> Stage:
        """Training or evaluation mode, of the model's blocks."""
        self.training = mode
        for name, child in self.named_children():
            if not self.is_of_loss(name):
                child.train(mode)
        return self

    def extra_repr(self) -> str:
        return f"index={self.index}, num_stages={self.num_stages}"

    def _container(self, qualified: str) -> nn.Module | None:
        """The stage's own container of that name, made if need be; None inside a block."""
        ours: nn.Module = self
        theirs = self._origin.model
        for part in qualified.split(".") if qualified else ():
            theirs = theirs.get_submodule(part)
            if part not in ours._modules:
                _add(ours, part, nn.Module().train(theirs.training))
            ours = ours.get_submodule(part)
            if ours is theirs:
                return None
        return ours

    def _adopt_module(self, qualified: str, module: nn.Module) -> None:
        parent, _, leaf = qualified.rpartition(".")
        container = self._container(parent)
        if container is not None:
            _add(container, leaf, module)

    def _adopt_tensor(self, parent: str, module: nn.Module, name: str) -> None:
        container = self._container(parent)
        if container is None:
            return
        if name in module._parameters:
            container.register_parameter(name, module._parameters[name])
        else:
            persistent = name not in module._non_persistent_buffers_set
            container.register_buffer(name, module._buffers[name], persistent=persistent)


def merge(stages: Sequence[Stage]) -> nn.Module:
    """Return the model that `stages` were split from: the same object, as trained.

    Raises:
        ValueError: The stages are not all those of one model, in order, or are copies.
        TypeError: Something among them is not a `Stage`.
    """
    if not stages:
        raise ValueError("got no stages; merge takes the whole list that split returned")
    for position, stage in enumerate(stages):
        if not isinstance(stage, Stage):
            raise TypeError(
                f"stages[{position}] is a {type(stage).__name__}, not a Stage; merge takes the "
                "list that split returned"
            )
        if stage._origin is not stages[0]._origin:
            raise ValueError(
                f"{stage.name} at position {position} and {stages[0].name} come from different "
                "calls of split; merge takes the list that one split returned"
            )
    origin = stages[0]._origin
    if [stage.index for stage in stages] != list(range(origin.num_stages)):
        raise ValueError(
            f"got stages {[stage.index for stage in stages]}, expected all of "
            f"{list(range(origin.num_stages))} in this order; pass the list that split returned"
        )
    for stage in stages:
        for name in set(stage.block_names).difference(stage._copied):
            if stage.get_submodule(name) is not origin.model.get_submodule(name):
                raise ValueError(
                    f"block {name!r} of {stage.name} is not the model's own: the stage was copied "
                    "or the block replaced. Load the stage's state_dict() into a model instead; "
                    "its names are the model's"
                )
    for stage in stages:
        _write_back(stage, origin.model)
    tie_names(origin.model, stages)  # loading weights into a model on "meta" parts them
    return origin.model


def ties(stages: Sequence[Stage]) -> list[Tie]:
    """Return the parameters that are one in the model and that several stages have copies of.

    They are equal, and stay so as long as each is given the sum of the gradients of all.
    """
    return list(stages[0]._origin.ties)


def tie_names(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Make one parameter of those of `model`, the original or a copy, that were one there."""
    for first, *others in stages[0]._origin.shared:
        parameter = model.get_parameter(first)
        for name in others:
            owner, leaf = owner_of(model, name)
            owner._parameters[leaf] = parameter


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that a qualified name of `model` is in, and the name that it has there."""
    parent, _, leaf = name.rpartition(".")
    return model.get_submodule(parent), leaf


def ancestors(name: str) -> list[str]:
    """Return "a", "a.b" and "a.b.c" for "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _write_back(stage: Stage, model: nn.Module) -> None:
    """Bring what the stage's own containers hold up to date in the model.

    Blocks are shared and need nothing. A container's buffers and training flag are its own, and
    moving a stage to another device replaces buffers (and parameters that were on "meta"). Of a
    copied block all is written; what other stages have too is tied again afterwards.
    """
    only_copied = set(stage._copied).difference(stage.block_names)
    for name, ours in stage.named_modules(remove_duplicate=False):
        if stage.is_of_loss(name) or not set(ancestors(name)).isdisjoint(only_copied):
            continue
        theirs = model.get_submodule(name)
        if theirs is not ours:
            theirs._parameters.update(ours._parameters)
            theirs._buffers.update(ours._buffers)
            theirs.training = ours.training


def _add(parent: nn.Module, name: str, child: nn.Module) -> None:
    try:
        parent.add_module(name, child)
    except KeyError as error:
        raise ValueError(
            f"a block of the model is called {name!r}, which a Stage uses itself; rename the block"
        ) from error


def _copied(module: nn.Module, origin: Origin) -> nn.Module:
    """A copy that shares all parameters but those that another stage has as well.

    Of stages that are together it shares the memory of these, too, but gathers their gradients.
    """
    tied = {id(origin.model.get_parameter(name)) for tie in origin.ties for _, name in tie}
    memo = {id(p): p for p in module.parameters() if id(p) not in tied}
    if origin.together:
        memo |= {
            id(p): nn.Parameter(p.detach(), p.requires_grad)
            for p in module.parameters()
            if id(p) in tied
        }
    return copy.deepcopy(module, memo)


def _cloned(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _kind_of(output: object) -> str:
    """The type of what is no tensor, and of what is in it."""
    inside = list(output.values()) if isinstance(output, Mapping) else output
    kind = f"a {type(output).__name__}"
    if isinstance(inside, (tuple, list)):
        kind += f" ({', '.join(type(value).__name__ for value in inside)})"
    return kind


def _storage(x: Tensor) -> object:
    # The identity of the storage, not its address: that is 0 on "meta" and for empty tensors.
    return x.untyped_storage()._cdata
