"""`mpcomp doctor`: what is installed here, and whether machines can train together.

In one process it looks at this machine; started by torchrun it also looks at the others, and at
the links between them. Each problem is one line with its cure, and the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch._C._distributed_c10d import PrefixStore

from mpcomp.api.advice import advise_on_threads, num_cores
from mpcomp.comm import reach
from mpcomp.comm.failures import PeerError
from mpcomp.comm.handshake import exchange, show_secret
from mpcomp.comm.joining import Ranks, join
from mpcomp.comm.mesh import ProcessMesh, launched, meet
from mpcomp.comm.probe import measure_chain
from mpcomp.command.output import print_json
from mpcomp.version import __version__

__all__ = ["add_to"]

#: Without which no pipeline begins, as ranks compare them; then those that are only shown.
COMPARED = ("mpcomp", "torch")
SHOWN = ("python", "torchgpipe", "transformers", "numpy")
EPILOG = """\
examples:
  mpcomp doctor
  mpcomp doctor --json
  mpcomp doctor --listen 29500                on the first machine, and on the others
  mpcomp doctor --connect 10.0.0.1:29500
  torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 -m mpcomp doctor
"""


def add_to(commands: Any) -> None:
    """Adds the command to others."""
    parser = commands.add_parser(
        "doctor",
        help="look at this machine and, under torchrun, at the others and the links to them",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--connect", metavar="HOST:PORT", help="only try whether a port answers, or why not")
    add("--listen", type=int, metavar="PORT", help="only wait at that port for one --connect")
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="of each wait for another machine (default %(default)g)",
    )


def run(options: argparse.Namespace) -> None:
    """Examines and prints; ends the process with status 1 if there are problems.

    Raises:
        ValueError: options make no sense, or a machine cannot be reached.
    """
    if not options.timeout > 0:
        raise ValueError(f"--timeout {options.timeout:g}: pass a positive number of seconds")
    if options.connect is not None:
        host, port = reach.endpoint(options.connect)
        seconds, words = reach.connect(host, port, options.timeout)
        at = f"{options.connect}: answers, connected in {1e3 * seconds:.1f} ms"
        print(f"{at}; mpcomp {words} listens there" if words else at)
        found = {"endpoint": options.connect, "seconds": seconds, "mpcomp": words or None}
        print_json(options, found)
    elif options.listen is not None:
        if not 0 < options.listen < 1 << 16:
            raise ValueError(f"--listen {options.listen}: pass a port between 1 and 65535")
        print(f"waiting at port {options.listen} for mpcomp doctor --connect", flush=True)
        other = reach.listen_once(options.listen, __version__, options.timeout)
        print(f"{other} came: this port can be reached from there")
        print_json(options, {"port": options.listen, "from": other})
    elif launched():
        _examine_together(options)
    else:
        facts = Facts.of_this_process()
        _print([facts])
        notes = _advice(1)
        _print_problems(facts.problems)
        print_json(options, _report([facts], notes, [], facts.problems))
        if facts.problems:
            sys.exit(1)


@dataclass(frozen=True)
class Facts:
    """One process and its machine, as other ranks see them.

    Attributes:
        machine: its name, and torchrun's number of it.
        versions: of packages, by name.
        devices: of the kind that a stage would be on, in words.
        threads: of torch.
        cores: that this process may use.
        memory: of the machine, free and in all, in bytes.
        interface: at which this rank waits for others, "" if there is none.
        address: of the interface.
        towards: the interface that leads to the first machine, if there is one.
        port: at which it listens while it is examined; 0 in one process.
        problems: found so far, each with its cure.
    """

    machine: tuple[str, str]
    versions: dict[str, str]
    devices: str
    threads: int
    cores: int
    memory: tuple[int, int]
    interface: str
    address: str
    towards: str | None
    port: int
    problems: list[str]

    @classmethod
    def of_this_process(cls, port: int = 0) -> Facts:
        """All that can be found out without another process."""
        problems = []
        versions = {"mpcomp": __version__, "torch": torch.__version__.split("+")[0]}
        versions["python"] = platform.python_version()
        for name in SHOWN[1:]:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                versions[name] = "-"
                problems.append(f"{name} is not installed: pip install {name}")
        try:
            interface, address = reach.gloo_address()
        except ValueError as error:
            interface, address = "", ""
            problems.append(str(error))
        memory = psutil.virtual_memory()
        return cls(
            machine=(platform.node(), os.environ.get("GROUP_RANK", "")),
            versions=versions,
            devices=_devices(),
            threads=torch.get_num_threads(),
            cores=num_cores(),
            memory=(memory.available, memory.total),
            interface=interface,
            address=address,
            towards=_towards_first(),
            port=port,
            problems=problems,
        )


def _devices() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _towards_first() -> str | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return reach.towards(host, int(port)) if host and port.isdecimal() else None


# -- several machines --------------------------------------------------------------------------


def _examine_together(options: argparse.Namespace) -> None:
    """Examines all ranks, in the order in which things fail; each machine prints what was found."""
    timeout_s = options.timeout
    try:
        store, rank, num_ranks = meet(timeout_s)
    except RuntimeError as error:
        raise ValueError(_why_no_rendezvous(timeout_s, error)) from error
    ranks = Ranks(PrefixStore("doctor", store), rank, num_ranks, timeout_s)
    try:
        show_secret(ranks)
        everyone, problems = _introduce(ranks)
        prints = rank == _firsts(everyone)[everyone[rank].machine]
        if prints:
            _print(everyone)
            # Counted here, as not all machines have as many.
            notes = _advice(sum(facts.machine == everyone[rank].machine for facts in everyone))
        links = [] if problems else _measure(timeout_s)
        if prints:
            if links:
                _print_links(links)
            _print_problems(problems)
            print_json(options, _report(everyone, notes, links, problems))
        # Torchrun ends a machine's other processes when one fails: the words are out by then.
        exchange(ranks, "printed", True)
    except PeerError as error:
        raise ValueError(str(error)) from error
    if problems:
        sys.exit(1)


def _why_no_rendezvous(timeout_s: float, error: RuntimeError) -> str:
    """The reason why the store does not answer: its port's, or in torch's own words."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        reach.connect(*reach.endpoint(f"{host}:{port}"), timeout_s)
    except ValueError as reason:
        return f"rendezvous at {reason}"
    words = str(error).partition("\n")[0]
    return (
        f"rendezvous at {host}:{port}: the port answers, but no store within {timeout_s:g} s "
        f"({words}). See that no other program has that port, and that MASTER_ADDR and MASTER_PORT "
        "are alike on all machines"
    )


