"""Models with a forward of their own, cut with torch.fx.

Only the code *between* blocks is traced: every module is a leaf, except plain chains and the
ancestors of blocks that were named. The trace is a line of nodes, and a cut is a place on it:

    x -> conv1 -> relu -> layer1.0 -> layer1.1 -> flatten -> linear -> output
                                   |           |
                                   places at which one tensor, and nothing else, is alive
"""

import dis
import inspect
import linecache
import operator
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, zip_longest
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, map_arg

from stages.chain import is_plain
from stages.hints import listing, nearest
from stages.own_loss import OwnLoss, part, target_of
from stages.stage import Piece, Stage, ancestors

#: The folder of the code that traces, in which no model's mistakes are.
_TORCH = str(Path(torch.__file__).parent)


class Trace:
    """The forward of a model as `split` sees it: units, the places after them, pieces."""

    def __init__(self, model: nn.Module, names: Sequence[str] = ()) -> None:
        graph = _trace(model, names)
        #: What the model computes its loss by, if it does so itself.
        self.own_loss: OwnLoss | None = None
        if (target := target_of(model, graph)) is not None:
            graph = _trace(model, names, given=target)
            self.own_loss = part(model, graph, target, Program)
        *self._nodes, self._output = graph.nodes
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._arguments = _arguments(model)
        self._calls = Counter(str(n.target) for n in self._nodes if n.op == "call_module")
        if not self._calls:
            raise ValueError(
                f"{type(model).__name__} calls no modules in its forward, so there is nothing to "
                "cut; pass a model made of blocks"
            )
        ends = [(name, self._after(name)) for name, calls in self._calls.items() if calls == 1]
        ends = [(name, p) for name, p in ends if self._calls_after(p) and not self._refusal(p)]
        last = [str(n.target) for n in self._nodes if n.op == "call_module"][-1]
        self.units = [name for name, _ in ends] + [last]
        #: The place after each unit but the last.
        self.places = [place for _, place in ends]
        self.head_place: int | None = None

    def place(self, name: str) -> int:
        """Return the place after the block or container of that qualified name.

        Raises:
            ValueError: There is none, or the model cannot be cut there.
        """
        known = [parent for target in self._calls for parent in ancestors(target)]
        if name not in known:
            raise ValueError(f"the model's forward calls no block {name!r}; {nearest(name, known)}")
        if self._calls[name] > 1:
            raise ValueError(
                f"cannot cut after {name!r}: it is called {self._calls[name]} times; "
                f"{self._suggestion()}"
            )
        place = self._after(name)
        if not self._calls_after(place):
            raise ValueError(
                f"cannot cut after {name!r}: no block is called after it, which would leave an "
                "empty stage; leave it out"
            )
        if refusal := self._refusal(place):
            raise ValueError(f"cannot cut after {name!r}: {refusal}; {self._suggestion()}")
        return place

    def pieces(self, places: Sequence[int]) -> list[Piece]:
        """Cut at these increasing places."""
        return [self._piece(i, j) for i, j in pairwise([0, *places, len(self._nodes)])]

    def _after(self, name: str) -> int:
        inside = [
            i
            for i, node in enumerate(self._nodes)
            if node.op == "call_module" and name in ancestors(str(node.target))
        ]
        first = inside[-1] + 1
        later = (i for i in range(first, len(self._nodes)) if self._nodes[i].op == "call_module")
        last = next(later, len(self._nodes))
        # What a block returns in a tuple is unpacked in its own stage: one tensor may cross.
        while first < last and self._nodes[first].target is operator.getitem:
            first += 1
        # A cut may move up to the next call: in x + block(x) it comes after the sum.
        allowed = (place for place in range(first, last + 1) if not self._refusal(place))
        return next(allowed, first)

    def _calls_after(self, place: int) -> bool:
        return any(node.op == "call_module" for node in self._nodes[place:])

    def _crossing(self, place: int) -> list[fx.Node]:
        """The values made before `place` and needed after it."""
        # Parameters and buffers do not cross: the stage that needs them reads them itself.
        return [
            node
            for node in self._nodes[:place]
            if node.op != "get_attr" and any(self._order[user] >= place for user in node.users)
        ]

    def _refusal(self, place: int) -> str:
        """Why the line cannot be cut at `place`; empty if it can."""
        crossing = self._crossing(place)
        if len(crossing) == 1 and crossing[0].op != "placeholder":
            return ""
        values = " and ".join(_describe(node) for node in crossing) or "nothing"
        return f"{values} would cross the cut, where only one tensor made by a block may"

    def _suggestion(self) -> str:
        return f"the model can be cut after: {listing(self.units[:-1])}"

    def _piece(self, start: int, end: int) -> Piece:
        """Copy the nodes from `start` to `end` into a graph from one value to one value."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        if start > 0:
            (received,) = self._crossing(start)
            copies[received] = graph.placeholder("received")
        names = iter(self._arguments)

        def fetch(node: fx.Node) -> fx.Node:
            if node not in copies:
                assert node.op == "get_attr", node
                copies[node] = graph.node_copy(node)
            return copies[node]

        for node in self._nodes[start:end]:
            if node.op == "get_attr":
                continue
            copies[node] = graph.node_copy(node, fetch)
            if node.op == "placeholder":
                # fx renames an argument that it holds at its default; callers know the name.
                copies[node].target = next(names)
        whole = end == len(self._nodes)
        result: Argument = self._output.args[0] if whole else self._crossing(end)[0]
        graph.output(map_arg(result, fetch))
        calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        reads = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        return Piece(tuple(dict.fromkeys(calls)), tuple(dict.fromkeys(reads)), Program(graph))


class Program:
    """The code of one piece, called with the stage that holds its blocks.

    Not a GraphModule: that would keep a second tree of modules beside the stage's.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        code = graph.python_code("self")
        namespace: dict[str, Any] = dict(code.globals)
        exec(compile(code.src, "<stage>", "exec"), namespace)
        self._forward: Callable[..., object] = namespace["forward"]

    def __call__(self, stage: Stage, *args: Any, **kwargs: Any) -> object:
        return self._forward(stage, *args, **kwargs)

    def __reduce__(self) -> tuple[type["Program"], tuple[fx.Graph]]:
        return Program, (self.graph,)  # the compiled function cannot be pickled


