"""A weight that both ends of a model use, as a language model's embedding and head do.

    rank 0   embedding, first blocks ─┐                               ┌─> final norm, head, loss
    rank 1                            └─> blocks ─┐                   │
    rank 2                                        └─> the last blocks ┘

What comes from the second use on becomes a stage of its own, which runs where the first does. So
nobody has a copy of the weight, and nothing is exchanged. A model whose ends share nothing can have
such a stage as well: then inputs, targets and the loss are on one rank.
"""

from collections.abc import Sequence

from torch import nn

from stages.balance import seconds
from stages.blocks import Line, line_of, units_of
from stages.hints import listing
from stages.language_models import BlockLine
from stages.sharing import same_parameters
from stages.stage import Homes


def second_use(model: nn.Module, line: Line) -> int | None:
    """The place before the last use of the weights that the earliest unit shares with others.

    None if no units share a weight.
    """
    places = list(line.places)
    if line.head_place is not None:
        places.append(line.head_place)
    where = Homes(line.pieces(places))
    uses = [
        sorted({i for n in names for i in where.calling(n)}) for names in same_parameters(model)
    ]
    uses = [homes for homes in uses if len(homes) > 1]
    if not uses:
        return None
    first = min(homes[0] for homes in uses)
    return places[min(homes[-1] for homes in uses if homes[0] == first) - 1]


def last_place(line: Line) -> int:
    """The place before what is last in any model: final norm and head, or the last unit."""
    return line.places[-1] if line.head_place is None else line.head_place


def why_apart(model: nn.Module, line: Line, places: Sequence[int], again: int) -> str:
    """Why a model that is cut at ``places`` cannot have a last stage from ``again`` on beside the
    first; empty if it can.
    """
    if places[-1] >= again:
        return (
            "no block is left between the last cut and what is to be beside the first stage; cut "
            "earlier"
        )
    if isinstance(line, BlockLine) and (read := line.read_by_all):
        return f"all blocks read {listing(read)}, so that each stage has a copy"
    where = Homes(line.pieces([*places, again]))
    for names in same_parameters(model):
        homes = sorted({i for name in names for i in where.calling(name)})
        if len(homes) > 1 and homes != [0, len(places) + 1]:
            return f"{' and '.join(names)} are used elsewhere than at both ends of the model"
    return ""


def parameters_together(model: nn.Module, line: Line, again: int) -> list[float]:
    """Parameters of the units, each once; what comes after ``again`` counts for the first unit."""
    seen: set[int] = set()
    sizes: list[float] = []
    for unit in units_of(model, line, with_head=True):
        new = {id(p): p.numel() for p in unit.module.parameters() if id(p) not in seen}
        seen |= new.keys()
        sizes.append(sum(new.values()))
    return _folded(sizes, line, again)


def unit_seconds(
    model: nn.Module, sample: object, *, together: bool = False, ends_first: bool = False
) -> list[float]:
    """Return `seconds` of the model's units; see `split` for ``together`` and ``ends_first``.

    What is to run beside the first unit then counts for that, and is 0 where it stands.
    """
    line = line_of(model)
    again = second_use(model, line) if together or ends_first else None
    if again is None and ends_first and line.places:
        again = last_place(line)
    if again is None:
        return seconds(units_of(model, line), sample)
    return _folded(seconds(units_of(model, line, with_head=True), sample), line, again)


def _folded(sizes: Sequence[float], line: Line, again: int) -> list[float]:
    before = sum(place < again for place in line.places) + 1
    rest = [0.0] * (len(line.units) - before)
    return [sizes[0] + sum(sizes[before:]), *sizes[1:before], *rest]
