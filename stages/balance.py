"""Numbers of blocks for each stage, so that the stages weigh about the same.

Exact, by dynamic programming over the places where a model can be cut, in a time that grows with
stages times blocks. Where every stage runs on a
machine like the others, `balance` does it all; unequal machines each measure the blocks:

    units = blocks(model)
    times = seconds(units, sample)          # here; gather the lists of all ranks, in stage order
    counts = partition(all_times, num_stages)
"""

import copy
import statistics
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stages.blocks import (
    Block,
    activations,
    arguments,
    blocks,
    one_tensor,
    random_state_kept,
    side_inputs,
)
from stages.clock import now
from stages.hints import nearest

By = Literal["parameters", "time", "bytes"]
Sizes = Sequence[float] | Sequence[Sequence[float]]
_REPEATS = 5


def balance(
    model: nn.Module,
    num_stages: int,
    *,
    by: By = "parameters",
    sample: object = None,
    slack: float = 0.25,
    load: Literal["time", "parameters"] = "time",
) -> list[int]:
    """Return block counts for `split`, one per stage.

    The model, its buffers and gradients, and the random state stay as they are. Measured times
    differ from run to run: with several processes, balance in one and send the counts around, or
    gather the `seconds` of all and give them to `partition`, as unequal machines need.

    Args:
        model: any module that `split` can cut.
        num_stages: how many stages, at most one per block.
        by: "parameters" makes the largest stage as small as can be, in parameters; "time" the
            same in seconds, forward and backward on `sample`; "bytes" makes the bytes of the
            activations at the cuts the fewest, among splits that are balanced well enough.
        sample: an input (tensor, tuple of arguments or mapping of keywords), for "time" and
            "bytes".
        slack: for "bytes", how much larger than the best the largest stage may be: 0.25 is 25 %.
        load: for "bytes", what a stage's size is measured in.

    Raises:
        ValueError: More stages than blocks, `sample` missing, or a bad `by`, `load` or `slack`.
        TypeError: A block gives something else than one tensor.
    """
    _one_of("by", by, ("parameters", "time", "bytes"))
    _one_of("load", load, ("time", "parameters"))
    _check_slack(slack)
    if by != "parameters" and sample is None:
        raise ValueError(
            f"by={by!r} needs a sample: pass sample=x, an input of the model of the size to be "
            "trained with, or balance by='parameters'"
        )
    units = blocks(model)
    check_num_stages(num_stages, len(units))
    measured = load if by == "bytes" else by
    sizes = num_parameters(units) if measured == "parameters" else seconds(units, sample)
    if by != "bytes":
        return partition(sizes, num_stages)
    crossing = [x.numel() * x.element_size() for x in activations(units, sample)]
    return partition(sizes, num_stages, slack=slack, prices=crossing)


def partition(
    sizes: Sizes,
    num_stages: int,
    *,
    slack: float = 0.0,
    prices: Sequence[float] | None = None,
) -> list[int]:
    """Cut a line of units into consecutive nonempty groups, one per stage; return their lengths.

    No group is larger than 1 + slack times the best possible largest. Among those splits it is
    the one whose prices at the cuts sum to least, or without prices the one whose squared group
    sizes do: the most even.

    Args:
        sizes: what each unit costs, in any one measure; or one such list per stage, where
            `sizes[stage][unit]` is what the unit costs on the machine of that stage.
        num_stages: how many groups, at most one per unit.
        slack: how much larger than the best the largest group may be: 0.25 is 25 %.
        prices: `prices[unit]` is what cutting after that unit costs.

    Raises:
        ValueError: More stages than units, lists that do not fit the stages or each other, a bad
            `slack`, or a size that is negative or not finite.
        TypeError: `num_stages` is no int, or `sizes` mixes numbers and lists.
    """
    _check_slack(slack)
    rows = _one_list_per_stage(sizes, num_stages)
    num_units = len(rows[0])
    if prices is not None and len(prices) != num_units:
        raise ValueError(f"{len(prices)} prices for {num_units} units; pass one price per unit")
    ends = [[0, *accumulate(row)] for row in rows]

    limit = _least_largest(ends) * (1 + slack)
    return _cheapest(ends, limit, prices)