class _Tracer(fx.Tracer):
    """Keeps blocks whole, and refuses what a trace would lose or freeze without a word."""

    proxy_buffer_attributes = True  # else `self.steps += 1` would run while tracing

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._ancestors = {parent for name in names for parent in ancestors(name)[:-1]}
        self._modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not (is_plain(m) or module_qualified_name in self._ancestors)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise ValueError("it computes under torch.no_grad() or autocast, which is not traced")
        return super().create_node(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        # An assert is no branch, and is kept. (torch's own way to see one ends with Python 3.10.)
        frame = inspect.currentframe()
        caller = frame and frame.f_back and frame.f_back.f_back  # behind Proxy.__bool__
        if caller is None or not _is_assert(caller):
            return super().to_bool(obj)
        line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
        self.create_proxy("call_function", torch._assert, (obj, line), {})
        return True

    def create_arg(self, a: Any) -> Argument:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            raise ValueError(
                f"it uses a tensor of shape {tuple(a.shape)} that is neither a parameter nor a "
                "buffer, and would not move with a stage; use register_buffer"
            )
        return super().create_arg(a)


def _is_assert(frame: FrameType) -> bool:
    """Whether a value is taken for true or false in an `assert`, and for nothing else."""
    after = (inst for inst in dis.get_instructions(frame.f_code) if inst.offset >= frame.f_lasti)
    jump, following = next(after, None), next(after, None)
    while following is not None and following.opname in ("CACHE", "EXTENDED_ARG"):
        following = next(after, None)
    if jump is None or following is None:
        return False
    return jump.opname.endswith("IF_TRUE") and following.opname == "LOAD_ASSERTION_ERROR"


def traced(model: nn.Module) -> fx.Graph:
    """Trace the forward of `model`, whose modules are leaves.

    Raises:
        ValueError: It cannot be traced.
    """
    return _trace(model, ())


def _trace(model: nn.Module, names: Sequence[str], given: str = "") -> fx.Graph:
    """Trace the forward of `model`, in training and in evaluation; both must be the same code.

    Optional arguments are left out, but the one that is `given`.
    """
    graphs = [_trace_as(model, names, given, training) for training in (True, False)]
    train, evaluation = (graph.python_code("self").src.splitlines() for graph in graphs)
    if train != evaluation:
        pairs = zip_longest(train, evaluation, fillvalue="")
        ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"the forward of {type(model).__name__} depends on self.training: it computes "
            f"{ours.strip()!r} in training where it computes {theirs.strip()!r} in evaluation, and "
            "a trace would freeze one of them. Move that into a module of its own, as nn.Dropout "
            "is"
        )
    return graphs[0]


