"""Cut a model into stages: by number, by block counts, by block names, or as in the paper."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from torch import nn

from stages.balance import check_num_stages, num_parameters, partition
from stages.blocks import Line, blocks, line_of
from stages.encoders import Encoder
from stages.graph import Trace
from stages.hints import listing
from stages.language_models import BlockLine, Decoder, is_causal_lm
from stages.sharing import check_not_shared, same_parameters, with_tied_copies
from stages.stage import Homes, Origin, Piece, Stage, Tie
from stages.together import last_place, parameters_together, second_use, why_apart

Where = int | str | Sequence[int] | Sequence[str]


def split(
    model: nn.Module, where: Where, *, together: bool = False, ends_first: bool = False
) -> list[Stage]:
    """Cut `model` into stages that share its blocks and parameters.

    Chained, the stages compute the bits that the model computes, forward and backward; the union
    of their `state_dict()`s is the model's.

    Args:
        model: a plain `nn.Sequential`, or any module whose own forward torch.fx can trace (its
            blocks are not traced).
        where: a number of stages, balanced by parameters; or a sequence of block counts, one per
            stage; or a sequence of names of blocks or containers to cut after; or "paper", the
            model's own `paper_cut`.
        together: where the first stage and the last one share a weight, as a language model's
            embedding and head, the last begins one stage more where it uses that: one that runs
            where the first does, so that nobody has a copy. Where that cannot be, stages say
            `why_apart`.
        ends_first: the same where they share no weight: the stage that runs where the first does
            begins with the final norm and head of a language model, or else with the last unit.

    Raises:
        ValueError: The model cannot be cut there; the message says why, and where it can.
        TypeError: `where` is none of these.
    """
    names, counts = _read(model, where)
    line = line_of(model, names)
    if isinstance(where, int):
        check_num_stages(where, len(line.units))
        counts = partition(num_parameters(blocks(model)), where)
    if isinstance(line, BlockLine):
        line.fill_buffers()
    places = _places_of_counts(line, counts) if counts else _places_of_names(line, names)
    pieces = with_tied_copies(model, line.pieces(places))
    same = tuple(same_parameters(model))
    read_by_all = line.read_by_all if isinstance(line, BlockLine) else []
    again, apart = None, ""
    tied = any(_ties(same, pieces))
    if places and (ends_first or (together and tied)):
        again = second_use(model, line) if tied else last_place(line)
        assert again is not None  # as two stages have the weight
        if isinstance(where, int):
            counts = partition(parameters_together(model, line, again), where)
            places = _places_of_counts(line, counts)
        if not (apart := why_apart(model, line, places, again)):
            pieces = with_tied_copies(model, line.pieces([*places, again]))
    if read_by_all and len(pieces) > 2:
        raise ValueError(
            f"all blocks of {type(model).__name__} read {listing(read_by_all)}, and two stages can "
            f"train one weight, {len(pieces)} cannot; cut the model into two, or freeze "
            f"{'it' if len(read_by_all) == 1 else 'them'}: requires_grad_(False)"
        )
    check_not_shared(model, pieces)
    pieces = _with_unused(model, pieces)
    same = _first_stage_first(same, pieces)
    own_loss = line.own_loss if isinstance(line, Encoder | Trace) else None
    origin = Origin(
        model,
        len(pieces),
        same,
        tuple(_ties((*same, *((name,) for name in read_by_all)), pieces)),
        together=again is not None and not apart,
        why_apart=apart,
        own_loss=own_loss,
    )
    stages = [Stage(origin, index, piece) for index, piece in enumerate(pieces)]
    if isinstance(line, BlockLine):
        line.check(stages)
    origin.containers.note(model, stages)
    return stages


def _read(model: nn.Module, where: Where) -> tuple[list[str], list[int]]:
    """Return `where` as names to cut after and block counts; both empty for a number."""
    if isinstance(where, str):
        return _named_cut(model, where), []
    if isinstance(where, int) and not isinstance(where, bool):
        return [], []
    values: list[object] = list(where) if isinstance(where, Sequence) else []
    names = [value for value in values if isinstance(value, str)]
    counts = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
    if not values or len(values) not in (len(names), len(counts)):
        raise TypeError(
            f"where is {where!r} ({type(where).__name__}); accepted is a number of stages, a "
            "sequence of block counts, a sequence of block names to cut after, or 'paper'. For "
            "one stage pass 1"
        )
    return names, counts


def _named_cut(model: nn.Module, where: str) -> list[str]:
    if where != "paper":
        words = [word.strip() for word in where.split(",")]
        cuts: list[object] = [int(word) if word.isdecimal() else word for word in words]
        meant = cuts[0] if len(cuts) == 1 and isinstance(cuts[0], int) else cuts
        kind = "a number of stages" if isinstance(meant, int) else "blocks to cut after"
        if isinstance(cuts[0], int) and meant is cuts:
            kind = "block counts"
        raise ValueError(
            f"where is {where!r}; the only string accepted is 'paper'. For {kind} pass {meant!r}"
        )
    cut = getattr(Decoder(model) if is_causal_lm(model) else model, "paper_cut", None)
    if cut is None:
        raise ValueError(
            f"where is 'paper', but {type(model).__name__} has no paper_cut; pass a number of "
            "stages, block counts, or block names to cut after"
        )
    return list(cut)


def _places_of_counts(line: Line, counts: Sequence[int]) -> list[int]:
    if min(counts) < 1:
        raise ValueError(
            f"block counts {list(counts)} hold {min(counts)}; each stage needs 1 block or more"
        )
    if sum(counts) != len(line.units):
        raise ValueError(
            f"block counts {list(counts)} add up to {sum(counts)}, but the model has "
            f"{len(line.units)} blocks; make them add up to {len(line.units)} (see stages.blocks)"
        )
    return [line.places[end - 1] for end in accumulate(counts[:-1])]


def _places_of_names(line: Line, names: Sequence[str]) -> list[int]:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"{name!r} is named twice in {list(names)}; name each cut once")
    places = [line.place(name) for name in names]
    for (name, place), (later, later_place) in pairwise(zip(names, places, strict=True)):
        if place == later_place:
            raise ValueError(
                f"{name!r} and {later!r} end at the same block, which would leave an empty stage; "
                "keep one of them"
            )
        if place > later_place:
            raise ValueError(
                f"{later!r} comes before {name!r} in the model but after it in {list(names)}; "
                "name the cuts in the model's order"
            )
    return places


def _first_stage_first(
    shared: Sequence[Sequence[str]], pieces: Sequence[Piece]
) -> tuple[tuple[str, ...], ...]:
    """Names of one parameter, that of the first stage with it first: a class may name heads first.

    The parameter of that name is the one that all of them are when stages are merged.
    """
    where = Homes(pieces)
    return tuple(
        tuple(sorted(names, key=lambda n: min(where.holding(n), default=len(pieces))))
        for names in shared
    )


def _ties(shared: Sequence[Sequence[str]], pieces: Sequence[Piece]) -> Iterator[Tie]:
    """Yield the shared parameters that several stages have, each once a stage."""
    where = Homes(pieces)
    for names in shared:
        copies: dict[int, str] = {}
        for name in names:
            for i in {*where.holding(name), *where.copying(name)}:
                copies.setdefault(i, name)
        if len(copies) > 1:
            yield tuple(sorted(copies.items()))


def _with_unused(model: nn.Module, pieces: Sequence[Piece]) -> list[Piece]:
    """Give parameters and buffers that no stage uses a home, so that no key of the model is lost.

    A second name of a tensor goes with the first, all else to the first stage.
    """
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    where = Homes(pieces)
    homes = {name: next(iter(where.holding(name)), None) for name in tensors}
    by_identity = {id(tensors[name]): home for name, home in homes.items() if home is not None}
    extra: list[list[str]] = [[] for _ in pieces]
    for name, home in homes.items():
        if home is None:
            extra[by_identity.get(id(tensors[name]), 0)].append(name)
    return [
        replace(piece, tensors=(*piece.tensors, *names))
        for piece, names in zip(pieces, extra, strict=True)
    ]
