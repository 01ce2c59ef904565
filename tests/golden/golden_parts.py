"""Parts of `resume`: exact patterns in place of a model's numbers, and a tape of hashes.

Nothing here looks into mpcomp, but for the tag of what ranks agree on. What is noted passes through
torch: messages where `torch.distributed` takes them, tensors where a stage or a parameter gets
them. Stages compute nothing, so that no method's loss spoils what the next cut is given, and no
processor's arithmetic anything: they hand on fixed numbers, forward and backward.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpcomp.comm.all_gather import TAG

#: Set before torch is loaded: the kernels that every x86 processor has, and sums in one order.
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}

#: Within which the processes of a program end: on a busy machine they take minutes. Below
#: pytest's own limit, so that what they have said is shown.
TIMEOUT_S = 540.0

# -- patterns -------------------------------------------------------------------------------------

_MASK = 0xFFFFFFFF
_POWERS = np.float32(2.0) ** -np.array([23, 24, 24, 25, 25, 26, 27, 29], dtype=np.float32)
_SCALES = np.array([0.5, 1.0, 4.0], dtype=np.float32)


def mixed(*seeds: int) -> int:
    """A number below 2**32 of which every bit follows from all seeds."""
    x = 0
    for seed in seeds:
        x = (x * 0x45D9F3B + seed * 0x9E3779B1 + 0x7F4A7C15) & _MASK
        x = (((x >> 16) ^ x) * 0x45D9F3B) & _MASK
        x ^= x >> 15
    return x


def dyadic(count: int, *seeds: int) -> np.ndarray:
    """Numbers in [-1, 1) of 24 bits, as many as fp32 has; most are small, as gradients are.

    With fewer bits sums would be exact in any order, and hide that an order has changed.
    """
    x = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(mixed(*seeds))
    for _ in range(2):
        x = ((x >> np.uint32(16)) ^ x) * np.uint32(0x45D9F3B)
    x ^= x >> np.uint32(15)
    whole = (x & np.uint32(0xFFFFFF)).astype(np.int32) - 0x800000
    return whole.astype(np.float32) * _POWERS[x >> np.uint32(29)]


def pattern(like: Tensor, *seeds: int, step: int) -> Tensor:
    """A tensor like ``like``: of every row a part that stays, and one of this step.

    Rows are of three scales, so that a scale for all is another than one for each. What a row is
    does not depend on how many there are.
    """
    stays = dyadic(like.numel(), *seeds, 1)
    changes = dyadic(like.numel(), *seeds, 2 + step)
    rows = len(like)
    scale = np.resize(_SCALES, rows)[:, None]
    values = (stays + np.float32(0.25) * changes).reshape(rows, -1) * scale
    return torch.empty_like(like).copy_(torch.from_numpy(values).reshape(like.shape))


# -- the tape -------------------------------------------------------------------------------------


def digest(*values: Tensor) -> str:
    """A short hash of dtypes, shapes and every bit."""
    told = hashlib.blake2b(digest_size=4)
    for value in values:
        x = value.detach().clone(memory_format=torch.contiguous_format)
        told.update(f"{x.dtype} {tuple(x.shape)}".encode())
        told.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


class Tape:
    """Hashes by key and call.

    Attributes:
        call: number of the call (a step, or an evaluation) that is under way.
        following: key of the message that is sent next; None for what is exchanged at the end.
    """

    def __init__(self) -> None:
        self.call = 0
        self.following: str | None = None
        self._hashes: dict[str, dict[int, Any]] = {}

    def note(self, key: str, value: Tensor) -> None:
        of_key = self._hashes.setdefault(key, {})
        told = of_key.setdefault(self.call, hashlib.blake2b(digest_size=4))
        told.update(digest(value).encode())

    def read(self) -> dict[str, str]:
        """By key one hash a call, "-" where there was nothing."""
        calls = range(self.call + 1)
        return {
            key: " ".join(of_key[i].hexdigest() if i in of_key else "-" for i in calls)
            for key, of_key in self._hashes.items()
        }


@contextlib.contextmanager
def listening(tape: Tape, otherwise: str = "exchanged") -> Iterator[None]:
    """Within it the tape gets what is handed to torch: messages, and asynchronous collectives.

    Args:
        tape: the tape.
        otherwise: key of messages that nobody has announced.
    """
    sends = dist.isend
    collectives = {"all_reduce": 0, "all_gather": 1, "all_to_all_single": 1, "broadcast": 0}
    originals = {name: getattr(dist, name) for name in collectives}

    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("tag") == TAG:  # what ranks agree on is no method's message
            return sends(tensor, *args, **kwargs)
        key, tape.following = tape.following or otherwise, None
        tape.note(key, tensor)
        return sends(tensor, *args, **kwargs)

    def wrapped(name: str, place: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # What replicas agree on is no method's message.
            agreed = name == "all_reduce" and args[1:2] == (dist.ReduceOp.MIN,)
            heard = name == "broadcast" and dist.get_rank() > 0
            if kwargs.get("async_op") and not agreed and not heard:
                tape.note(f"{name} of rank {dist.get_rank()}", args[place])
            return originals[name](*args, **kwargs)

        return call

    dist.isend = isend
    for name, place in collectives.items():
        setattr(dist, name, wrapped(name, place))
    try:
        yield
    finally:
        dist.isend = sends
        for name, original in originals.items():
            setattr(dist, name, original)


# -- stages ---------------------------------------------------------------------------------------


class Script:
    """The tape all stages of a process write to, and the circumstances of this call."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.reset()

    def reset(self) -> None:
        self.tape = Tape()
        self.step = 0
        self.replica = 0
        self.begin()

    def begin(self) -> None:
        """Counts microbatches anew."""
        self._counts: dict[tuple[str, int], int] = {}

    def microbatch(self, what: str, stage: int) -> int:
        """How often a stage was called before in this call."""
        count = self._counts.get((what, stage), 0)
        self._counts[what, stage] = count + 1
        return count