def _one_list_per_stage(sizes: Sizes, num_stages: int) -> list[list[float]]:
    """Return the sizes of the units for every stage; a single list holds for all stages."""
    lists = [list(row) for row in sizes if isinstance(row, Sequence)]
    single = [size for size in sizes if not isinstance(size, Sequence)]
    if lists and single:
        raise TypeError(
            f"sizes holds {len(single)} numbers beside {len(lists)} lists; accepted is one number "
            "per unit, or one list of such numbers per stage"
        )
    lengths = [len(row) for row in lists or [single]]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the lists of sizes hold {lengths} units; every stage's list needs the sizes of all "
            "units of the model, as any of them may come to run there"
        )
    check_num_stages(num_stages, lengths[0])
    rows = lists or [single] * num_stages
    if len(rows) != num_stages:
        raise ValueError(
            f"sizes has lists for {len(rows)} stages, but the number of stages is {num_stages}; "
            "pass one list per stage, or a single list for machines that are alike"
        )
    if bad := [size for row in rows for size in row if not 0 <= size < float("inf")]:
        raise ValueError(f"sizes holds {bad[0]}; accepted is finite numbers of 0 or more")
    return rows


def _least_largest(ends: Sequence[Sequence[float]]) -> float:
    """Return the least that the largest group can be, one group a stage.

    `best[end]` is the answer for the first `end` units in the groups so far. A group from `start`
    to `end` makes it the larger of `best[start]` and the group's size. The later it starts, the
    smaller the group; so as `end` grows, the start from which on `best` is the larger moves
    forward alone, and all ends of a stage together take one walk over the units.
    """
    num_units, num_stages = len(ends[0]) - 1, len(ends)
    best: list[float] = [0.0, *[inf] * num_units]
    for stage, upto in enumerate(ends):
        longer = [inf] * (num_units + 1)
        start, least = stage, deque[int]()  # starts from `start` on whose `best` rises
        # Each stage before has one unit at least, and each after it.
        for end in range(stage + 1, num_units - num_stages + stage + 2):
            while least and best[least[-1]] >= best[end - 1]:
                least.pop()
            least.append(end - 1)
            while least and best[least[0]] < upto[end] - upto[start]:
                start += 1
                if least[0] < start:
                    least.popleft()
            before = best[least[0]] if least else inf
            longer[end] = min(before, upto[end] - upto[start - 1]) if start > stage else before
        best = longer
    return best[-1]


def _reachable(ends: Sequence[Sequence[float]], limit: float) -> list[tuple[int, int]]:
    """Return the first and the last end that each group may have if none is above `limit`."""
    num_units, num_stages = len(ends[0]) - 1, len(ends)
    firsts, lasts = [num_units], [0]
    for stage, upto in enumerate(ends):
        begin, most = lasts[-1], num_units - num_stages + stage + 1
        fits = bisect_right(range(most + 1), limit, begin, key=lambda end: upto[end] - upto[begin])
        lasts.append(fits - 1)
    for stage in reversed(range(1, num_stages)):
        upto, end = ends[stage], firsts[-1]
        fits = bisect_left(range(end), -limit, key=lambda start: upto[start] - upto[end])
        firsts.append(max(fits, stage))
    return list(zip(reversed(firsts), lasts[1:], strict=True))


