"""Faults of every kind, drawn at random, of a training on two hosts: `faults --kinds`.

    host 0   torchrun ── rank 0 waits ── its fork trains ─┐        files say which step they are in,
                                                          │ link     and have them do what cannot
    host 1   torchrun ── rank 1 waits ── its fork trains ─┘            be done from outside

Each launcher has a supervisor, which starts it again a second after it has ended with an error, as
``Restart=on-failure`` has systemd do. That is the only help that a run gets; a fault that was meant
to be refused, such as a damaged checkpoint, is mended once that has been said.

Faults are made one after the other: the next is due when all ranks have ended a step after the one
before, and not before its own step. Of each is known what it led to:

* *went on*: the same processes trained on;
* *healed*: `mpcomp.heal` has begun a new attempt;
* *started again*: launchers had ended, and their supervisors have started them;
* *refused*: so after what was wrong was named, before any step, and mended;
* *stuck*: not all ranks have trained again in time, or what was to be refused was not. All
  launchers were killed, as a person would.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tabulate import tabulate
from torch import nn
from tqdm import tqdm

import mpcomp
from recipes.bench.hosts import Loopback, open_hosts
from recipes.bench.training_worker import BEGIN, STEP, Job, differing_weights, model, order

HOSTS: Final = 2
PORT: Final = 29500
#: Seconds before a supervisor starts a launcher again.
PAUSE_S: Final = 1.0
#: Seconds in which any fault must be over, besides its own, and the end of a run of fast steps.
LIMIT_S: Final = 240.0
LOOK_S: Final = 0.05
#: Steps in which the last fault can come to its end.
LAST: Final = 10
STUCK: Final = "stuck"
HEADERS: Final = (
    *("method", "fault", "faults", "went on", "healed", "started again", "refused", "stuck"),
    *("seconds", "longest s"),
)


class Stuck(RuntimeError):
    """A run that has not gone on after a fault."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to come.

    Attributes:
        kind: its name.
        step: not before which it comes.
        rank: to which it happens; where it is of a host, to that rank's.
        share: a number from 0 to 1, for whatever else is drawn.
    """

    kind: str
    step: int
    rank: int
    share: float


class Run:
    """A training on two hosts, its supervisors, and what can be done to it.

    Args:
        hosts: two.
        job: of all ranks.
        options: of the command.
    """

    def __init__(self, hosts: Loopback, job: Job, options: argparse.Namespace) -> None:
        self.hosts, self.job, self.options = hosts, job, options
        self.folder = Path(job.folder)
        (self.folder / "temporary").mkdir(parents=True)
        (self.folder / "job.json").write_text(job.written())
        self.ranks = job.stages * job.replicas
        self.checkpoint = self.folder / "checkpoint"
        self.starts = 0
        self._supervised = True
        self._interface = [hosts.device] * HOSTS
        self._ended_at: dict[int, float] = {}
        self.launchers = [self._launch(host) for host in range(HOSTS)]

    # -- supervisors ---------------------------------------------------------------------------

    def _launch(self, host: int) -> subprocess.Popen[str]:
        self.starts += 1
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "temporary"),
            "GLOO_SOCKET_IFNAME": self._interface[host],
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        with self._printed(host).open("a") as printed:
            return self.hosts.start(
                host,
                [
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *(f"--nnodes={HOSTS}", f"--node-rank={host}"),
                    *(f"--master-addr={self.hosts.address(0)}", f"--master-port={PORT}"),
                    f"--nproc-per-node={self.ranks // HOSTS}",
                    *("-m", "recipes.bench.training_worker"),
                    *("--job", str(self.folder / "job.json")),
                ],
                env=environment,
                stdout=printed,
                stderr=printed,
            )

    def _printed(self, host: int) -> Path:
        return self.folder / f"printed-{host}"

    def printed(self) -> str:
        """All that launchers and ranks have printed so far, by host."""
        texts = [self._printed(host).read_text(errors="replace") for host in range(HOSTS)]
        return "\n".join(texts)

    def until(self, is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """Waits, and starts launchers again meanwhile.

        Raises:
            Stuck: it is not so in time.
        """
        deadline = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > deadline:
                raise Stuck(f"{what}, after {limit_s:g} s")
            self._supervise()
            time.sleep(LOOK_S)

    def _supervise(self) -> None:
        for host, launcher in enumerate(self.launchers):
            if self._supervised and launcher.poll():
                ended_at = self._ended_at.setdefault(host, time.monotonic())
                if time.monotonic() - ended_at > PAUSE_S:
                    del self._ended_at[host]
                    self.launchers[host] = self._launch(host)

    # -- looks ---------------------------------------------------------------------------------

    def last_step(self, rank: int) -> dict[str, Any]:
        """A rank's newest step; empty before the first."""
        with (
            suppress(FileNotFoundError),
            (self.folder / f"journal-{rank}.jsonl").open("rb") as file,
        ):
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
            for line in reversed(file.read().split(b"\n")[:-1]):
                with suppress(json.JSONDecodeError):  # a kill has cut it off
                    found: dict[str, Any] = json.loads(line)
                    return found
        return {}

    def trains_since(self, moment: float) -> None:
        """Waits until all ranks have ended a step that they began after a moment."""
        self.until(
            lambda: all(self.last_step(r).get("began", 0) > moment for r in range(self.ranks)),
            "not all ranks train again",
        )

    def comes_to(self, step: int) -> None:
        """Waits until the training has come to a step."""
        self.until(
            lambda: self.last_step(0).get("step", -1) >= step,
            f"no step {step}",
            LIMIT_S + self.job.steps,
        )

    # -- what is done to it --------------------------------------------------------------------

    def host_of(self, rank: int) -> int:
        """The host of a rank."""
        return rank * HOSTS // self.ranks

    def send(self, pids: Iterable[int], number: signal.Signals) -> None:
        """Sends a signal to processes, but for those that have gone."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal_fork(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to the process that trains."""
        self.send([self.last_step(rank)["pid"]], number)

    def end_launcher(self, host: int, pids: Iterable[int], number: signal.Signals) -> None:
        """Sends a signal to processes, and waits until their launcher has been started again."""
        launcher = self.launchers[host]
        self.send(pids, number)
        self.until(lambda: self.launchers[host] is not launcher, f"host {host} trains on")

    def have(self, rank: int, when: str, what: str) -> None:
        """Has a rank do something, and waits until it does."""
        path = self.tell(rank, when, what)
        self.until(lambda: not path.exists(), f"rank {rank} does not come to {what}")

    def tell(self, rank: int, when: str, what: str) -> Path:
        """Tells a rank what to do; the file, which is gone when it does."""
        path = order(self.job.folder, when, rank)
        beside = path.with_suffix(".new")
        beside.write_text(what)
        return beside.rename(path)

    def refused(self, spoil: Callable[[], Callable[[], None]], words: str) -> None:
        """Ends the run, spoils something, and mends it when all launchers have ended with words.

        Args:
            spoil: does so; returns what mends it.
            words: printed by some rank.
        """
        self._supervised = False
        self.launchers[0].terminate()
        self._all_end()
        before, steps = self.printed().count(words), self._steps()
        mend = spoil()
        try:
            for host in range(HOSTS):
                self.launchers[host] = self._launch(host)
            self._all_end()
        finally:
            mend()
            self._supervised = True
        if self.printed().count(words) == before:
            raise Stuck(f"nobody said {words!r}")
        if self._steps() != steps:
            raise Stuck(f"a step was trained before {words!r} was said")

    def begin_anew(self) -> None:
        """Kills all launchers, and has the supervisors start them again."""
        for launcher in self.launchers:
            launcher.kill()
        self._interface = [self.hosts.device] * HOSTS
        self._supervised = True

    def _all_end(self) -> None:
        self.until(lambda: all(one.poll() is not None for one in self.launchers), "none ends")

    def _steps(self) -> list[dict[str, Any]]:
        return [self.last_step(rank) for rank in range(self.ranks)]

    def ends(self) -> float | None:
        """Waits for the training's end; seconds from it to the launchers', None if they stay."""
        self.until(
            lambda: all((self.folder / f"weights-{r}.pt").exists() for r in range(self.ranks)),
            "the training does not come to its end",
            LIMIT_S + self.job.steps,
        )
        began = time.monotonic()
        # torchrun waits five minutes for launchers whose connection to its store was reset.
        with suppress(Stuck):
            self.until(lambda: all(p.poll() == 0 for p in self.launchers), "", 2 * LIMIT_S)
            return time.monotonic() - began
        return None


