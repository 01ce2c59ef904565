"""Parameters that have several names, and what becomes of them at a cut.

Each stage is trained where it lies, with its own gradients: two stages that hold one parameter
would, on two devices, silently become two parameters. So one that two blocks share, as a language
model's embedding and head do, becomes two copies that are known as such; anything else that would
be shared across a cut is refused.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn

from stages.stage import Homes, Piece, ancestors


def shared_parameters(model: nn.Module) -> list[tuple[str, ...]]:
    """Return groups of qualified names whose parameters are one, or overlap in memory.

    Weights that merely lie side by side in one buffer, as a cuDNN LSTM packs them, are not
    shared.
    """
    return [tuple(names) for names in name_groups(model) if len(names) > 1]


def check_not_shared(model: nn.Module, pieces: Sequence[Piece]) -> None:
    """Raise ValueError if two of `pieces` hold the same parameter or the same stateful module."""
    where = Homes(pieces)
    parameters = [
        [(name, i) for name in names for i in where.holding(name) if i not in where.copying(name)]
        for names in name_groups(model)
    ]
    # A buffer that forward reads itself, such as a mask at the root, is in no block; several
    # stages may read it. A module with buffers (BatchNorm's statistics) changes them.
    buffers = [
        [(name, i) for name in names for i in where.calling(name)]
        for names in _buffer_groups(model)
    ]
    for homes in (*parameters, *buffers):
        for name, index in homes[1:]:
            first, home = homes[0]
            if index != home:
                raise ValueError(
                    f"{first!r} in stage {home} and {name!r} in stage {index} are one tensor; a "
                    "stage must own what it trains. Put both in the same stage: cut before the "
                    "first or after the last of them, or give each a tensor of its own"
                )


def with_tied_copies(model: nn.Module, pieces: Sequence[Piece]) -> list[Piece]:
    """Let a stage have a copy of the block whose parameter an earlier stage has as well.

    Whoever trains adds up the gradients of such copies (`stages.ties`). There is none of what
    merely overlaps, of a whole module that is used twice, and of what code between blocks reads:
    `check_not_shared` refuses those.
    """
    where = Homes(pieces)
    copied = [piece.copied for piece in pieces]
    for names in same_parameters(model):
        homes = sorted((i, name) for name in names for i in where.calling(name))
        home = homes[0][0]
        owner = {name: id(model.get_submodule(name.rpartition(".")[0])) for _, name in homes}
        at_home = {owner[name] for i, name in homes if i == home}  # nothing is copied there
        uses = [*at_home, *(owner[name] for i, name in homes if i != home)]
        if len(set(uses)) < len(uses):
            continue
        for i, name in homes:
            if i != home:
                block = next(b for b in pieces[i].blocks if b in ancestors(name))
                copied[i] = tuple(dict.fromkeys((*copied[i], block)))
    return [replace(piece, copied=names) for piece, names in zip(pieces, copied, strict=True)]


def same_parameters(model: nn.Module) -> list[tuple[str, ...]]:
    """Return groups of qualified names whose parameters are one; others merely overlap."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    groups = (
        tuple(name for name in names if parameters[name] is parameters[names[0]])
        for names in shared_parameters(model)
    )
    return [group for group in groups if len(group) > 1]


def name_groups(model: nn.Module) -> list[list[str]]:
    """All names of parameters, those that overlap in memory together, in the model's order."""
    extents = sorted(
        (*_extent(parameter), position, name)
        for position, (name, parameter) in enumerate(_parameters(model))
    )
    groups: list[list[tuple[int, str]]] = []
    reach: tuple[int, int] = (-1, 0)  # storage and end of what the last group covers
    for storage, start, end, position, name in extents:
        if groups and storage == reach[0] and start < reach[1]:
            groups[-1].append((position, name))
            reach = (storage, max(end, reach[1]))
        else:
            groups.append([(position, name)])
            reach = (storage, end)
    return [[name for _, name in sorted(group)] for group in sorted(sorted(g) for g in groups)]


def _extent(x: Tensor) -> tuple[int, int, int]:
    """The storage of `x`, and the first and past-the-last byte that it covers there."""
    last: int = sum(
        int((size - 1) * stride) for size, stride in zip(x.shape, x.stride(), strict=True)
    )
    start = int(x.storage_offset()) * x.element_size()
    # An empty parameter still counts as one byte: it can be shared as any other.
    end = start + (last + 1 if x.numel() else 1) * x.element_size()
    return int(x.untyped_storage()._cdata), start, end


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet; run one batch through the model before "
                "splitting it"
            )
        yield name, parameter


def _buffer_groups(model: nn.Module) -> list[list[str]]:
    """All names of buffers, those of the very same tensor together."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names[id(buffer)].append(name)
    return list(names.values())
