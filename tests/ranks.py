"""Several processes for a test: forked from a server that has torch loaded, timed, and ended.

    def work(pipe_arguments):            # at module level: it is found by name
        ...
        return something                 # that can be pickled

    def test(ranks):
        results = ranks(work, 4, arguments)

Each process joins a gloo group over a file store before the function is called, so no port is
needed for the rendezvous. Whatever happens, no process is left when the call returns.

    process = start_python("script.py", "argument", environment={"RANK": "0"}, printed=path)

does what `python script.py argument` would, but for the seconds of its imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
# All that most tests import, as mpcomp itself loads nothing before it is asked for: a rank that had
# to import torch's pipelining and FSDP would take a second of the processor for it.
_PRELOADED = [
    "encodings.idna",  # of addresses
    "torch.profiler._cupti_monitor",  # of the first step
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "mpcomp.api.build",
    "mpcomp.data_parallel.exchange",
    "mpcomp.engines.distributed",
    "mpcomp.engines.torch_stage",
    "mpcomp.links.endpoints.adaptive",
    "mpcomp.links.endpoints.basis",
    "mpcomp.links.endpoints.memory",
    "mpcomp.links.endpoints.selection",
    "pytest",
    "everyday",
    "models",
    "methods",
]
_CONTEXT.set_forkserver_preload([*_PRELOADED, "frozen"])


def preload(*modules: str) -> None:
    """Lets the server import these as well: for what would take each process seconds.

    To be called where a test's module is imported: the server starts with the first test.
    """
    _PRELOADED.extend(module for module in modules if module not in _PRELOADED)
    _CONTEXT.set_forkserver_preload([*_PRELOADED, "frozen"])


def start_server() -> None:
    """Starts the server, if it is not there, so that it finds what it preloads.

    A process has one: a recipe that runs jobs would start one that has nothing loaded.

    Of itself it looks in the current folder and among installed packages alone, and leaves out in
    silence what is not there: all modules of tests.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class RankFailed(AssertionError):
    """A process raised, died, or did not end in time."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 240.0,
    may_fail: bool = False,
    init: bool = True,
    without: Collection[int] = (),
) -> list[Any]:
    """Calls ``function(*args)`` in each of ``num_ranks`` processes; returns what each returned.

    Args:
        function: at the top level of a module.
        num_ranks: number of processes.
        timeout_s: after which all are killed; for what hangs, as a busy machine takes minutes.
        may_fail: give exceptions, as (type's name, message), and exit codes of those that died,
            in place of results, instead of raising.
        init: join a gloo group first.
        without: ranks that are not waited for, as the test stops them; their result is None.
    """
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(num_ranks):
            here, there = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_main, args=(there, folder, rank, num_ranks, init, function, args)
            )
            process.start()
            there.close()
            processes.append(process)
            ends.append(here)
        try:
            deadline = time.monotonic() + timeout_s
            return _results(processes, ends, deadline, may_fail, without)
        finally:
            for process in processes:
                process.kill()
                process.join()


def start_python(
    *arguments: str,
    printed: Path,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
) -> multiprocessing.process.BaseProcess:
    """Starts python's work in a fork of the server; the caller joins or kills the process.

    Args:
        arguments: of `python`: a script's path or ``-m`` and a module, and what that is given.
        printed: file that gets what it prints.
        environment: variables; this process's own and the root in ``PYTHONPATH`` are added.
        folder: the working one, if another.
    """
    start_server()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    process = _CONTEXT.Process(target=_python, args=(arguments, environment, printed, folder))
    process.start()
    return process


def _python(
    arguments: tuple[str, ...], environment: dict[str, str], printed: Path, folder: Path | None
) -> None:
    os.environ.update(environment)
    os.chdir(folder or ".")
    with printed.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if arguments[0] == "-m":
        how, sys.argv = "run_module({!r}, run_name='__main__', alter_sys=True)", [*arguments[1:]]
    else:
        how, sys.argv = "run_path({!r}, run_name='__main__')", [*arguments]
    code = "import runpy; runpy." + how.format(sys.argv[0])
    # By the interpreter itself, which ends as `python` does, with what it leaves at its end.
    failed = ctypes.pythonapi.PyRun_SimpleString(code.encode())
    ctypes.pythonapi.Py_Exit(1 if failed else 0)


def _results(
    processes: list[Any],
    ends: list[Any],
    deadline: float,
    may_fail: bool,
    without: Collection[int],
) -> list[Any]:
    results: list[Any] = [None] * len(processes)
    waiting = {rank: end for rank, end in enumerate(ends) if rank not in without}
    while waiting:
        ready = multiprocessing.connection.wait(
            list(waiting.values()), timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting)} had not ended when the time was up")
        for rank in [rank for rank, end in waiting.items() if end in ready]:
            end = waiting.pop(rank)
            try:
                failed, value, trace = pickle.loads(end.recv_bytes())
            except EOFError:
                processes[rank].join()
                failed, value, trace = True, ("died", str(processes[rank].exitcode)), ""
            if failed and not may_fail:
                raise RankFailed(f"rank {rank}: {value[0]}: {value[1]}\n{trace}")
            results[rank] = value
    return results


def _main(
    end: Any,
    folder: str,
    rank: int,
    num_ranks: int,
    init: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.pop("WORLD_SIZE", None)
    os.environ["TEST_RANK"] = str(rank)  # for functions that join by themselves
    try:
        if init:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(Path(folder) / "store"), num_ranks),
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=180),
            )
            dist.barrier()  # one that ends at once must not leave while others still connect to it
        result = (False, function(*args), "")
    except BaseException as error:
        result = (True, (type(error).__name__, str(error)), traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        # Not `send`, with which torch would share the memory of tensors, and so of this process.
        end.send_bytes(pickle.dumps(result))
    end.close()
    os._exit(0)  # without destructors, which may wait for peers that are gone