# -- kinds ---------------------------------------------------------------------------------------


def kill(run: Run, fault: Fault) -> None:
    run.signal_fork(fault.rank, signal.SIGKILL)


def connect_kill(run: Run, fault: Fault) -> None:
    """A second rank dies while the others connect to it, after a first one's death."""
    other = (fault.rank + 1) % run.ranks
    run.tell(other, BEGIN, f"die {0.1 * fault.share}")
    run.signal_fork(fault.rank, signal.SIGKILL)
    run.until(lambda: not order(run.job.folder, BEGIN, other).exists(), "no attempt begins")


def exchange_kill(run: Run, fault: Fault) -> None:
    """A rank dies in the optimizer's step, in which Local SGD exchanges parameters."""
    run.have(fault.rank, STEP, f"die {0.01 * fault.share}")


def hang(run: Run, fault: Fault) -> None:
    """A rank hangs before it joins, in the attempt after a death."""
    run.tell(fault.rank, BEGIN, "hang")
    run.signal_fork(fault.rank, signal.SIGKILL)
    run.until(lambda: not order(run.job.folder, BEGIN, fault.rank).exists(), "no attempt begins")


def stop(run: Run, fault: Fault) -> None:
    run.signal_fork(fault.rank, signal.SIGSTOP)


def loop(run: Run, fault: Fault) -> None:
    run.have(fault.rank, STEP, "loop")


