"""An accelerator that is not there: its tensors lie in host memory, and its work is counted.

    with FakeAccelerator() as accelerator:
        y = x.to(DEVICE) + 1
    accelerator.counts

It is as strict as a GPU: an operation has all its tensors there, and what is copied to the host
without waiting is there once an event behind it was waited for; before that it is garbage. So
what is right here, and for how many copies, launches and waits, needs no GPU to be known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["DEVICE", "Counts", "FakeAccelerator"]

#: A type of devices that torch knows, and has nothing of.
DEVICE: Final = torch.device("ipu", 0)

_aten = torch.ops.aten
_COPIES: Final = (_aten._to_copy.default, _aten.copy_.default)
#: Operations by which no work is launched, beside those that give views.
_FREE: Final = frozenset(
    {
        *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default),
        *(_aten.new_empty.default, _aten.detach.default, _aten._unsafe_view.default),
    }
)
#: Functions that give the host numbers.
_READ: Final = (Tensor.tolist, Tensor.__int__, Tensor.__float__, Tensor.__bool__, Tensor.__index__)
#: Operations whose results have a shape that the host must be told.
_TOLD: Final = frozenset((_aten.nonzero.default, _aten.masked_select.default))


@dataclass
class Counts:
    """Counts of what an accelerator was asked.

    Attributes:
        launches: operations on it.
        up: copies to it.
        down: copies from it.
        pageable: of those, copies that do not go through pinned memory.
        waits: of the host for it.
        up_bytes: in those copies.
        down_bytes: likewise.
    """

    launches: int = 0
    up: int = 0
    down: int = 0
    pageable: int = 0
    waits: int = 0
    up_bytes: int = 0
    down_bytes: int = 0


class _There(torch.Tensor):
    """A tensor of the accelerator."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _There:
        made: _There = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.on_host = inner
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Of these torch's own would look for the device itself.
        if function in _READ:
            return function(args[0].cpu())
        if function is Tensor.contiguous:
            form = (kwargs or {}).get("memory_format", torch.contiguous_format)
            there = args[0].is_contiguous(memory_format=form)
            return args[0] if there else args[0].clone(memory_format=form)
        if function is Tensor.__getitem__:
            return _item(*args)
        if function is Tensor.__setitem__:
            return _set_item(*args)
        if function is Tensor.copy_:
            return _copied(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{function} on an accelerator that is not there any more")


class FakeAccelerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which there is one more device, `DEVICE`.

    Attributes:
        counts: of what it was asked; may be replaced.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self._pinned: set[int] = set()
        self._kept: list[Tensor] = []  # so that no address is given twice
        self._under_way: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> FakeAccelerator:
        own, here = torch.cuda.current_stream, _Stream(self)
        self._streams = patch.object(
            torch.cuda, "current_stream", lambda of: here if _is_there(of) else own(of)
        )
        self._streams.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._streams.stop()

    def wait(self) -> None:
        """Has the host wait for all that the accelerator was given."""
        self.counts.waits += 1
        with torch.utils._python_dispatch._disable_current_modes():
            for target, value in self._under_way:
                target.copy_(value)
        self._under_way.clear()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if function is _aten.is_pinned.default:
            return tensors[0].untyped_storage().data_ptr() in self._pinned
        if function in _COPIES:
            crossed = self._crossed(function, args, kwargs)
            if crossed is not None:
                return crossed
        asked = any(isinstance(each, _There) for each in tensors)
        makes = not tensors and _is_there(kwargs.get("device"))
        if not (asked or makes):
            return self._on_host(function, args, kwargs)
        return self._launched(function, args, kwargs, tensors)

    def _on_host(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pins = kwargs.pop("pin_memory", False)
        made = function(*args, **kwargs)
        if pins:
            self._pinned.add(made.untyped_storage().data_ptr())
            self._kept.append(made)
        return made

    def _launched(
        self, function: Any, args: Any, kwargs: dict[str, Any], tensors: Iterable[Tensor]
    ) -> Any:
        for each in tensors:
            if not isinstance(each, _There) and each.dim():
                raise RuntimeError(f"{function} of tensors on {DEVICE} and on the host")
        if function is _aten._local_scalar_dense.default:
            self.counts.down += 1
            self.counts.pageable += 1
            self.counts.down_bytes += args[0].nbytes
            self.wait()
        elif function in _TOLD or _by_mask(function, args):
            self.counts.launches += 1
            self.wait()
        elif not (function in _FREE or function.is_view):
            self.counts.launches += 1
        if _is_there(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        owners = {id(each.on_host): each for each in tensors if isinstance(each, _There)}
        given, given_by_name = tree_map(_inner, (args, kwargs))
        made = function(*given, **given_by_name)

        def outer(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return owners[id(x)] if id(x) in owners else _There(x)

        return tree_map(outer, made)

    # -- copies ---------------------------------------------------------------------------------

    def _crossed(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a copy between the host and the accelerator; None of others."""
        if function is _aten.copy_.default:
            target, source, *rest = args
            waits = not (rest and rest[0]) and not kwargs.get("non_blocking", False)
            there = isinstance(target, _There)
        else:
            (source,), target = args, None
            waits = not kwargs.pop("non_blocking", False)
            there = isinstance(source, _There)
            if kwargs.get("device") is not None:
                there = _is_there(kwargs["device"])
        if there == isinstance(source, _There):
            return None
        host = _inner(source).clone()
        if target is not None and there and not source.dim():  # goes with the launch
            self.counts.launches += 1
            target.on_host.copy_(source)
            return target
        if target is None:
            kwargs["device"] = torch.device("cpu")
            # Without waiting torch gives pinned memory.
            pins, kwargs["pin_memory"] = not there and not waits, False
            made = _aten._to_copy.default(host, **kwargs)
            if pins:
                self._pinned.add(made.untyped_storage().data_ptr())
                self._kept.append(made)
            target, host = (_There(made) if there else made), made.clone()
        self._note(source if there else target, there=there, num_bytes=source.nbytes)
        if there:
            target.on_host.copy_(host)
        elif waits:
            target.copy_(host)
        else:
            target.copy_(torch.full_like(host, 99))
            self._under_way.append((target, host))
        if waits:
            self.wait()
        return target

    def _note(self, of_host: Tensor, *, there: bool, num_bytes: int) -> None:
        counts = self.counts
        if there:
            counts.up += 1
            counts.up_bytes += num_bytes
        else:
            counts.down += 1
            counts.down_bytes += num_bytes
        counts.pageable += of_host.untyped_storage().data_ptr() not in self._pinned


class _Stream:
    """The stream of the accelerator, and an event behind all that it was given."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self._accelerator = accelerator

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        self._accelerator.wait()


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        copied: Tensor = _aten.copy_.default(target, source, non_blocking)
    return copied


def _set_item(x: Tensor, index: Any, value: Any) -> None:
    value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=x.dtype)
    if isinstance(index, Tensor):
        with torch._C._AutoDispatchBelowAutograd():
            _aten.index_put_.default(x, [index], value.to(x.dtype))
    else:
        _copied(_item(x, index), value)


def _item(x: Tensor, index: Any) -> Tensor:
    """The part of a tensor that is written ``x[index]``."""
    dim, chosen = 0, []
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, Tensor):
            chosen.append((dim, each))
            dim += 1
        elif isinstance(each, slice):
            x = _aten.slice.Tensor(x, dim, each.start, each.stop, each.step or 1)
            dim += 1
        elif each is None:
            x, dim = x.unsqueeze(dim), dim + 1
        else:
            assert isinstance(each, int), f"an index {each!r} is not known here"
            x = x.select(dim, each)
    if chosen:
        places: list[Any] = [None] * x.dim()
        for place, each in chosen:
            places[place] = each
        x = _aten.index.Tensor(x, places)
    return x


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _inner(x: Any) -> Any:
    return x.on_host if isinstance(x, _There) else x


def _by_mask(function: Any, args: Any) -> bool:
    """Whether elements are chosen by a mask, whose number the host must be told."""
    if function is not _aten.index.Tensor:
        return False
    return any(each is not None and each.dtype == torch.bool for each in args[1])
