"""Bad links: packets that are lost, long ways, blackouts, and a cable that stays cut.

    sudo python -m recipes.bench.bad_links
    sudo python -m recipes.bench.bad_links --hosts 4 --latency-ms 100 --timeout 60 --out bad.json
    sudo python -m recipes.bench.bad_links --repeats 3

A small model trains on hosts of their own (`recipes.bench.hosts`), every row from the beginning and
with the same data: in peace, while 1 % and 5 % of all packets are lost both ways, and through a
blackout of host 1. What TCP bridges must leave no trace: each loss is compared bit for bit with
that of the quiet row. In the last row host 1 is cut off for good, and every rank must end with an
error within the timeout and 5 s, which names the link.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

import mpcomp
from recipes.bench import workers
from recipes.bench.hosts import HostsUnavailable, Loopback, open_hosts
from recipes.bench.training_worker import BATCHES, ROWS, WIDTH, model

QUIET: Final = "quiet"
CUT: Final = "cut off for good"
#: Seconds into a run at which something happens to its links.
SETTLED_S: Final = 1.0
#: Over the timeout, in which every rank has ended.
GRACE_S: Final = 5.0
HEADERS: Final = ("links", "runs", "steps", "differing losses", "seconds a step, × quiet", "ended")


@dataclass(frozen=True, kw_only=True)
class Job(workers.Job):
    """The methods of the cuts."""

    act: str
    grad: str


class Part:
    """One host's stage.

    Args:
        job: of this rank.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def build(self) -> None:
        """A new pipeline, which begins with the same weights each time."""
        torch.manual_seed(0)
        job = self._job
        self._pipe = mpcomp.pipeline(
            model(2 * job.size),
            chunks=2 * job.size,
            act_comp=job.act,
            grad_comp=job.grad,
            loss_fn=nn.functional.mse_loss,
            timeout=job.timeout_s,
        )

    def train(self, begin: workers.Begin, steps: int) -> dict[str, Any]:
        """The losses of its steps, in hexadecimal, their seconds, and the error that ended them."""
        optimizer = torch.optim.Adam(self._pipe.parameters(), lr=1e-3)
        losses: list[str] = []
        error = None
        began = begin()
        try:
            for step in range(steps):
                drawn = torch.Generator().manual_seed(step % BATCHES)
                x = torch.randn(ROWS * self._job.size, WIDTH, generator=drawn)
                loss = float(self._pipe.forward_backward(x, x.roll(1, 1)))
                losses.append(loss.hex())
                optimizer.step()
                optimizer.zero_grad()
        except mpcomp.PeerError as ended:
            error = str(ended)
        return {"losses": losses, "seconds": time.perf_counter() - began, "error": error}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains over every kind of links and prints the table.

    Raises:
        SystemExit: a loss differs, a run that TCP could bridge has failed, or one that it could
            not did not end in time.
    """
    options = _parse(argv)
    if options.worker:
        workers.work(options.worker, Job, Part)
        return
    try:
        with open_hosts(options.hosts, latency_ms=options.latency_ms) as hosts:
            rows = [
                row
                for _ in tqdm(range(options.repeats), unit="repeat")
                for row in _measure(hosts, options)
            ]
    except HostsUnavailable as error:
        sys.exit(f"error: {error}")
    workers.write(
        {"settings": workers.settings_of(options), **workers.machine(), "bad_links": rows},
        options.out,
    )
    print(table(rows))
    if wrong := list(dict.fromkeys(row["links"] for row in rows if not row["right"])):
        sys.exit(f"error: not as it has to be: {', '.join(wrong)}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = workers.bench_parser("recipes.bench.bad_links", __doc__)
    parser.set_defaults(latency_ms=5.0, timeout=60.0)
    add = parser.add_argument
    add("--hosts", type=int, default=2)
    add("--steps", type=int, default=30)
    add("--repeats", type=int, default=1)
    add("--blackout-s", type=float, default=30.0)
    add("--act", default="ef21+topk:0.1", metavar="SPEC")
    add("--grad", default="ef21+topk:0.1", metavar="SPEC")
    add("--out", type=Path, help="results (.json)")
    options = parser.parse_args(argv)
    if complaint := workers.too_small(options, ("hosts", "steps", "repeats")):
        parser.error(complaint)
    if options.hosts < 2 or options.loopback:
        parser.error("expected two hosts or more, in namespaces: loopback loses nothing")
    return options


def _measure(hosts: Loopback, options: argparse.Namespace) -> list[dict[str, Any]]:
    everyone = range(options.hosts)
    blackout = f"{options.blackout_s:g} s without host 1"
    #: Links -> at which second which hosts begin to lose what share of their packets.
    happening: dict[str, list[tuple[float, Sequence[int], float]]] = {
        QUIET: [],
        "1 % lost": [(0, everyone, 0.01)],
        "5 % lost": [(0, everyone, 0.05)],
        blackout: [(SETTLED_S, [1], 1.0), (SETTLED_S + options.blackout_s, [1], 0.0)],
        CUT: [(SETTLED_S, [1], 1.0)],
    }
    team = workers.Workers(
        hosts,
        "recipes.bench.bad_links",
        options,
        {"act": options.act, "grad": options.grad},
    )
    rows: list[dict[str, Any]] = []
    for links, events in tqdm(happening.items(), unit="row", leave=False):
        # Long enough that what happens to the links does so during training.
        long = links in (blackout, CUT)
        steps = max(options.steps, _steps_within(rows[0], 2 * SETTLED_S) if long else 0)
        team.ask("build")
        with _happening(hosts, events):
            answers = team.begin("train", steps=steps)
        for host in everyone:
            hosts.lose(host, 0.0)
        rows.append(_row(links, answers, rows[0] if rows else None, options.timeout))
    return rows


def _steps_within(quiet: Mapping[str, Any], seconds: float) -> int:
    per_second: float = len(quiet["losses"]) / quiet["seconds"]
    return math.ceil(per_second * seconds)


@contextlib.contextmanager
def _happening(hosts: Loopback, events: Sequence[tuple[float, Sequence[int], float]]) -> Any:
    timers = []
    for when, whom, share in events:
        for host in whom:
            timers.append(threading.Timer(when, hosts.lose, [host, share]))
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()


def _row(
    links: str,
    answers: Sequence[Mapping[str, Any]],
    quiet: Mapping[str, Any] | None,
    timeout_s: float,
) -> dict[str, Any]:
    losses = answers[0]["losses"]
    alike = all(answer["losses"][: len(losses)] == losses for answer in answers)
    expected = losses if quiet is None else quiet["losses"]
    shared = min(len(losses), len(expected))
    differing = sum(a != b for a, b in zip(losses[:shared], expected[:shared], strict=True))
    seconds = max(answer["seconds"] for answer in answers)
    errors = [answer["error"] for answer in answers]
    if links == CUT:
        ended = all(errors) and seconds <= SETTLED_S + timeout_s + GRACE_S
    else:
        ended = not any(errors)
    return {
        "links": links,
        "losses": losses,
        "differing_losses": differing,
        "seconds": seconds,
        "errors": errors,
        "right": ended and alike and not differing,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, of all repeats, and what each rank said at the end of the last row."""
    by_links: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_links.setdefault(row["links"], []).append(row)
    cells = [
        [
            links,
            len(of_links),
            sum(len(row["losses"]) for row in of_links),
            sum(row["differing_losses"] for row in of_links),
            "" if links == CUT else _times(of_links, by_links[QUIET]),
            _ended(of_links),
        ]
        for links, of_links in by_links.items()
    ]
    said = [f"rank {rank}: {error}" for rank, error in enumerate(rows[-1]["errors"]) if error]
    return "\n".join([tabulate(cells, HEADERS, disable_numparse=True), *said])


def _times(rows: Sequence[Mapping[str, Any]], quiet: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of a step over those of a quiet one of the same repeat: the median, and all."""
    times = [_step_s(row) / _step_s(of_quiet) for row, of_quiet in zip(rows, quiet, strict=True)]
    spread = f" ({min(times):.1f} to {max(times):.1f})" if min(times) < max(times) else ""
    return f"{statistics.median(times):.1f}{spread}"


def _step_s(row: Mapping[str, Any]) -> float:
    seconds: float = row["seconds"]
    return seconds / len(row["losses"])


def _ended(rows: Sequence[Mapping[str, Any]]) -> str:
    failed = [row["seconds"] for row in rows if any(row["errors"])]
    if not failed:
        return "well"
    return f"errors on {len(failed)} of {len(rows)}, after {max(failed):.1f} s at the latest"


if __name__ == "__main__":
    main()
