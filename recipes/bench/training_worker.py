"""One rank of `recipes.bench.faults` and `recipes.bench.soak`: a small model that trains.

Each rank keeps a journal of its steps, and of what the process holds of the machine.

A kill comes from a thread of the process that it kills, at a moment within a step or a save that
nothing else knows of. Each is done once: a file says so, which is there before the signal. What
`recipes.bench.fault_kinds` has a rank do, once, stands in a file, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader

import mpcomp
from mpcomp.api import launch
from mpcomp.comm.joining import join

WIDTH: Final = 64
ROWS: Final = 8
#: Batches that are met again, so that AQ-SGD has something to remember.
BATCHES: Final = 16
SEED: Final = 0
#: When a rank does what it is told: as an attempt begins, or in a step before the optimizer's.
BEGIN: Final = "begin"
STEP: Final = "step"
#: What marks a method between replicas.
BETWEEN: Final = "dp:"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A death to come.

    Attributes:
        step: in which it comes.
        rank: of the process.
        after_s: seconds since the step began; the step's end takes the save with it.
    """

    step: int
    rank: int
    after_s: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """The training, and what happens to it.

    Attributes:
        folder: of the checkpoint, the journals and the results.
        stages: of a replica.
        replicas: number of them.
        steps: of training.
        save_every: steps between checkpoints.
        step_s: the least seconds of a step.
        watch_every: steps between two looks at what the process holds; 0 for none.
        act: what compresses activations; ``grad`` and ``dp`` likewise, "none" for nothing.
        kills: in order of their steps.
        restarts: of each call of `mpcomp.heal`.
        calls: of `mpcomp.heal`, each of which trains as many of the steps.
        loaders: processes that load the batches, of each rank.
        timeout_s: of a wait for another rank, also where ranks join.
    """

    folder: str
    stages: int
    replicas: int
    steps: int
    save_every: int
    step_s: float
    watch_every: int
    act: str
    grad: str
    dp: str
    kills: tuple[Kill, ...] = ()
    restarts: int = 0
    calls: int = 1
    loaders: int = 0
    timeout_s: float = 300.0

    @classmethod
    def of(cls, method: str, ranks: int, folder: Path, **fields: Any) -> Job:
        """The training of a method, left alone.

        Args:
            method: compresses both directions of all cuts, a stage a rank; with ``dp:`` before it,
                between two replicas of half as many stages. ``{slots}`` in it is a folder.
            ranks: processes.
            folder: does not exist yet.
            **fields: the others.
        """
        between = method.startswith(BETWEEN)
        spec = method.removeprefix(BETWEEN).strip().replace("{slots}", f"{folder}/slots")
        return cls(
            folder=str(folder),
            stages=ranks // 2 if between else ranks,
            replicas=2 if between else 1,
            act="none" if between else spec,
            grad="none" if between else spec,
            dp=spec if between else "none",
            **{"step_s": 0.0, "watch_every": 0, **fields},
        )

    @classmethod
    def read(cls, text: str) -> Job:
        """The job that `written` made a text of."""
        fields = json.loads(text)
        return cls(**{**fields, "kills": tuple(Kill(**kill) for kill in fields["kills"])})

    def written(self) -> str:
        """The job as JSON."""
        return json.dumps(asdict(self))

    def run(self) -> None:
        """Trains to the end, in a process for each rank, under torchrun.

        Raises:
            subprocess.CalledProcessError: a rank failed; it has said why.
        """
        folder = Path(self.folder)
        (folder / "temporary").mkdir(parents=True)
        (folder / "job.json").write_text(self.written())
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            f"--nproc-per-node={self.stages * self.replicas}",
            *("-m", "recipes.bench.training_worker", "--job", str(folder / "job.json")),
        ]
        launcher = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary")},
            stderr=subprocess.DEVNULL if self.kills else None,
        )
        try:
            code = launcher.wait()
        except BaseException:  # as of a signal to end: its ranks go with it
            launcher.terminate()
            launcher.wait()
            raise
        if code:
            raise subprocess.CalledProcessError(code, command)

    def journals(self) -> list[list[dict[str, Any]]]:
        """The steps of each rank, of all attempts."""
        folder, ranks = Path(self.folder), range(self.stages * self.replicas)
        return [_read_journal(folder / f"journal-{rank}.jsonl") for rank in ranks]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains to the end, whatever happens."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.training_worker")
    parser.add_argument("--job", type=Path, required=True, help="file of a job")
    job = Job.read(parser.parse_args(argv).job.read_text())
    patient = functools.partial(join, patience_s=job.timeout_s)
    with mock.patch.object(launch, "join", patient):
        for call in range(job.calls):
            last = job.steps * (call + 1) // job.calls
            mpcomp.heal(functools.partial(train, job, last), restarts=job.restarts)


