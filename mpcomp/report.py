"""The report of a pipeline: one row per boundary and direction, as a dict and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tabulate import tabulate

if TYPE_CHECKING:
    from mpcomp.pipe import Pipeline

__all__ = ["print_report", "report_of"]

_PHASES = {"train": "train", "eval": "eval", "eval_off": "eval, off"}
_DIRECTIONS = {"act": "activation ->", "grad": "gradient <-"}


def report_of(pipe: Pipeline) -> dict[str, Any]:
    """All figures under their names; training and evaluation apart."""
    boundaries = []
    for boundary, stage in zip(pipe.boundaries, pipe.cut_stages, strict=False):
        for link in boundary.links:
            boundaries.append(
                {
                    "boundary": link.boundary,
                    "after": stage.block_names[-1],
                    "direction": link.direction,
                    "method": str(link.method),
                    **{phase: t.to_dict() for phase, t in link.meter.phases.items()},
                }
            )
    return {
        "steps": pipe.num_steps,
        "wire_bytes": pipe.wire_bytes,
        "dense_bytes": pipe.dense_bytes,
        "wire_ratio": pipe.wire_bytes / pipe.dense_bytes if pipe.dense_bytes else None,
        "boundaries": boundaries,
    }


def print_report(report: dict[str, Any]) -> None:
    """Prints the table of a report: training, and evaluation where there was any."""
    headers = [
        "cut",
        "after",
        "direction",
        "method",
        "phase",
        "messages",
        "wire MB",
        "dense MB",
        "ratio",
        "rel. error",
        "cosine",
        "coding s",
        "non-finite",
    ]
    rows = []
    for entry in report["boundaries"]:
        for phase, shown in _PHASES.items():
            traffic = entry[phase]
            if traffic["messages"]:
                rows.append(
                    [
                        entry["boundary"],
                        entry["after"],
                        _DIRECTIONS[entry["direction"]],
                        entry["method"],
                        shown,
                        traffic["messages"],
                        f"{traffic['wire_bytes'] / 1e6:.2f}",
                        f"{traffic['dense_bytes'] / 1e6:.2f}",
                        f"{traffic['ratio']:.4f}",
                        f"{traffic['relative_error']:.4f}",
                        f"{traffic['cosine']:.4f}",
                        f"{traffic['seconds']:.2f}",
                        traffic["nonfinite"],
                    ]
                )
    print(tabulate(rows, headers, disable_numparse=True))
    if report["wire_ratio"] is not None:
        print(
            f"training sent {report['wire_bytes'] / 1e6:.2f} MB in {report['steps']} steps, "
            f"{report['wire_ratio']:.4f} of the {report['dense_bytes'] / 1e6:.2f} MB dense"
        )
