"""One rank of `recipes.bench.faults` and `recipes.bench.soak`: a small model that trains.

Each rank keeps a journal of its steps, and of what the process holds of the machine.

A kill comes from a thread of the process that it kills, at a moment within a step or a save that
nothing else knows of. Each is done once: a file says so, which is there before the signal.
"""

from __future__ import annotations

import argparse
import json
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

import torch
from torch import nn

import mpcomp

WIDTH: Final = 64
ROWS: Final = 8
#: Batches that are met again, so that AQ-SGD has something to remember.
BATCHES: Final = 16
SEED: Final = 0
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
    kills: tuple[Kill, ...]

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
            **{"step_s": 0.0, "watch_every": 0, "kills": (), **fields},
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
    mpcomp.heal(lambda: train(job), restarts=2 * len(job.kills))


def train(job: Job) -> None:
    """An attempt: from the last checkpoint to the end."""
    torch.manual_seed(SEED)
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
    )
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    pipe.follow(optimizer)
    checkpoint, begin = Path(job.folder) / "checkpoint", 0
    if checkpoint.exists():
        begin = pipe.load(checkpoint, optimizer=optimizer)["step"]
    batches = list(_batches(pipe.replica, job))
    with Journal(job, pipe.rank) as journal:
        for step in range(begin, job.steps):
            began = time.time()
            journal.arm(step)
            x, y = batches[step % BATCHES]
            ids = step % BATCHES * len(x) + torch.arange(len(x))
            loss = pipe.forward_backward(x, y, sample_ids=ids)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, began + job.step_s - time.time()))
            trained = time.time()
            if (step + 1) % job.save_every == 0:
                pipe.save(checkpoint, optimizer=optimizer, extra={"step": step + 1})
            held = None
            if job.watch_every and step % job.watch_every == 0:
                held = _held(Path(job.folder))
            journal.note(step, loss.item(), began, trained, time.time(), held)
    weights = {name: weight.detach() for name, weight in pipe.named_parameters()}
    torch.save(weights, Path(job.folder) / f"weights-{pipe.rank}.pt")


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
        fields = {"attempt": self._attempt, "step": step, "loss": loss.hex()}
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