def train(job: Job, last: int) -> None:
    """An attempt: from the last checkpoint to the end of step ``last``."""
    torch.manual_seed(SEED)
    obey(told(job, BEGIN))
    pipe = mpcomp.pipeline(
        model(2 * job.stages),
        chunks=job.stages,
        split=job.stages,
        act_comp=job.act,
        grad_comp=job.grad,
        dp_comp=None if job.dp == "none" else job.dp,
        replicas=job.replicas,
        loss_fn=nn.functional.mse_loss,
        seed=SEED,
        timeout=job.timeout_s,
    )
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    pipe.follow(optimizer)
    with (
        mpcomp.Checkpoints(
            pipe, Path(job.folder) / "checkpoint", optimizer=optimizer, every_steps=job.save_every
        ) as checkpoints,
        Journal(job, pipe.rank) as journal,
    ):
        steps = range(checkpoints.restore().get("step", 0), last)
        batches: Any = list(_batches(pipe.replica, job))
        loader: DataLoader[Any] = DataLoader(
            batches,
            batch_size=None,
            sampler=[step % BATCHES for step in steps],
            num_workers=job.loaders,
            generator=torch.Generator(),
        )
        for step, (x, y) in zip(steps, loader, strict=True):
            began = time.time()
            journal.arm(step)
            ids = step % BATCHES * len(x) + torch.arange(len(x))
            loss = pipe.forward_backward(x, y, sample_ids=ids)
            if obey(told(job, STEP), pipe):
                return
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, began + job.step_s - time.time()))
            trained = time.time()
            ended = checkpoints.step({"step": step + 1})
            held = None
            if job.watch_every and step % job.watch_every == 0:
                held = _held(Path(job.folder))
            journal.note(step, loss.item(), began, trained, time.time(), held)
            if ended:
                return
        if steps:  # else a later call has saved, of which this one would be the place
            checkpoints.save({"step": last})
    weights = {name: weight.detach() for name, weight in pipe.named_parameters()}
    torch.save(weights, Path(job.folder) / f"weights-{pipe.rank}.pt")


def order(folder: str, when: str, rank: int) -> Path:
    """The file of what a rank is to do, once: it is gone when the rank begins to."""
    return Path(folder) / f"{when}-{rank}"


def told(job: Job, when: str) -> str:
    """The word for what this rank is to do now; empty for nothing."""
    path = order(job.folder, when, int(os.environ["RANK"]))
    if not path.exists():
        return ""
    what = path.read_text()
    path.unlink()
    return what


def obey(what: str, pipe: mpcomp.Pipeline | None = None) -> bool:
    """Does it; whether the attempt is to return early."""
    match what.split():
        case ["die", after_s]:
            threading.Timer(float(after_s), os.kill, [os.getpid(), signal.SIGKILL]).start()
        case ["hang"]:
            while True:
                signal.pause()
        case ["loop"]:
            while True:
                pass
        case ["nan"]:
            assert pipe is not None
            for parameter in pipe.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(math.nan)
    return what == "return"


def differing_weights(quiet: Job, other: Job, ranks: int) -> int:
    """Number of weights of two runs that are not the same bits."""
    different = 0
    for rank in range(ranks):
        one, another = (
            torch.load(Path(job.folder) / f"weights-{rank}.pt") for job in (quiet, other)
        )
        assert one.keys() == another.keys()
        different += sum(int((one[name] != another[name]).sum()) for name in one)
    return different


def model(blocks: int) -> nn.Sequential:
    """Blocks of equal width, as many as asked for."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
            for _ in range(blocks)
        )
    )


def _batches(replica: int, job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches [rows, width] of a replica, with targets that a linear map would hit."""
    drawn = torch.Generator().manual_seed(SEED)
    target = torch.randn(WIDTH, WIDTH, generator=drawn) / WIDTH**0.5
    own = torch.Generator().manual_seed(SEED + 1 + replica)
    for _ in range(BATCHES):
        x = torch.randn(ROWS * job.stages, WIDTH, generator=own)
        yield x, x @ target


class Journal:
    """A rank's steps, each a line of JSON, written as they end; and its deaths."""

    def __init__(self, job: Job, rank: int) -> None:
        self._folder = Path(job.folder)
        self._own = [(i, kill) for i, kill in enumerate(job.kills) if kill.rank == rank]
        self._path = self._folder / f"journal-{rank}.jsonl"
        self._attempt = int(os.environ.get("MPCOMP_ATTEMPT", "0"))

    def __enter__(self) -> Journal:
        self._lines = self._path.open("a")
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()

    def note(
        self,
        step: int,
        loss: float,
        began: float,
        trained: float,
        ended: float,
        held: Mapping[str, int] | None,
    ) -> None:
        """A step that has ended; times are seconds since the epoch."""
        fields = {"attempt": self._attempt, "step": step, "loss": loss.hex(), "pid": os.getpid()}
        fields |= {"began": began, "trained": trained, "ended": ended}
        fields |= {"held": held} if held else {}
        self._lines.write(json.dumps(fields) + "\n")
        self._lines.flush()

    def arm(self, step: int) -> None:
        """Begins to wait for the deaths of this step, in a thread."""
        for number, kill in self._own:
            if kill.step == step:
                done = self._folder / f"kill-{number}.json"
                if not done.exists():
                    threading.Timer(kill.after_s, _die, [done, step]).start()


def _held(folder: Path) -> dict[str, int]:
    """Holdings of this process: bytes of memory of its own, and things by number."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "memory": 1024 * int(status["RssAnon"].split()[0]),
        "threads": int(status["Threads"]),
        "open_files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "files": sum(path.is_file() for path in folder.rglob("*")),  # those of all ranks
    }


def _die(done: Path, step: int) -> None:
    with done.open("w") as file:
        json.dump({"step": step, "time": time.time()}, file)
    os.kill(os.getpid(), signal.SIGKILL)


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """The steps of a rank, of all attempts; a line that a kill has cut off is no step."""
    steps = []
    for line in path.read_text().splitlines():
        try:
            steps.append(json.loads(line))
        except json.JSONDecodeError:
            if line.endswith("}"):
                raise
    return steps


if __name__ == "__main__":
    main()
