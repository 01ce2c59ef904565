"""The program behind the old checkpoints: training that begins, is saved, and goes on.

``checkpoints/`` was written by the code of commit 697b507, the form that 0.2.0 reads and writes::

    python tests/golden/resume.py --write tests/golden/checkpoints

Once 0.2.0 is released, never write them anew to get a test to pass: users have such files.
``resumed.json`` is what that code went on with, from the files (``--load FOLDER``) as by itself.
"""

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The release whose kernels the bits of ``resumed.json`` are of.
MADE_WITH_TORCH = "2.13"
BEFORE, AFTER = 4, 3

_CLOCK = "bandwidth_mbps=10:latency_ms=0.1:compute_ms=1"


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        where: "local" (one process), "ranks" (a stage on each of two), "replicas" (two of one
            stage) or "ddp" (two, with `compress_gradients`).
        options: of the pipeline.
        method: of ``ddp``.
        momentum: of the optimizer.
        tied: whether the two stages share their parameter.
    """

    where: str
    options: dict[str, Any] = field(default_factory=dict)
    method: str = ""
    momentum: float = 0.0
    tied: bool = False


_REPLICAS = {
    "ef": "ef+topk:0.1",
    "ef21": "ef21+topk:0.2",
    "dgc": "dgc:0.1",
    "powersgd": "powersgd:1",
    "conef": "conef+topk:0.1",
    "gravac": f"gravac:cf=2-16:eps=0.5:window=2:{_CLOCK}+topk:0.1",
}

#: By the name of the folder.
CASES = {
    "local-aqsgd-ef": Case(
        "local", {"act_comp": "aqsgd+quant:4", "grad_comp": "ef+topk:0.1"}, momentum=0.5
    ),
    "local-ef21-8bits": Case(
        "local", {"act_comp": "ef21:storage=8+topk:0.2", "grad_comp": "ef21:storage=8+topk:0.2"}
    ),
    "local-conef": Case(
        "local",
        {
            "act_comp": "conef+topk:0.1",
            "grad_comp": "conef:fraction=0.4:storage=bf16+randomblock:0.2",
        },
    ),
    "local-adaptive": Case(
        "local",
        {
            "act_comp": "adaptive:cf=2-8:eps=0.4:window=2:bandwidth_mbps=1.0+topk:0.1",
            "grad_comp": "adaptive:cf=3-9:eps=0.3:window=2:bandwidth_mbps=1.0+ef21+topk:0.1",
        },
    ),
    "local-tied": Case("local", {"tie_comp": "ef+topk:0.1"}, tied=True),
    "ranks-ef21-ef": Case(
        "ranks", {"act_comp": "ef21+topk:0.1", "grad_comp": "ef+topk:0.1"}, momentum=0.5
    ),
    "ranks-aqsgd-mixed": Case(
        "ranks",
        {"act_comp": "aqsgd:storage=4:first=quant/8+topk:0.3", "grad_comp": "efmixed+topk:0.2"},
    ),
    "ranks-tied": Case("ranks", {"tie_comp": "ef21+topk:0.1"}, tied=True),
    **{
        f"replicas-{name}": Case("replicas", {"dp_comp": method})
        for name, method in _REPLICAS.items()
    },
    **{f"ddp-{name}": Case("ddp", method=method) for name, method in _REPLICAS.items()},
}


def gone_on(*arguments: str) -> dict[str, Any]:
    """Runs all cases in two processes; what each went on with."""
    from golden_parts import in_processes, merged

    return merged(in_processes(Path(__file__), 2, *arguments))


class Going:
    """A run under way."""

    def __init__(self, case: Case) -> None:
        import torch
        from golden_parts import SCRIPT, Block, mean_loss

        import mpcomp

        torch.manual_seed(0)
        self.case = case
        SCRIPT.reset()
        shape = (24, 20) if case.where == "replicas" else (12, 10)
        blocks = [Block(0, False, shape), Block(1, True, shape)]
        if case.tied:
            blocks[1].weight = blocks[0].weight
        options: dict[str, Any] = {"split": 2, "loss_fn": mean_loss, "seed": 5, **case.options}
        if case.where == "local":
            options["engine"] = "local"
        else:
            options["timeout"] = 60.0
        if case.where == "replicas":
            import torch.distributed as dist

            SCRIPT.replica = dist.get_rank()
            network = mpcomp.ReplicaNetwork(smallest=64)
            options |= {"split": 1, "replicas": 2, "network": network}
        self.pipe = mpcomp.pipeline(torch.nn.Sequential(*blocks), 2, **options)
        self.optimizer = torch.optim.SGD(self.pipe.parameters(), lr=0.125, momentum=case.momentum)

    def save(self, folder: Path) -> None:
        self.pipe.save(folder, optimizer=self.optimizer)

    def load(self, folder: Path) -> None:
        self.pipe.load(folder, optimizer=self.optimizer)

    def step(self, number: int) -> None:
        import torch
        from golden_parts import SCRIPT, pattern

        SCRIPT.step = number
        SCRIPT.begin()
        x = pattern(torch.empty(6, 6, 10), 99, step=number)
        ids = torch.arange(6) + (3 if number % 3 == 2 else 0)
        loss = self.pipe.forward_backward(x, torch.zeros(6), sample_ids=ids)
        SCRIPT.tape.note("loss", loss)
        for name, parameter in self.pipe.named_parameters():
            SCRIPT.tape.note(f"gradient {name}", parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, parameter in self.pipe.named_parameters():
            SCRIPT.tape.note(f"weight {name}", parameter)

    def state(self) -> dict[str, str]:
        """What the next checkpoint would hold, beside weights and generators."""
        from golden_parts import digest
        from safetensors.torch import load_file

        several = self.case.where != "local"
        root = self._shared(several)
        self.save(Path(root) / "saved")
        part = f"rank-{_rank():05d}-of-*/" if several else ""
        (file,) = (Path(root) / "saved").glob(f"{part}state.safetensors")
        held = {k: v for k, v in load_file(file).items() if not k.startswith("generator")}
        return {f"state {k}{_of_replica(self.case)}": digest(v) for k, v in held.items()}

    @staticmethod
    def _shared(several: bool) -> str:
        if not several:
            return tempfile.mkdtemp()
        import torch.distributed as dist

        root = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(root)
        return str(root[0])


class GoingWithDDP:
    """A run with `compress_gradients`, whose handle is saved in two files."""

    def __init__(self, case: Case) -> None:
        import torch
        from golden_parts import SCRIPT, Block
        from torch.nn.parallel import DistributedDataParallel

        import mpcomp

        SCRIPT.reset()
        SCRIPT.replica = _rank()
        self.model = DistributedDataParallel(Block(0, True, (24, 20)))
        network = mpcomp.ReplicaNetwork(smallest=64)
        self.handle = mpcomp.compress_gradients(self.model, case.method, network=network, seed=5)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.handle.follow(self.optimizer)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        state = self.handle.state_dict()
        tensors = {**state["tensors"], "weight": self.model.module.weight.detach()}
        tensors = {name: value.contiguous().clone() for name, value in tensors.items()}
        save_file(tensors, folder / f"replica{_rank()}.safetensors")
        (folder / f"replica{_rank()}.json").write_text(json.dumps(state["rest"]))

    def load(self, folder: Path) -> None:
        import torch
        from safetensors.torch import load_file

        rest = json.loads((folder / f"replica{_rank()}.json").read_text())
        tensors = load_file(folder / f"replica{_rank()}.safetensors")
        with torch.no_grad():
            self.model.module.weight.copy_(tensors.pop("weight"))
        self.handle.load_state_dict({"tensors": tensors, "rest": rest})

    def step(self, number: int) -> None:
        import torch
        from golden_parts import SCRIPT, pattern

        SCRIPT.step = number
        SCRIPT.begin()
        x = pattern(torch.empty(6, 6), 99, step=number).requires_grad_()
        self.model(x).sum().backward()
        weight = self.model.module.weight
        SCRIPT.tape.note("gradient", weight.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        SCRIPT.tape.note("weight", weight)

    def state(self) -> dict[str, str]:
        from golden_parts import digest

        tensors = self.handle.state_dict()["tensors"]
        return {f"state {k} of rank {_rank()}": digest(v) for k, v in tensors.items()}


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def _of_replica(case: Case) -> str:
    return f" of rank {_rank()}" if case.where == "replicas" else ""


def run(case: Case, folder: Path, *, write: bool) -> dict[str, Any]:
    """What a case goes on with, by itself after it was saved, or from files."""
    from golden_parts import SCRIPT, Tape, listening

    going = GoingWithDDP(case) if case.where == "ddp" else Going(case)
    # What comes before a load must leave nothing; of the same kind, or the files have no place.
    for number in range(BEFORE if write else 1):
        going.step(number)
    if write:
        going.save(folder)
    else:
        going.load(folder)
    SCRIPT.tape = Tape()
    with listening(SCRIPT.tape, "" if case.where == "local" else f"sent by rank {_rank()}"):
        for number in range(AFTER):
            SCRIPT.tape.call = number
            going.step(BEFORE + number)
    told = SCRIPT.tape.read()
    if case.where == "replicas":  # each has its own rows
        shared = ("loss", "gradient", "weight")
        told = {
            k if k.startswith(shared) or "rank" in k else f"{k} of rank {_rank()}": hashes
            for k, hashes in told.items()
        }
    elif case.where == "ddp":
        told = {k: hashes for k, hashes in told.items() if "arrived" not in k}
    return {**told, **going.state()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--write", type=Path)
    which.add_argument("--load", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--meet")
    told = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from golden_parts import joined, leave, written

    folder = told.write or told.load
    if told.rank is None:
        if told.write is not None and folder.exists():
            shutil.rmtree(folder)
        way = "--load" if told.write is None else "--write"
        sys.stdout.write(written(gone_on(way, str(folder.resolve()))))
        return
    tempfile.tempdir = told.meet  # what is saved there goes when all have ended
    warnings.simplefilter("ignore")
    tree = {}
    if told.rank == 0:
        for name, case in CASES.items():
            if case.where == "local":
                tree[name] = run(case, folder / name, write=told.write is not None)
    with joined(told.rank, told.ranks, told.meet):
        for name, case in CASES.items():
            if case.where != "local":
                tree[name] = run(case, folder / name, write=told.write is not None)
    leave(told.meet, told.rank, tree)


if __name__ == "__main__":
    main()
