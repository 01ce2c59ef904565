"""Processes on hosts that are told what to do over their standard input, and its other end.

One JSON value a line, and answers on standard output, so that nothing but what is measured goes
over the measured links.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist

import mpcomp
from recipes.bench.hosts import HostsUnavailable, Loopback, open_hosts


class Worker:
    """The process of one host, as its parent sees it."""

    def __init__(self, rank: int, process: subprocess.Popen[str]) -> None:
        self.rank, self._process = rank, process

    def tell(self, value: Any) -> None:
        """Sends it one JSON value."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Waits for its answer.

        Raises:
            RuntimeError: it ended instead; what it printed says why.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"the worker of stage {self.rank} ended with exit code {code}")
        return json.loads(line)

    def ask(self, value: Any) -> Any:
        """Sends it one value and waits for its answer."""
        self.tell(value)
        return self.hear()


def choose_hosts(
    stack: contextlib.ExitStack, num_hosts: int, *, latency_ms: float, loopback: bool
) -> Loopback:
    """Network namespaces, or the loopback device where that is asked for or all there is."""
    if not loopback:
        try:
            return stack.enter_context(open_hosts(num_hosts, latency_ms=latency_ms))
        except HostsUnavailable as error:
            print(f"No network namespaces ({error}): runs over loopback, unlimited.")
    return stack.enter_context(open_hosts(num_hosts, loopback=True))


def start_workers(
    hosts: Loopback, module: str, common: Mapping[str, Any], num_threads: int
) -> list[Worker]:
    """One process on each host, all of them connected; told ``common`` and their rank.

    Args:
        hosts: where they run, and what ends them.
        module: run with ``--worker`` and what it is told, as JSON.
        common: what all are told alike.
        num_threads: of torch in each.
    """
    environment = {
        "OMP_NUM_THREADS": str(num_threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # or torch warns that the hosts have no names
    }
    workers = []
    for rank in range(hosts.num_hosts):
        process = hosts.start(
            rank,
            [sys.executable, "-m", module, "--worker", json.dumps({"rank": rank, **common})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        workers.append(Worker(rank, process))
    for worker in workers:
        worker.hear()
    return workers


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """What a reader of measurements must know about this machine and its software."""
    return {
        "cores": num_cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpcomp": mpcomp.__version__,
    }


# -- the other end: in the worker ----------------------------------------------------------------


def own_stdout() -> TextIO:
    """The answers' way out; whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def say(answers: TextIO, value: Any) -> None:
    """Answers the parent."""
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def begin_together(answers: TextIO) -> float:
    """Waits for the moment at which all workers begin, and returns it (`time.perf_counter`)."""
    say(answers, "ready")
    begin = float(json.loads(sys.stdin.readline()))
    time.sleep(max(0.0, begin - time.perf_counter()))
    return begin


def begin_all(workers: Sequence[Worker], command: Any, notice_s: float) -> list[Any]:
    """Lets all workers carry out a command from one moment on; their answers."""
    answers = []
    for worker in workers:
        worker.tell(command)
    for worker in workers:
        worker.hear()
    begin = time.perf_counter() + notice_s
    for worker in workers:
        worker.tell(begin)
    for worker in workers:
        answers.append(worker.hear())
    return answers


@contextlib.contextmanager
def joined(
    *,
    rank: int,
    size: int,
    address: str,
    port: int,
    device: str,
    num_threads: int,
    timeout_s: float,
) -> Iterator[None]:
    """A process group with the other workers."""
    torch.set_num_threads(num_threads)
    os.environ["GLOO_SOCKET_IFNAME"] = device
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