def reset(run: Run, fault: Fault) -> None:
    run.hosts.reset(run.host_of(fault.rank))


def away(run: Run, fault: Fault) -> None:
    """The link is away: for half to twice `timeout=`, or as long as was asked for."""
    asked: float | None = run.options.away_s
    seconds = asked if asked is not None else run.job.timeout_s * (0.5 + 1.5 * fault.share)
    host = run.host_of(fault.rank)
    run.hosts.unplug(host)
    try:
        end = time.monotonic() + seconds
        run.until(lambda: time.monotonic() > end, "", seconds + LIMIT_S)
    finally:
        run.hosts.plug_in(host)


def silent(run: Run, fault: Fault) -> None:
    """The store of the rendezvous is silent, while a rank dies on the other host."""
    run.launchers[0].send_signal(signal.SIGSTOP)
    try:
        run.signal_fork(run.ranks - 1, signal.SIGKILL)
        time.sleep(10 * fault.share)
    finally:
        run.launchers[0].send_signal(signal.SIGCONT)


def launcher_kill(run: Run, fault: Fault) -> None:
    host = run.host_of(fault.rank)
    run.end_launcher(host, [run.launchers[host].pid], signal.SIGKILL)


def sigterm(run: Run, fault: Fault) -> None:
    host = run.host_of(fault.rank)
    run.end_launcher(host, [run.launchers[host].pid], signal.SIGTERM)


def sigterm_all(run: Run, fault: Fault) -> None:
    """SIGTERM to all processes of a host, loaders' workers too, as systemd ends a service."""
    host = run.host_of(fault.rank)
    run.end_launcher(host, run.hosts.pids(host), signal.SIGTERM)


def returns(run: Run, fault: Fault) -> None:
    """A rank returns early, a mistake of the script that is not tried again."""
    run.have(fault.rank, STEP, "return")


def nan(run: Run, fault: Fault) -> None:
    """A rank's gradients are NaN, and so are its weights."""
    run.have(fault.rank, STEP, "nan")


def damage(run: Run, fault: Fault) -> None:
    """The first file of the checkpoint is damaged, or missing."""
    path = run.checkpoint / "checkpoint.json"

    def spoil() -> Callable[[], None]:
        good = path.read_bytes()
        version = {**json.loads(good), "version": 999}
        ways = [bytes(len(good)), b"", _flipped(good, fault.share), json.dumps(version).encode()]
        way = int((len(ways) + 1) * fault.share)
        path.write_bytes(ways[way]) if way < len(ways) else path.unlink()
        return lambda: _write(path, good)

    run.refused(spoil, "checkpoint")