SCRIPT = Script()


class Fixed(torch.autograd.Function):
    """Fixed numbers, forward and backward, whatever arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: int, last: bool) -> Tensor:
        ctx.stage, ctx.last = stage, last
        ctx.save_for_backward(x, weight)
        microbatch = SCRIPT.microbatch("forward", stage)
        if stage > 0:
            SCRIPT.tape.note(f"{stage - 1} act arrived", x)
        SCRIPT.tape.following = None if last else f"{stage} act sent"
        return pattern(x, stage, SCRIPT.replica, microbatch, 0, step=SCRIPT.step)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        stage = ctx.stage
        microbatch = SCRIPT.microbatch("backward", stage)
        if not ctx.last:
            SCRIPT.tape.note(f"{stage} grad arrived", grad)
        of_weight = None
        if ctx.needs_input_grad[1]:
            seeds = stage, SCRIPT.replica, microbatch, 2
            of_weight = pattern(weight, *seeds, step=SCRIPT.step)
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None, None
        of_x = pattern(x, stage, SCRIPT.replica, microbatch, 1, step=SCRIPT.step)
        SCRIPT.tape.following = f"{stage - 1} grad sent"
        return of_x, of_weight, None, None


class Block(nn.Module):
    """A stage that computes nothing.

    Args:
        number: of the stage.
        last: whether no other follows.
        shape: of its only parameter.
    """

    def __init__(self, number: int, last: bool = False, shape: Sequence[int] = (1, 1)) -> None:
        super().__init__()
        self.number, self.last = number, last
        self.weight = nn.Parameter(pattern(torch.empty(shape), number, 3, step=0))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):  # mpcomp looks for shapes
            return x * 1.0
        return Fixed.apply(x, self.weight, self.number, self.last)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose value follows from the last stage's pattern."""
    return output.float().mean()