def _introduce(ranks: Ranks) -> tuple[list[Facts], list[str]]:
    """Facts of all ranks, and all problems between them; the same on every rank."""
    try:
        address = reach.gloo_address()[1]
    except ValueError:  # said by the facts, which the other ranks are to hear as well
        address = ""
    server = reach.server_on(address, 0) if address else None
    try:
        own = Facts.of_this_process(server.getsockname()[1] if server else 0)
        everyone = [Facts(**found) for found in exchange(ranks, "facts", asdict(own))]
        everyone = [_with_tuples(facts) for facts in everyone]
        # The server is open until all have tried to reach it.
        unreached = exchange(ranks, "unreached", _unreached(ranks, everyone))
    finally:
        if server:
            server.close()
    problems = [
        f"rank {rank} ({_name(facts)}): {problem}"
        for rank, facts in enumerate(everyone)
        for problem in facts.problems
    ]
    problems += _differences(everyone)
    problems += [problem for of_rank in unreached for problem in of_rank]
    return everyone, list(dict.fromkeys(problems))


def _with_tuples(facts: Facts) -> Facts:
    """Facts as they were before JSON made lists of tuples."""
    name, number = facts.machine
    free, total = facts.memory
    return Facts(**{**asdict(facts), "machine": (name, number), "memory": (free, total)})


def _firsts(everyone: Sequence[Facts]) -> dict[tuple[str, str], int]:
    """The first rank of each machine."""
    return {facts.machine: rank for rank, facts in reversed(list(enumerate(everyone)))}


def _unreached(ranks: Ranks, everyone: Sequence[Facts]) -> list[str]:
    """Problems on the way to other machines, of the first rank of each machine to the others'."""
    own = everyone[ranks.rank]
    firsts = _firsts(everyone)
    if ranks.rank != firsts[own.machine] or not own.port or len(firsts) == 1:
        return []
    here = f"rank {ranks.rank} ({_name(own)})"
    if reach.is_loopback(own.address):
        cure = own.towards if own.towards and own.towards != own.interface else "INTERFACE"
        return [
            f"{here}: waits for the other machines at {own.address} ({own.interface}), where they "
            f"do not find it: export GLOO_SOCKET_IFNAME={cure} on this machine, the interface that "
            "leads to them"
        ]
    others = {
        rank: everyone[rank]
        for rank in firsts.values()
        if rank != ranks.rank
        and everyone[rank].port
        and not reach.is_loopback(everyone[rank].address)
    }
    # Half of the time, so that all have ended while the others still wait for what is found.
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        found = pool.map(lambda other: _why_not(other, ranks.timeout_s / 2), others.values())
        return [
            f"{here} cannot connect to rank {rank} ({_name(everyone[rank])}) at {why}"
            for rank, why in zip(others, found, strict=True)
            if why
        ]


