"""The protocol of a bench on several hosts: a job in, turns that begin at one moment, answers out.

A bench gives each host a process with a part in it (`work`), and tells all of them what to do
(`Workers`). Commands are a part's methods. They come in on standard input and answers go out on
standard output, one JSON value a line, so that nothing but what is measured goes over the measured
links.

    parent   {"do": "steps", ...} ──►              1.25 (when to begin) ──►
    worker                          ◄── "ready"    ... the measured work ...    ◄── {"seconds": 0.5}
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias, TypeVar

import torch
import torch.distributed as dist

import mpcomp
from recipes.bench.hosts import HostsUnavailable, Loopback, free_port, open_hosts

T = TypeVar("T")

# Late acknowledgements are still counted: Linux holds one back for 40 ms.
SETTLE_S: Final = 0.06
# From the word to begin until the clock runs; longer than the word takes to reach all workers.
NOTICE_S: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Job:
    """The rank of a worker, and what all are told alike; a bench's own has more fields."""

    rank: int
    size: int
    address: str
    port: int
    device: str
    num_threads: int
    timeout_s: float


class Workers:
    """One process on each host, all of them connected.

    Args:
        hosts: where they run, and what ends them.
        module: run with ``--worker`` and what it is told, as JSON.
        options: of the command; here its threads and timeout.
        told: the fields of the bench's job that `Job` has not.
    """

    def __init__(
        self,
        hosts: Loopback,
        module: str,
        options: argparse.Namespace,
        told: Mapping[str, Any],
    ) -> None:
        self.hosts = hosts
        num_threads = options.threads or max(1, num_cores() // hosts.num_hosts)
        common = {
            **told,
            "size": hosts.num_hosts,
            "address": hosts.address(0),
            "port": free_port(),
            "device": hosts.device,
            "num_threads": num_threads,
            "timeout_s": options.timeout,
        }
        environment = {
            "OMP_NUM_THREADS": str(num_threads),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # or torch warns that the hosts have no names
        }
        self._processes = [
            hosts.start(
                rank,
                [sys.executable, "-m", module, "--worker", json.dumps({"rank": rank, **common})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **environment},
            )
            for rank in range(hosts.num_hosts)
        ]
        self._hear_all()

    def ask(self, do: str, **arguments: Any) -> list[Any]:
        """Lets all carry out a command; their answers."""
        self._tell_all({"do": do, "timed": False, "arguments": arguments})
        return self._hear_all()

    def ask_one(self, rank: int, do: str, **arguments: Any) -> Any:
        """Lets one carry out a command; its answer."""
        self._tell(rank, {"do": do, "timed": False, "arguments": arguments})
        return self._hear(rank)

    def ask_side_by_side(self, do: str, **arguments: Any) -> list[Any]:
        """Lets all carry out a command, as many at a time as the machine has cores; their answers.

        Each has a core to itself, and next to it a neighbour at work, as in a step: cores of one
        machine share its memory, and more where they are virtual ones.
        """
        ranks, at_once = range(len(self._processes)), num_cores()
        answers = []
        for first in ranks[::at_once]:
            together = ranks[first : first + at_once]
            for rank in together:
                self._tell(rank, {"do": do, "timed": False, "arguments": arguments})
            answers += [self._hear(rank) for rank in together]
        return answers

    def begin(self, do: str, **arguments: Any) -> list[Any]:
        """Lets all carry out a command from one moment on; their answers."""
        self._tell_all({"do": do, "timed": True, "arguments": arguments})
        self._hear_all()  # they are ready
        self._tell_all(time.perf_counter() + NOTICE_S)
        return self._hear_all()

    def turn(self, do: str, **arguments: Any) -> tuple[list[Any], list[dict[str, int]]]:
        """`begin`, and what each host's interface counted meanwhile; empty where none does."""
        before = self.hosts.counters()
        answers = self.begin(do, **arguments)
        time.sleep(SETTLE_S)
        pairs = zip(self.hosts.counters(), before, strict=True)
        return answers, [asdict(after - earlier) for after, earlier in pairs]

    def _tell(self, rank: int, value: Any) -> None:
        stdin = self._processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(value) + "\n")
        stdin.flush()

    def _tell_all(self, value: Any) -> None:
        for rank in range(len(self._processes)):
            self._tell(rank, value)

    def _hear(self, rank: int) -> Any:
        """Waits for an answer.

        Raises:
            RuntimeError: the worker ended instead; what it printed says why.
        """
        stdout = self._processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            code = self._processes[rank].wait()
            raise RuntimeError(f"the worker of rank {rank} ended with exit code {code}")
        return json.loads(line)

    def _hear_all(self) -> list[Any]:
        return [self._hear(rank) for rank in range(len(self._processes))]