def _cheapest(
    ends: Sequence[Sequence[float]], limit: float, prices: Sequence[float] | None
) -> list[int]:
    """Return the lengths of the groups, none above `limit`, whose costs sum to least.

    A cost is the price at the group's end, or the square of its size. Either way the best start of
    a group moves forward with its end (Monge's inequality holds). So the start that is best for an
    end in the middle bounds those of the ends on both sides.
    """
    num_units = len(ends[0]) - 1
    best: dict[int, float] = {0: 0.0}
    starts: list[dict[int, int]] = []
    for upto, (low, high) in zip(ends, _reachable(ends, limit), strict=True):
        longer: dict[int, float] = {}
        chosen: dict[int, int] = {}
        spans = [(low, high, min(best), max(best))]  # ends, and the starts that may be best there
        while spans:
            low, high, first, last = spans.pop()
            if low > high:
                continue
            end = (low + high) // 2
            for start in range(min(last, end - 1), first - 1, -1):
                size = upto[end] - upto[start]
                if size > limit:
                    break
                total = best.get(start, inf) + (size**2 if prices is None else 0)
                if total < inf and total <= longer.get(end, inf):
                    longer[end], chosen[end] = total, start
            if prices is not None and end in longer and end < num_units:
                longer[end] += prices[end - 1]
            spans.append((low, end - 1, first, chosen.get(end, last)))
            spans.append((end + 1, high, chosen.get(end, first), last))
        best = longer
        starts.append(chosen)
    counts, end = [], num_units
    for chosen in reversed(starts):
        counts.append(end - chosen[end])
        end = chosen[end]
    return counts[::-1]


def num_parameters(units: Sequence[Block]) -> list[float]:
    """Return the parameters of each block; one that a block uses twice counts once."""
    return [sum(p.numel() for p in unit.module.parameters()) for unit in units]


def seconds(units: Sequence[Block], sample: object, repeats: int = _REPEATS) -> list[float]:
    """Return the median seconds of a forward and backward of each block in training, here.

    The blocks run on the device they are on, where `sample` must be too, and stay as they are.
    """
    args, kwargs = arguments(sample)
    times: list[float] = []
    outputs: list[Tensor] = []
    with random_state_kept(), torch.enable_grad():
        for unit in units:
            if outputs:
                args, kwargs = (outputs.pop(),), side_inputs(unit, sample)
            # On a copy: gradients, BatchNorm statistics and flags of the model stay as they are.
            module = copy.deepcopy(unit.module).train()
            runs = [_time(unit, module, args, kwargs) for _ in range(repeats + 1)]
            times.append(statistics.median(run for run, _ in runs[1:]))  # the first warms up
            outputs.append(runs[-1][1])
    return times


def _time(
    unit: Block, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[float, Tensor]:
    """Run `module` once on fresh inputs; return the seconds it took and its detached output."""
    args = tuple(_fresh(value) for value in args)
    kwargs = {key: _fresh(value) for key, value in kwargs.items()}
    start = now()
    output = one_tensor(unit, module(*args, **kwargs))
    if output.requires_grad:
        torch.autograd.backward(output, torch.ones_like(output))
    return now() - start, output.detach()


def _fresh(value: object) -> object:
    """A tensor as a stage receives it: it wants a gradient, and an in-place block may use it."""
    if not isinstance(value, Tensor):
        return value
    wants = value.is_floating_point()
    return value.detach().clone().requires_grad_(wants).mul(1) if wants else value.clone()


def check_num_stages(num_stages: int, num_blocks: int) -> None:
    """Raise unless `num_blocks` blocks can fill `num_stages` stages."""
    if isinstance(num_stages, bool) or not isinstance(num_stages, int):
        raise TypeError(
            f"the number of stages is {num_stages!r} ({type(num_stages).__name__}); accepted is "
            "an int of 1 or more"
        )
    if num_stages < 1:
        raise ValueError(f"the number of stages is {num_stages}; accepted is 1 or more")
    if num_stages > num_blocks:
        raise ValueError(
            f"more stages ({num_stages}) than blocks ({num_blocks}); ask for {num_blocks} stages "
            "or fewer, or cut a model of more blocks. A block with a forward of its own is one "
            "unit: name the blocks inside it to cut there"
        )


def _check_slack(slack: float) -> None:
    if not slack >= 0:
        raise ValueError(f"slack is {slack}; accepted is 0 or more, such as 0.25 for 25 %")


def _one_of(argument: str, value: str, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise ValueError(
            f"{argument} is {value!r}; accepted is one of {', '.join(map(repr, accepted))}: "
            f"{nearest(str(value), accepted)}"
        )
