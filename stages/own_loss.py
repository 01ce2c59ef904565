"""The loss that a model computes itself: `logits, loss = model(x, targets)`, as nanoGPT has it.

Its forward is traced with targets, and falls into two: what the stages compute, from the input to
the output, and what remains, from output and targets to the loss.

    x -> embed -> block -> block -> head -> output -> view -> cross_entropy -> loss
                                                   targets -> view -^
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import Argument, map_arg

#: What models call the argument that their loss is computed from.
_TARGETS = ("targets", "target", "labels", "label")


def target_of(model: nn.Module, graph: fx.Graph) -> str | None:
    """Name of the argument from which a model computes its loss; None if it computes none.

    Args:
        model: the model.
        graph: its forward, with optional arguments left out.
    """
    result = next(iter(reversed(graph.nodes))).args[0]
    if not isinstance(result, tuple | list) or len(result) != 2 or result[1] is not None:
        return None
    parameters = inspect.signature(model.forward).parameters
    optional = [
        name for name in _TARGETS if name in parameters and parameters[name].default is None
    ]
    return optional[0] if optional else None


class OwnLoss:
    """A model's loss, of the output of its last stage and the targets.

    Args:
        model: the model, whose modules without state the loss may call.
        loss: what computes it, called with the model, the output and the targets.
        counted: what gives the classes of a cross-entropy, called with the model and the targets;
            None for a loss that is no cross-entropy.
        ignored: the class that does not count.
        reduction: "sum" for a loss that is a sum.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        counted: Callable[..., Any] | None,
        ignored: int,
        reduction: str,
    ) -> None:
        self._model = model
        self._loss = loss
        self._counted = counted
        self._ignored = ignored
        self.reduction = reduction

    def num_terms(self, target: Tensor) -> int:
        """Over how many terms the loss is the mean: targets that count, or else rows."""
        if self._counted is None:
            return len(target)
        return int((self._counted(self._model, target) != self._ignored).sum())

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        """The loss."""
        return self._loss(self._model, output, target)


def part(
    model: nn.Module,
    graph: fx.Graph,
    target: str,
    program: Callable[[fx.Graph], Callable[..., Any]],
) -> OwnLoss:
    """Take the loss out of the trace of a forward with targets, which is left with the output.

    Args:
        model: the model.
        graph: its trace, with ``target`` as an input.
        target: name of that.
        program: makes a callable of a graph, called with the model first.

    Raises:
        ValueError: the two cannot be parted.
    """
    *_, end = graph.nodes
    output, loss = end.args[0] if isinstance(end.args[0], tuple | list) else (None, None)
    (given,) = (n for n in graph.nodes if n.op == "placeholder" and n.target == target)
    name = type(model).__name__
    if not (isinstance(output, fx.Node) and isinstance(loss, fx.Node)):
        raise ValueError(f"{name} returns no pair of its output and its loss when given {target!r}")
    of_output = _needed([output], stop=())
    if given in of_output:
        raise ValueError(
            f"the output of {name} cannot be had without its loss: its output depends on "
            f"{target!r}; let forward return the output alone, and pass loss_fn="
        )
    of_target = {given}
    for node in graph.nodes:
        if node is not end and not of_target.isdisjoint(node.all_input_nodes):
            of_target.add(node)  # also what nothing is made of, such as an assertion
    own = _needed([loss, *of_target], stop=(output, given)) - of_output - {given}
    _check(model, [n for n in graph.nodes if n in own], of_output, (output, given))
    parted = _copied(graph, own, [output, given], loss)
    entropy = _entropy_of(model, loss)
    counted = None
    if entropy is not None and entropy.reduction == "mean":
        needed = _needed([entropy.classes], stop=(given,))
        if output not in needed:
            counted = program(_copied(graph, needed - {given}, [given], entropy.classes))
    end.args = (output,)
    for node in reversed(list(graph.nodes)):
        if node in own:
            graph.erase_node(node)
    with graph.inserting_after(given):
        graph.call_function(_left_out, (given, f"{name}'s {target}"))
    return OwnLoss(
        model,
        program(parted),
        counted,
        entropy.ignored if entropy is not None else 0,
        entropy.reduction if entropy is not None else "mean",
    )


def _left_out(value: object, name: str) -> None:
    assert value is None, f"{name} go to pipe.forward_backward(x, y), not into the first stage"


def _needed(ends: Iterable[fx.Node], stop: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that lead to these, themselves included, but not what leads to ``stop``."""
    found, waiting, stops = set(), list(ends), set(stop)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if node not in stops:
                waiting += node.all_input_nodes
    return found


def _check(
    model: nn.Module,
    own: Iterable[fx.Node],
    of_output: set[fx.Node],
    inputs: tuple[fx.Node, fx.Node],
) -> None:
    name, cure = type(model).__name__, "let forward return its output alone, and pass loss_fn="
    for node in own:
        if node.op == "get_attr":
            raise ValueError(f"{name}: its loss reads {str(node.target)!r} of the model; {cure}")
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            if any(True for _ in (*module.parameters(), *module.buffers())):
                raise ValueError(
                    f"{name}: its loss calls {str(node.target)!r}, which has parameters or "
                    f"buffers; {cure}"
                )
        for other in node.all_input_nodes:
            if other in of_output and other not in inputs:
                raise ValueError(
                    f"{name}: its loss needs a result of {other.name!r} besides its output and "
                    f"targets; {cure}"
                )


def _copied(
    graph: fx.Graph, nodes: set[fx.Node], inputs: list[fx.Node], result: fx.Node
) -> fx.Graph:
    """A graph of these nodes alone, from these inputs to that result."""
    copy = fx.Graph()
    copies = {node: copy.placeholder(f"given_{i}") for i, node in enumerate(inputs)}
    for node in graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = copy.node_copy(node, copies.__getitem__)
    returned: Argument = map_arg(result, copies.__getitem__)
    copy.output(returned)
    return copy


@dataclass(frozen=True)
class _Entropy:
    """A cross-entropy: its node of classes, the class that is ignored, how it is reduced."""

    classes: fx.Node
    ignored: int
    reduction: str


def _entropy_of(model: nn.Module, loss: fx.Node) -> _Entropy | None:
    """The cross-entropy that a loss is; None for another loss, or one with class weights."""
    if loss.op == "call_module":
        module = model.get_submodule(str(loss.target))
        if isinstance(module, nn.CrossEntropyLoss | nn.NLLLoss):
            return _Entropy(loss.all_input_nodes[-1], module.ignore_index, module.reduction)
    elif loss.target in (F.cross_entropy, F.nll_loss):
        names = inspect.signature(F.cross_entropy).parameters
        given = {**dict(zip(names, loss.args, strict=False)), **loss.kwargs}
        classes, ignored = given.get("target"), given.get("ignore_index", -100)
        if given.get("weight") is None and isinstance(classes, fx.Node):
            return _Entropy(classes, int(str(ignored)), str(given.get("reduction", "mean")))
    return None
