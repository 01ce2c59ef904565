"""Parts of the reports of benches: medians with quartiles, ratios within a repetition, traffic."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from recipes.bench.link_bound import header_bytes

Record = Mapping[str, Any]
K = TypeVar("K", bound=Hashable)

# Of torch's own variants; those of mpcomp are in colours.
GREYS = ("#000000", "#6e6e6e", "#a8a8a8")


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of one value itself."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    return {"median": statistics.median(values), "quartiles": quartiles(values)}


def spread_of_any(values: Sequence[float]) -> dict[str, Any] | None:
    """`spread`; None of no values."""
    return spread(values) if values else None


def grouped(records: Iterable[Record], key: Callable[[Record], K]) -> dict[K, list[Record]]:
    """The records of each key, in the order of measurement."""
    groups: dict[K, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def ratios(above: Sequence[Record], below: Sequence[Record], key: str = "seconds") -> list[float]:
    """Quotients of what was measured in the same repetition."""
    return [one[key] / other[key] for one, other in zip(above, below, strict=True)]


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean; None where nothing is known."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


PREDICTION_HEADERS = ("predicted, ms", "error")


def prediction_cells(figure: Record) -> tuple[str, str]:
    """The prediction of a plan, and by how much it differs from the median."""
    predicted = figure.get("predicted_s")
    if predicted is None:
        return "–", "–"
    return f"{1e3 * predicted:.0f}", f"{100 * _error(figure):+.0f} %"


def prediction_lines(figures: Iterable[Record]) -> list[str]:
    """A sentence on all predictions, if there are any."""
    errors = [abs(_error(figure)) for figure in figures if figure.get("predicted_s") is not None]
    if not errors:
        return []
    return [
        f"predictions: {100 * statistics.median(errors):.0f} % off by the median, "
        f"{100 * max(errors):.0f} % at worst, of {len(errors)} settings"
    ]


def _error(figure: Record) -> float:
    return float(figure["predicted_s"] / figure["seconds"]["median"] - 1)


def counted(turns: Sequence[Record], num_messages: int) -> tuple[float, int] | None:
    """Bytes that all hosts' interfaces sent in a turn, on average, and those of headers in them.

    Args:
        turns: with ``interfaces``.
        num_messages: of a turn.

    Returns:
        None where no interface counts.
    """
    if not turns[0]["interfaces"]:
        return None
    packets, sent = (
        statistics.mean(sum(host[name] for host in turn["interfaces"]) for turn in turns)
        for name in ("tx_packets", "tx_bytes")
    )
    return sent, header_bytes(round(packets), num_messages)


def text(value: Record | None, scale: float, form: str) -> str:
    """The median of a `spread`, in another unit."""
    return "–" if value is None else format(scale * value["median"], form)


def range_of(value: Record | None, scale: float, form: str) -> str:
    """The quartiles of a `spread`, in another unit."""
    if value is None:
        return "–"
    low, high = (format(scale * quartile, form) for quartile in value["quartiles"])
    return f"{low} to {high}"


def both(value: Record | None, scale: float, form: str) -> tuple[str, str]:
    """`text` and `range_of`, for two columns."""
    return text(value, scale, form), range_of(value, scale, form)


def scaled(value: float | None, scale: float, form: str) -> str:
    """A number in another unit."""
    return "–" if value is None else format(scale * value, form)


def times_of(rows: Sequence[Record], name: str, key: str, row: Record) -> str:
    """The median of the variant of a name over that of a row, or "–" where either is missing."""
    of_name = next((one[key] for one in rows if one["variant"] == name), None)
    if of_name is None or row[key] is None:
        return "–"
    return f"{of_name['median'] / row[key]['median']:.2f}"


def rate_text(mbps: float | None) -> str:
    """Rate of links."""
    return "unlimited" if mbps is None else f"{mbps:g} Mbit/s"


def error_bars(spreads: Sequence[Record]) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Medians, and how far the quartiles lie below and above them, for a plot."""
    medians = [one["median"] for one in spreads]
    pairs = [(one["median"], *one["quartiles"]) for one in spreads]
    return medians, ([at - low for at, low, _ in pairs], [high - at for at, _, high in pairs])


def tidy(axes: Any) -> None:
    """A grid, and no frame above and to the right."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