def flipped_part(run: Run, fault: Fault) -> None:
    """A bit is flipped in one of the checkpoint's other files."""

    def spoil() -> Callable[[], None]:
        parts = [p for p in sorted(run.checkpoint.rglob("*.safetensors")) if p.stat().st_size]
        path = parts[int(len(parts) * fault.share)]
        good = path.read_bytes()
        path.write_bytes(_flipped(good, fault.share))
        return lambda: _write(path, good)

    run.refused(spoil, "checkpoint")


def host_name(run: Run, fault: Fault) -> None:
    """A host waits for the others at its own loopback, as with Debian's 127.0.1.1."""
    host = run.host_of(fault.rank)

    def spoil() -> Callable[[], None]:
        good, run._interface[host] = run._interface[host], "lo"
        return lambda: run._interface.__setitem__(host, good)

    run.refused(spoil, "waits for the others at 127.0.0.1")


def own_file(run: Run, fault: Fault) -> None:
    """A file of the user's lies in the checkpoint's folder; `measure` looks for it in the end."""
    (run.checkpoint / f"yours-{fault.step}.txt").write_text("a tokenizer, say")


def second_run(run: Run, fault: Fault) -> None:
    """Another run saves into the folder."""
    other = mpcomp.pipeline(model(2), chunks=1, split=2, loss_fn=nn.functional.mse_loss)
    try:
        other.save(run.checkpoint)
    except ValueError:
        return
    raise Stuck("another run has written the folder")


def _flipped(good: bytes, share: float) -> bytes:
    changed = bytearray(good)
    changed[int(len(good) * share)] ^= 1
    return bytes(changed)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


KINDS: Final[Mapping[str, Callable[[Run, Fault], None]]] = {
    "kill": kill,
    "connect-kill": connect_kill,
    "exchange-kill": exchange_kill,
    "hang": hang,
    "stop": stop,
    "loop": loop,
    "reset": reset,
    "away": away,
    "silent-store": silent,
    "launcher-kill": launcher_kill,
    "sigterm": sigterm,
    "sigterm-all": sigterm_all,
    "early-return": returns,
    "nan": nan,
    "damage": damage,
    "flipped-part": flipped_part,
    "host-name": host_name,
    "own-file": own_file,
    "second-run": second_run,
}
REFUSED: Final = ("damage", "flipped-part", "host-name")


def parse_kinds(text: str) -> dict[str, int]:
    """Kinds of faults and how many of each, 0 for those that are drawn.

    Args:
        text: ``reset,stop`` or ``reset:50,away:3``; ``all`` for all.

    Raises:
        ValueError: there is no such kind, or number of them.
    """
    if text == "all":
        return dict.fromkeys(KINDS, 0)
    found = {}
    for item in text.split(","):
        name, colon, number = item.strip().partition(":")
        if name not in KINDS or (colon and not (number.isdecimal() and int(number))):
            raise ValueError(
                f"--kinds {item!r}: expected NAME or NAME:NUMBER of all, {', '.join(KINDS)}"
            )
        found[name] = int(number or 0)
    return found


def drawn(options: argparse.Namespace, ranks: int) -> list[Fault]:
    """The faults of a run, at random steps of equal parts of it."""
    draws = random.Random(options.seed)
    kinds = [name for name, number in options.kinds.items() for _ in range(number)]
    free = [name for name, number in options.kinds.items() if not number]
    kinds += [draws.choice(free) for _ in range(options.faults if free else 0)]
    draws.shuffle(kinds)
    period = (options.steps - LAST) / len(kinds)
    return [
        Fault(
            kind=kind,
            step=int(period * (number + draws.random())),
            rank=draws.randrange(ranks),
            share=draws.random(),
        )
        for number, kind in enumerate(kinds)
    ]