def choose_hosts(
    stack: contextlib.ExitStack, num_hosts: int, options: argparse.Namespace
) -> Loopback:
    """Network namespaces, or the loopback device where that is asked for or all there is."""
    if not options.loopback:
        try:
            return stack.enter_context(open_hosts(num_hosts, latency_ms=options.latency_ms))
        except HostsUnavailable as error:
            print(f"No network namespaces ({error}): runs over loopback, unlimited.")
    return stack.enter_context(open_hosts(num_hosts, loopback=True))


def rotated(names: Sequence[T], repeat: int) -> list[T]:
    """The order of a repetition: a slow moment of the machine meets another one each time."""
    shift = repeat % len(names)
    return [*names[shift:], *names[:shift]]


# -- the command ---------------------------------------------------------------------------------


def bench_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every bench on several hosts; a bench adds its own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="of torch on each host; by default the cores are shared out")
    add("--latency-ms", type=float, default=0.0, help="of each packet, one way")
    add("--timeout", type=float, default=120.0, help="seconds until a silent peer is an error")
    add("--loopback", action="store_true", help="no namespaces")
    add("--worker", help=argparse.SUPPRESS)
    return parser


def too_small(options: argparse.Namespace, names: Sequence[str]) -> str | None:
    """A complaint about an option that must be at least 1; None if there is none."""
    for name in (*names, "threads"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            return f"{name} is {getattr(options, name)}; pass at least 1"
    return None


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options without those that say where results go."""
    unsaid = ("out", "json", "plot", "worker")
    return {name: value for name, value in vars(options).items() if name not in unsaid}


def write(result: Mapping[str, Any], path: Path | None) -> None:
    """Writes the figures, if that was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """Facts about this machine and its software that a reader of measurements needs."""
    return {
        "cores": num_cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpcomp": mpcomp.__version__,
    }


# -- the other end: in the worker ----------------------------------------------------------------

#: Waits for the moment at which all workers begin, and returns it (`time.perf_counter`).
Begin: TypeAlias = Callable[[], float]
AnyJob = TypeVar("AnyJob", bound=Job)


def work(told: str, job_type: type[AnyJob], part_of: Callable[[AnyJob], Any]) -> None:
    """Joins the others, then carries out commands until standard input ends.

    Args:
        told: the job, as JSON.
        job_type: of the bench.
        part_of: makes this rank's part, whose methods are the commands; what `Workers.begin` lets
            it do has a first argument, a `Begin`.
    """
    answers = _own_stdout()
    job = job_type(**json.loads(told))

    def begin() -> float:
        _say(answers, "ready")
        moment = float(json.loads(sys.stdin.readline()))
        time.sleep(max(0.0, moment - time.perf_counter()))
        return moment

    with _joined(job):
        part = part_of(job)
        _say(answers, {"joined": job.rank})
        for line in sys.stdin:
            command = json.loads(line)
            timed = (begin,) if command["timed"] else ()
            _say(answers, getattr(part, command["do"])(*timed, **command["arguments"]))


def _own_stdout() -> TextIO:
    """The answers' way out; whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


@contextlib.contextmanager
def _joined(job: Job) -> Iterator[None]:
    """A process group with the other workers."""
    torch.set_num_threads(job.num_threads)
    os.environ["GLOO_SOCKET_IFNAME"] = job.device
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{job.address}:{job.port}",
        rank=job.rank,
        world_size=job.size,
        timeout=timedelta(seconds=job.timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