# -- processes ------------------------------------------------------------------------------------


def in_processes(program: Path, num_ranks: int, *arguments: str) -> list[Any]:
    """Runs ``program --rank R --ranks N --meet FOLDER ...``; what each rank has left as JSON.

    Each process is a fresh one, so that what `ENVIRONMENT` says holds from torch's first moment,
    and uses the mpcomp that this process would. None is left when the call returns.

    Raises:
        RuntimeError: one failed, or was not ready in time.
    """
    found = importlib.util.find_spec("mpcomp")
    assert found is not None and found.origin is not None
    root = str(Path(found.origin).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    kept = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    environment = {**kept, **ENVIRONMENT, "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        processes, logs = [], []
        try:
            for rank in range(num_ranks):
                log = Path(folder) / f"log{rank}"
                told = ["--rank", str(rank), "--ranks", str(num_ranks), "--meet", folder]
                with log.open("wb") as file:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, str(program), *told, *arguments],
                            env=environment,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                        )
                    )
                logs.append(log)
            deadline = time.monotonic() + TIMEOUT_S
            while any(process.poll() is None for process in processes):
                failed = any(process.poll() not in (None, 0) for process in processes)
                if failed or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            codes = [process.poll() for process in processes]
            if any(code != 0 for code in codes):
                said = "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)
                late = f"not ready after {TIMEOUT_S:.0f} s" if None in codes else "failed"
                raise RuntimeError(f"{program.name} {' '.join(arguments)} {late} {codes}:\n{said}")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        results = [Path(folder) / f"result{rank}.json" for rank in range(num_ranks)]
        return [json.loads(result.read_text()) for result in results]


@contextlib.contextmanager
def joined(rank: int, num_ranks: int, folder: str) -> Iterator[None]:
    """A gloo group of all processes, over a store in a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    dist.barrier()
    yield
    dist.barrier()


def leave(folder: str, rank: int, result: Any) -> None:
    """Leaves a result for `in_processes`, and ends: destructors might wait for peers."""
    (Path(folder) / f"result{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# -- comparing ------------------------------------------------------------------------------------


def merged(parts: Sequence[Any]) -> Any:
    """One tree from those of several ranks; a leaf that several have must be the same.

    Raises:
        ValueError: it is not.
    """
    if not all(isinstance(part, dict) for part in parts):
        if any(part != parts[0] for part in parts):
            raise ValueError(f"ranks disagree: {parts}")
        return parts[0]
    keys = {key: None for part in parts for key in part}
    return {key: merged([part[key] for part in parts if key in part]) for key in sorted(keys)}


def differences(recorded: Any, found: Any, where: str = "") -> list[str]:
    """What is not as it was, entry by entry, each with its place; hashes of calls by number."""
    if recorded is None or found is None:
        return [f"{where}: {'missing' if found is None else 'not in the record'}"]
    if isinstance(recorded, dict) and isinstance(found, dict):
        said = []
        for key in sorted({*recorded, *found}):
            below = f"{where} / {key}" if where else key
            said += differences(recorded.get(key), found.get(key), below)
        return said
    if recorded == found:
        return []
    before, now = str(recorded).split(), str(found).split()
    if len(before) == len(now):
        calls = [str(i) for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
        return [f"{where}: differs in call {', '.join(calls)}"]
    return [f"{where}: {recorded} before, {found} now"]


def written(tree: Any) -> str:
    """JSON of a tree with a line for each entry that has no others below."""

    def lines(value: Any, depth: int) -> str:
        if not isinstance(value, dict):
            return json.dumps(value)
        inner = f",\n{' ' * depth}".join(
            f"{json.dumps(key)}: {lines(below, depth + 1)}" for key, below in value.items()
        )
        return f"{{\n{' ' * depth}{inner}}}"

    return lines(tree, 0) + "\n"