def _trace_as(model: nn.Module, names: Sequence[str], given: str, training: bool) -> fx.Graph:
    # An optional argument is held at its default: a traced stand-in is never None, so that
    # `if mask is not None` would always be taken. Passing another value is an error.
    held = {
        name: default
        for name, default in _arguments(model).items()
        if _is_held(default) and name != given
    }
    try:
        with _put_back(model) as changed:
            for module in model.modules():
                module.training = training
            graph = _Tracer(names).trace(model, concrete_args=held or None)
            if attributes := changed() - {"training"}:
                raise ValueError(f"it assigns to its own {listing(sorted(attributes))}")
        _check_held(model, graph, held)
        return graph
    except Exception as error:  # anything at all can happen in code that is being traced
        raise ValueError(
            f"cannot trace the forward of {type(model).__name__} to cut it: {_cause(model, error)}"
        ) from error


def _check_held(model: nn.Module, graph: fx.Graph, held: Mapping[str, Any]) -> None:
    """Put checks of held arguments, with the cure in what they say, in place of fx's own."""
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    at = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for name, node in zip(_arguments(model), placeholders, strict=True):
        if name not in held:
            continue
        for comparison in list(node.users):  # nothing else sees it: it is a plain value meanwhile
            for check in list(comparison.users):
                graph.erase_node(check)
            graph.erase_node(comparison)
        with graph.inserting_after(node):
            what = f"the forward of {type(model).__name__}{at}"
            graph.call_function(_refuse_others, (node, name, held[name], what))


def _refuse_others(value: object, name: str, default: object, what: str) -> None:
    """Raise ValueError for an argument that was held at its default, and now has another value."""
    if isinstance(value, Tensor):
        shown, cure = f"a tensor of shape {list(value.shape)}", f"Give {name} no default there"
        around = f"def forward(self, x, {name}): return self.model(x, {name}={name})"
    elif value is default or value == default:
        return
    else:
        shown, cure = repr(value), "Make that its default there"
        around = f"def forward(self, x): return self.model(x, {name}={value!r})"
    raise ValueError(
        f"{what} was given {shown} as {name}, but was cut with {name}={default!r}, as it is left "
        f"out by default: what the forward does with another value was not traced. {cure}; or cut "
        f'a module around it, as in {around}, at blocks named as in split=["model.layer1"]'
    )


def _cause(model: nn.Module, error: Exception) -> str:
    """The error that a trace ended with, its line in the model's own code, and the cure."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_TORCH) and frame.filename != __file__
    ]
    forward = model.forward
    own = getattr(inspect.unwrap(forward), "__code__", None)
    code = getattr(forward, "__code__", None)  # of the outermost decorator, if there is one
    if own is not code and own and code and not any(_is_in(frame, own) for frame in frames):
        return (
            f"it is wrapped by a decorator ({code.co_filename}:{code.co_firstlineno}), in which "
            f"torch.fx ends with {str(error)!r} before it comes to the forward itself. Write a "
            "module of your own whose forward calls the model's blocks (embeddings, layers, head) "
            "and returns one tensor, or an nn.Sequential of them, and cut that"
        )
    at = f", at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    return (
        f"{error}{at}. Only code between blocks is traced, with optional arguments at their "
        "defaults; move what branches on values, or is otherwise more than calls of modules and "
        "functions, into a block, or write the model as an nn.Sequential"
    )


def _is_in(frame: traceback.FrameSummary, code: CodeType) -> bool:
    return (frame.filename, frame.name) == (code.co_filename, code.co_name)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[Callable[[], set[str]]]:
    """Undo every assignment to attributes of modules; yield what tells those made so far.

    `self.steps += 1` in a forward that is traced puts a stand-in where the buffer was.
    """
    saved = [
        (attributes, dict(attributes))
        for module in model.modules()
        for attributes in (vars(module), module._parameters, module._buffers)
    ]

    def changed() -> set[str]:
        return {
            name
            for now, before in saved
            for name in now.keys() | before.keys()
            if now.get(name, saved) is not before.get(name, saved)
        }

    try:
        yield changed
    finally:
        for now, before in saved:
            now.clear()
            now.update(before)


def _arguments(model: nn.Module) -> dict[str, object]:
    """The arguments of forward with their defaults, in order, as fx names placeholders."""
    stars: dict[object, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    parameters = inspect.signature(model.forward).parameters.values()
    return {stars.get(p.kind, "") + p.name: p.default for p in parameters}


def _is_held(default: object) -> bool:
    return default is None or isinstance(default, (bool, int, float, str))


def _modes() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _describe(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"the model's input {node.target!r}"
    if node.op == "call_module":
        return f"the output of block {node.target!r}"
    target = node.target if isinstance(node.target, str) else node.target.__name__
    return f"a result of {target}() ({node.name!r})"