def _why_not(other: Facts, timeout_s: float) -> str:
    try:
        reach.connect(other.address, other.port, timeout_s)
    except ValueError as error:
        return (
            f"{error}. Ranks connect to each other at any free port, not only the rendezvous': "
            "let all TCP ports through between these machines, and see that GLOO_SOCKET_IFNAME "
            "names, on each, the interface towards the other"
        )
    return ""


def _differences(everyone: Sequence[Facts]) -> list[str]:
    """Versions without which ranks would refuse to work together, as two ranks have them."""
    first = everyone[0].versions
    return [
        f"rank {rank} ({_name(facts)}) has {name} {facts.versions[name]}, rank 0 "
        f"({_name(everyone[0])}) has {first[name]}: install the same on both, as in pip install "
        f"{name}=={first[name]}"
        for rank, facts in enumerate(everyone)
        for name in COMPARED
        if facts.versions[name] != first[name]
    ]


def _name(facts: Facts) -> str:
    name, number = facts.machine
    return f"{name}, machine {number}" if number else name


def _measure(timeout_s: float) -> list[tuple[float, float]]:
    """The links between neighbours, (Mbit/s, round trip in seconds); all ranks together."""
    device = torch.device("cpu")
    try:
        join(device, timeout_s, patience_s=timeout_s)
    except RuntimeError as error:
        words = str(error).partition("\n")[0]
        raise ValueError(
            f"gloo could not connect the ranks within {timeout_s:g} s, though their ports answer "
            f"({words}): run it again with TORCH_CPP_LOG_LEVEL=INFO, which shows whom it waits for"
        ) from error
    mesh = ProcessMesh(1, timeout_s, device)
    mesh.connect([f"rank {rank}" for rank in range(mesh.num_ranks)])
    links = measure_chain(mesh)
    mesh.close()
    dist.destroy_process_group()
    return links


# -- what is printed ---------------------------------------------------------------------------


def _print(everyone: Sequence[Facts]) -> None:
    rows = []
    for rank, facts in enumerate(everyone):
        free, total = facts.memory
        at = f"{facts.interface} {facts.address}" if facts.interface else "-"
        rows.append(
            {
                "rank": rank,
                "machine": _name(facts),
                "gloo at": at,
                "device": facts.devices,
                "threads/cores": f"{facts.threads}/{facts.cores}",
                "memory free/all": f"{free / 2**30:.1f}/{total / 2**30:.1f} GiB",
                **{name: facts.versions[name] for name in (*COMPARED, *SHOWN)},
            }
        )
    if len(rows) == 1:
        print(tabulate([row for row in rows[0].items() if row[0] != "rank"], tablefmt="plain"))
        return
    print(tabulate(rows, headers="keys", disable_numparse=True))
    for name in SHOWN:
        found = sorted({facts.versions[name] for facts in everyone})
        if len(found) > 1:
            print(f"note: ranks have {name} {' and '.join(found)}, which no run refuses")


def _advice(local_ranks: int) -> list[str]:
    """Prints advice on this machine's threads, and gives it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        advise_on_threads(local_ranks)
    notes = [str(warning.message) for warning in caught]
    for note in notes:
        print(f"note: {note}")
    return notes


def _print_links(links: Sequence[tuple[float, float]]) -> None:
    rows = [
        {
            "link": f"rank {rank} to {rank + 1}",
            "Mbit/s": f"{mbps:.4g}",
            "empty round trip": f"{1e3 * seconds:.2f} ms",
        }
        for rank, (mbps, seconds) in enumerate(links)
    ]
    print("", tabulate(rows, headers="keys", disable_numparse=True), sep="\n")


def _print_problems(problems: Sequence[str]) -> None:
    print("", *(f"problem: {problem}" for problem in problems), sep="\n")
    if not problems:
        print("no problem found")
    sys.stdout.flush()


def _report(
    everyone: Sequence[Facts],
    notes: Sequence[str],
    links: Sequence[tuple[float, float]],
    problems: Sequence[str],
) -> dict[str, Any]:
    """All that was found, as JSON can hold it."""
    return {
        "ranks": [asdict(facts) for facts in everyone],
        "notes": notes,
        "links": [
            {"from": rank, "to": rank + 1, "mbps": mbps, "round_trip_ms": 1e3 * seconds}
            for rank, (mbps, seconds) in enumerate(links)
        ],
        "problems": problems,
    }