def measure(method: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row: the quiet run, the other, and what each fault led to."""
    ranks = options.ranks
    quiet = Job.of(
        method,
        ranks,
        folder / "quiet",
        steps=options.steps,
        save_every=options.save_every,
        step_s=options.step_s,
        restarts=10 * options.steps,
        calls=2,
        loaders=1,
        timeout_s=options.timeout,
    )
    windy = replace(quiet, folder=str(folder / "windy"))
    events: list[dict[str, Any]] = []
    with open_hosts(HOSTS) as hosts:
        Run(hosts, replace(quiet, calls=1), options).ends()
        run = Run(hosts, windy, options)
        faults = drawn(options, ranks)
        begin = time.monotonic()
        for fault in tqdm(faults, unit="fault", leave=False):
            if time.monotonic() - begin > 60 * options.minutes:
                break
            run.comes_to(fault.step)
            time.sleep(_step_s(quiet) * fault.share)
            events.append(_event(run, fault))
            if events[-1]["outcome"] == STUCK:
                _keep(run, options, events[-1])
                run.begin_anew()
        ending_s = run.ends()
    calm, steps = quiet.journals(), windy.journals()
    expected = {step["step"]: step["loss"] for step in calm[0]}
    everything = [step for of_rank in steps for step in of_rank]
    kept_files = {p.name for p in (Path(windy.folder) / "checkpoint").glob("yours-*")}
    files = {f"yours-{event['step']}.txt" for event in events if event["kind"] == "own-file"}
    return {
        "method": method,
        "steps": options.steps,
        "faults": len(events),
        "differing_losses": sum(step["loss"] != expected[step["step"]] for step in everything),
        "differing_weights": differing_weights(quiet, windy, ranks),
        "lost_files": len(files - kept_files),
        "step_s": _step_s(quiet),
        "ending_s": ending_s,
        "events": events,
    }


def _keep(run: Run, options: argparse.Namespace, event: Mapping[str, Any]) -> None:
    """Keeps what was printed up to a fault that ended badly, and says where."""
    where = (options.out or Path("faults.json")).with_suffix(f".{event['step']}.printed")
    where.write_text(f"{event}\n{run.printed()}")
    tqdm.write(f"{event['kind']} in step {event['step']}: {event['why']}; see {where}")


def _step_s(quiet: Job) -> float:
    return float(statistics.median(s["ended"] - s["began"] for s in quiet.journals()[0]))


def _event(run: Run, fault: Fault) -> dict[str, Any]:
    """Makes a fault, waits until all ranks train again, and says what it has led to."""
    starts, pids = run.starts, [run.last_step(r)["pid"] for r in range(run.ranks)]
    event = {"kind": fault.kind, "step": fault.step, "rank": fault.rank}
    began = time.time()
    try:
        KINDS[fault.kind](run, fault)
        made = time.time()
        run.trains_since(made)
    except Stuck as stuck:
        return {**event, "outcome": STUCK, "why": str(stuck), "seconds": time.time() - began}
    after = [run.last_step(r) for r in range(run.ranks)]
    if fault.kind in REFUSED:
        outcome = "refused"
    elif run.starts > starts:
        outcome = "started again"
    else:
        outcome = "went on" if [step["pid"] for step in after] == pids else "healed"
    return {
        **event,
        "outcome": outcome,
        "made_s": made - began,
        "seconds": max(step["began"] for step in after) - began,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of what each kind led to, and lines of what was other than in peace."""
    cells = []
    for row in rows:
        for kind in sorted({event["kind"] for event in row["events"]}, key=list(KINDS).index):
            events = [event for event in row["events"] if event["kind"] == kind]
            seconds = [event["seconds"] for event in events]
            outcomes = [event["outcome"] for event in events]
            cells.append(
                [
                    row["method"],
                    kind,
                    len(events),
                    *(outcomes.count(outcome) or "" for outcome in HEADERS[3:8]),
                    f"{statistics.median(seconds):.1f}",
                    f"{max(seconds):.1f}",
                ]
            )
    said = [
        f"{row['method']}: {row['faults']} faults in {row['steps']} steps, "
        f"{row['differing_losses']} differing losses, "
        f"{row['differing_weights']} differing weights, "
        f"{row['lost_files']} lost files"
        for row in rows
    ]
    return "\n".join([tabulate(cells, HEADERS, disable_numparse=True), "", *said])
