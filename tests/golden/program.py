"""The program behind the golden record: every method at every door, message by message.

``record.json`` was made by the code of commit 02a0a23, before feedback at cuts, on ties and between
replicas became one implementation::

    python tests/golden/program.py > tests/golden/record.json

Never make it anew to get a test to pass: it says what that code sent and remembered. An entry may
only go with the method that it is of. Entries of a method that was changed on purpose, and no
others, were made anew::

    powersgd, accordion of powersgd     its first Q is standard normal, as in the paper
    qsgd                                roots of its norms are taken in fp64: in those of fp32
                                        processors differ
    dgc with clip=                      clips to clip * sqrt(replicas), not divided by it
    whatever is sent in messages        version 3, whose check takes the layout in; all else in
                                        them, what arrives and is remembered stayed the same
    what is sent on ties                says how many rows are not zero, and which; what arrives and
                                        is remembered stayed the same

``--only PART`` runs a part, such as "cut", whose entries alone are then printed.
"""

import argparse
import gc
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

#: Compressors at a cut, and what remembers there.
COMPRESSORS = [
    "none",
    "cast:fp32",
    "bf16",
    "fp16",
    "fp8_e4m3",
    "fp8_e5m2",
    "topk:0.1",
    "topk:0.3:scope=row",
    "topk:0.02:scope=tensor",
    "topk:1.0",
    "topk:0.2+fp16",
    "topk:0.1+quant:8",
    "topk:0.3+quant:4:scale=sample:rounding=stochastic",
    "topk:0.3:scope=tensor+sign",
    "randomk:0.1",
    "randomk:0.3:unbiased=True",
    "randomk:0.2+quant:8",
    "randomblock:0.1",
    "randomblock:0.4:unbiased=True+bf16",
    "sampledtopk:0.1",
    "sampledtopk:0.02:sample=0.5",
    "sampledtopk:0.2+quant:8",
    "redsynctopk:0.1",
    "redsynctopk:0.02:search=binary",
    "redsynctopk:0.3+fp16",
    "samesign:0.1",
    "samesign:0.3:sign=positive",
    "samesign:0.05:sign=negative",
    "meanvalue",
    "multilevel:keep=0.1+topk:0.3",
    "multilevel:keep=0.2+topk:0.5+fp16",
    "multilevel:keep=0.02+sampledtopk:0.4:sample=0.5",
    "multilevel:keep=0.2+randomk:0.5",
    "multilevel:keep=0.3+randomk:0.5:unbiased=True+quant:8",
    "multilevel:keep=0.4+randomblock:0.4",
    "multilevel:keep=0.05+redsynctopk:0.3:search=binary",
    "multilevel:keep=0.1+samesign:0.3",
    "quant:1",
    "quant:2",
    "quant:3",
    "quant:4",
    "quant:5",
    "quant:6",
    "quant:7",
    "quant:8",
    "quant:2:mode=maxabs",
    "quant:4:rounding=stochastic",
    "quant:4:scale=sample",
    "quant:3:scale=channel",
    "quant:4:scale=16",
    "quant:5:scale=7:mode=minmax:rounding=stochastic",
    "fixed:1",
    "fixed:4",
    "fixed:7:scale=tensor",
    "qsgd:2",
    "qsgd:4",
    "qsgd:4:group=16",
    "qsgd:8:group=7",
    "onebit",
    "lowrank:1",
    "lowrank:2:iterations=0",
    "sign",
    "sign:sample",
    "sign:channel",
    "sign:24",
]

FEEDBACK = [
    "ef+topk:0.1",
    "ef:eval=raw+quant:2:rounding=stochastic",
    "ef:storage=bf16+randomk:0.2",
    "ef:storage=fp16:location=cpu+sign",
    "ef+lowrank:1",
    "ef+sampledtopk:0.2",
    "conef+topk:0.1",
    "conef:fraction=0.4:storage=bf16+randomblock:0.2",
    "conef:fraction=0.6:beta=0.5:eval=raw+quant:4:rounding=stochastic",
    "conef:fraction=0.3:hash=murmur:location=cpu+topk:0.2+quant:8",
    "conef:fraction=1.0:beta=0.0+lowrank:1",
    "efmixed+topk:0.2",
    "efmixed:second=remainder+topk:0.2",
    "ef21+topk:0.1",
    "ef21:first=quant/8+topk:0.2+quant:8",
    "ef21:storage=bf16+quant:4:rounding=stochastic",
    "ef21:storage=8:eval=raw+topk:0.3",
    "ef21+lowrank:1",
]

BY_SAMPLE = [
    "aqsgd+quant:4",
    "aqsgd:storage=fp16+quant:4:rounding=stochastic",
    "aqsgd:first=quant/8:storage=4+topk:0.3",
    "aqsgd:location=cpu:cap_bytes=2000+quant:8:scale=sample",
]

#: Their clocks are models, so that runs repeat.
ADAPTIVE = [
    "adaptive:cf=2-8:eps=0.4:window=2:bandwidth_mbps=1.0+topk:0.1",
    "adaptive:cf=2-4:eps=0.2:window=2:policy=geometric:smoothing=0.5:bandwidth_mbps=1.0"
    ":latency_ms=0.5+ef+randomk:0.1",
    "adaptive:cf=3-9:eps=0.3:window=2:bandwidth_mbps=1.0+ef21+topk:0.1",
    "adaptive:cf=4-16:window=3:gain=centred:budget=0.3+quant:4:scale=sample",
]

#: Gradients at the activation's positions.
SAME = [
    ("topk:0.1", "same"),
    ("randomk:0.1", "same+fp16"),
    ("ef+topk:0.2", "same"),
    ("ef21+topk:0.3", "same"),
]

CUTS = [(spec, spec) for spec in (*COMPRESSORS, *FEEDBACK, *BY_SAMPLE, *ADAPTIVE)] + SAME

TIES = [
    *FEEDBACK,
    *[
        "none",
        "bf16",
        "topk:0.1",
        "topk:0.1+quant:8",
        "randomk:0.2+quant:8",
        "randomblock:0.1",
        "quant:4",
        "quant:4:rounding=stochastic",
        "qsgd:4:group=16",
        "lowrank:1",
        "sign",
        "multilevel:keep=0.2+topk:0.5+fp16",
    ],
]

_CLOCK = "bandwidth_mbps=10:latency_ms=0.1:compute_ms=1"

REPLICAS = [
    f"gravac:cf=2-32:eps=0.5:window=5:smoothing=0.5:{_CLOCK}+topk:0.1",
    f"gravac:cf=2-8:eps=0.5:window=5:exact=true:smoothing=0.5:{_CLOCK}+topk:0.1+bf16",
    f"gravac:cf=4-32:eps=0.3:window=5:policy=geometric:{_CLOCK}+quant:8:rounding=stochastic",
    f"gravac:cf=1.5-8:eps=0.2:window=5:{_CLOCK}+randomk:0.5",
    f"gravac:cf=2-32:eps=0.4:window=2:{_CLOCK}+topk:0.1",
    f"gravac:cf=2-100:eps=0.2:window=2:policy=geometric:{_CLOCK}+randomk:0.5",
    *[
        "accordion:low=topk/0.5:high=topk/0.1:interval=4:span=2",
        "accordion:low=powersgd/2:high=powersgd/1:interval=4",
        "accordion:topk/0.99:high=topk/0.1:interval=100",
        "accordion:powersgd/2:high=powersgd/1:interval=10:threshold=0.2",
        "accordion:low=topk/0.5:high=topk/0.1:interval=2",
        "dgc:0.1",
        "dgc:0.05:warmup_steps=20:nesterov=true:clip=4+fp16",
        "dgc:0.001",
        "dgc:0.01:nesterov=True:warmup_steps=40+fp16",
        "redsync:0.1",
        "redsync:0.1:same_sign=true:search=binary",
        "redsync:0.001",
        "redsync:0.01:same_sign=True",
        "onebitsgd",
        "onebitsgd:fp16",
        "powersgd:1",
        "powersgd:2:min_saving=1:storage=bf16",
        "powersgd:2",
        "powersgd:4:feedback=False",
        "bf16",
        "topk:0.2",
        "randomblock:0.2:unbiased=true",
        "qsgd:4",
        "ef+topk:0.1",
        "ef:storage=8+topk:0.1+quant:8",
        "ef:lr_scaled=true+sampledtopk:0.1",
        "ef+randomk:0.2",
        "ef+randomblock:0.2",
        "ef+sign",
        "ef+quant:4:rounding=stochastic",
        "ef+lowrank:1",
        "ef21+topk:0.2",
        "ef21:storage=bf16+topk:0.2",
        "conef+topk:0.1",
        "conef:0.4:storage=bf16+randomblock:0.2",
        "conef:error=qsgd/8:lr_scaled=true+topk:0.2",
        "conef:0.3:improved=v2:beta=0.8+topk:0.2",
    ],
]

SHARDED = [
    "ef+topk:0.1",
    "ef21+topk:0.2",
    "conef+topk:0.1",
    "dgc:0.1",
    f"gravac:cf=2-32:eps=0.5:window=3:{_CLOCK}+topk:0.1",
]

PARTS = [
    "cut/fp32",
    "cut/bf16 scaled",
    "cut/channels-last",
    "cut/padded",
    "tie/fp32",
    "tie/bf16 scaled",
    "replicas/fp32",
    "replicas/bf16 two-phase scaled",
    "replicas/sharded",
]


def record(only: str = "") -> dict[str, Any]:
    """Runs the program in two processes; what they have noted, by part."""
    from golden_parts import in_processes, merged

    return merged(in_processes(Path(__file__), 2, "--only", only))


def of_rank(only: str) -> dict[str, Any]:
    """What one of the two processes notes."""
    import torch

    tree: dict[str, Any] = {"made with": {"torch": ".".join(torch.__version__.split(".")[:2])}}
    for part in PARTS:
        if part.startswith(only):
            door, _, scenario = part.partition("/")
            run = sharded if scenario == "sharded" else {"cut": cut, "tie": tie}.get(door, replicas)
            tree.setdefault(door, {})[scenario] = run(scenario)
            gc.collect()  # pipelines end with all their connections
    return tree


# -- at a cut -------------------------------------------------------------------------------------

#: What a call is like: rows, first sample id, whether it is dense, whether a gradient is infinite.
_CALL = {"rows": 6, "ids": 0, "dense": False, "infinite": False}


def _calls(**special: dict[int, Any]) -> list[dict[str, Any]]:
    return [
        {**_CALL, **{k: by_call[i] for k, by_call in special.items() if i in by_call}}
        for i in range(6)
    ]


CUT_CALLS = {
    "fp32": _calls(dense={2: True}, rows={3: 5}, ids={4: 3}),
    "bf16 scaled": _calls(infinite={2: True}, dense={4: True}),
    "channels-last": _calls(rows={4: 3}, ids={3: 6}),
    "padded": _calls(dense={3: True}, ids={4: 2}),
}
SHAPES = {"channels-last": (8, 5, 4), "padded": (6, 20)}


def cut(scenario: str) -> dict[str, Any]:
    """One pipeline of very many stages, by turns on both ranks: each method has a cut."""
    import torch
    from golden_parts import SCRIPT, chain, listening, mean_loss

    import mpcomp
    import stages

    dtype = torch.bfloat16 if scenario.startswith("bf16") else torch.float32
    model = chain(len(CUTS) + 1).to(dtype)
    scaler = None
    if "scaled" in scenario:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    pipe = mpcomp.pipeline(
        model,
        2,
        split=len(model),
        schedule="Interleaved1F1B",
        act_comp=[act for act, _ in CUTS],
        grad_comp=[grad for _, grad in CUTS],
        loss_fn=mean_loss,
        scaler=scaler,
        timeout=60.0,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.125)
    SCRIPT.reset()
    # A mask says what is padded in a language model of transformers alone.
    passing = mock.patch.object(stages.Stage, "is_causal_lm", scenario == "padded")
    with passing, listening(SCRIPT.tape):
        for number, call in enumerate(CUT_CALLS[scenario]):
            SCRIPT.step = SCRIPT.tape.call = number
            SCRIPT.scale = 1.0 if scaler is None else 2.0**15 if number < 3 else 2.0**14
            # Two gradients of the many, so that other messages are there to be forgotten.
            SCRIPT.infinite = frozenset([7, 70] if call["infinite"] else [])
            SCRIPT.begin()
            batch, target = _batch(scenario, call["rows"], number, dtype)
            ids = torch.arange(call["rows"]) + call["ids"]
            if call["dense"]:
                with pipe.uncompressed():
                    loss = pipe.forward_backward(batch, target, sample_ids=ids)
            else:
                loss = pipe.forward_backward(batch, target, sample_ids=ids)
            SCRIPT.tape.note("loss", loss)
            assert pipe.step_skipped == call["infinite"]
            _step(optimizer, scaler)
            assert scaler is None or scaler.get_scale() == 2.0 ** (15 if number < 2 else 14)
        SCRIPT.step = SCRIPT.tape.call = len(CUT_CALLS[scenario])
        SCRIPT.begin()
        pipe.evaluate([_batch(scenario, 4, 0, dtype)])
    return {**_by_cut(SCRIPT.tape.read()), **_states(pipe, by_cut=True)}


def _batch(scenario: str, rows: int, number: int, dtype: Any) -> tuple[Any, Any]:
    import torch
    from golden_parts import mixed, pattern

    x = pattern(torch.empty(rows, *SHAPES.get(scenario, (6, 24))), 99, step=number).to(dtype)
    if scenario == "channels-last":
        x = x.contiguous(memory_format=torch.channels_last)
    target = torch.zeros(rows)
    if scenario != "padded":
        return x, target
    # Rows of another length in every call, padded on the right and on the left by turns.
    lengths = torch.tensor([mixed(row, number) % 7 for row in range(rows)])
    mask = torch.arange(6)[None, :] < lengths[:, None]
    mask = mask.flip(1) if number % 2 else mask
    return {"x": x, "attention_mask": mask.to(torch.int64)}, target


def _step(optimizer: Any, scaler: Any) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def _by_cut(hashes: dict[str, str]) -> dict[str, Any]:
    """Hashes under the names of the methods in place of the numbers of the cuts."""
    tree: dict[str, Any] = {}
    for key, told in hashes.items():
        number, _, what = key.partition(" ")
        if number.isdigit():
            tree.setdefault(_named(int(number)), {})[what] = told
        else:
            tree[key] = told
    return tree


def _named(number: int) -> str:
    act, grad = CUTS[number]
    return act if act == grad else f"{act} | {grad}"


def _states(pipe: Any, *, by_cut: bool = False) -> dict[str, Any]:
    """What a checkpoint of the pipeline holds beside weights and generators."""
    import torch.distributed as dist
    from golden_parts import digest
    from safetensors.torch import load_file

    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(str(shared[0])) / "saved"
    pipe.save(folder)
    tree: dict[str, Any] = {}
    (file,) = folder.glob(f"rank-{dist.get_rank():05d}-of-*/state.safetensors")
    for name, value in load_file(file).items():
        if name.startswith("generator"):
            continue
        if by_cut:
            _, number, rest = name.split(".", 2)
            tree.setdefault(f"{_named(int(number))} state", {})[rest] = digest(value)
        else:
            tree[name] = digest(value)
    return tree


# -- on a tie -------------------------------------------------------------------------------------


def tie(scenario: str) -> dict[str, Any]:
    """Of each method a pipeline of two stages that share a parameter."""
    return {spec: _tie(spec, scenario) for spec in TIES}


def _tie(spec: str, scenario: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from golden_parts import SCRIPT, Block, listening, mean_loss

    import mpcomp

    scaled = "scaled" in scenario
    blocks = [Block(0, False, (12, 10)), Block(1, True, (12, 10))]
    blocks[1].weight = blocks[0].weight
    model = torch.nn.Sequential(*blocks).to(torch.bfloat16 if scaled else torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15) if scaled else None
    pipe = mpcomp.pipeline(
        model, 2, split=2, tie_comp=spec, loss_fn=mean_loss, scaler=scaler, timeout=60.0
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.125)
    SCRIPT.reset()
    with listening(SCRIPT.tape, f"sent by rank {dist.get_rank()}"):
        for number in range(6):
            SCRIPT.step = SCRIPT.tape.call = number
            SCRIPT.scale = 1.0 if not scaled else 2.0**15 if number < 3 else 2.0**14
            SCRIPT.infinite = frozenset([0] if scaled and number == 2 else [])
            SCRIPT.begin()
            x = torch.ones(4, 3, dtype=blocks[0].weight.dtype)
            if number == 3 and not scaled:
                with pipe.uncompressed():
                    pipe.forward_backward(x, torch.zeros(4))
            else:
                pipe.forward_backward(x, torch.zeros(4))
            assert pipe.step_skipped == bool(SCRIPT.infinite)
            if not SCRIPT.infinite:
                for parameter in pipe.parameters():
                    SCRIPT.tape.note("sum", parameter.grad)
            _step(optimizer, scaler)
    kept = ("sum", "sent")
    told = {k: hashes for k, hashes in SCRIPT.tape.read().items() if k.startswith(kept)}
    return {**told, **_states(pipe)}


# -- between replicas -----------------------------------------------------------------------------


def _replica_classes() -> Any:
    import torch
    import torch.distributed as dist
    from golden_parts import SCRIPT, pattern
    from torch import nn

    class FixedGradients(torch.autograd.Function):
        """A loss whose gradients are fixed, of another replica others."""

        @staticmethod
        def forward(ctx: Any, x: Any, *parameters: Any) -> Any:
            ctx.save_for_backward(x, *parameters)
            return x.float().sum()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, *parameters = ctx.saved_tensors
            rank, found = dist.get_rank(), []
            for i, parameter in enumerate(parameters):
                like = torch.empty(parameter.shape, dtype=parameter.dtype)
                of_rank = pattern(like, 11, i, rank, step=SCRIPT.step)
                shared = pattern(like, 12, i, 0, step=SCRIPT.step)
                total = (of_rank + shared) * (SCRIPT.scale * 2.0**i)
                if SCRIPT.infinite and rank == 1 and i == 0:
                    total[1, 2] = torch.inf
                found.append(torch.empty_like(parameter).copy_(total))
            return torch.zeros_like(x), *found

    class Net(nn.Module):
        """Two matrices, a kernel and a vector."""

        def __init__(self, kernel: bool = True) -> None:
            super().__init__()
            shapes = {"wide": (48, 40), "tall": (33, 6), "vector": (12,)}
            self.wide, self.tall, self.vector = (
                nn.Parameter(pattern(torch.empty(shape), i, step=0))
                for i, shape in enumerate(shapes.values())
            )
            if kernel:
                like = torch.empty(6, 5, 3, 3).to(memory_format=torch.channels_last)
                self.kernel = nn.Parameter(pattern(like, 9, step=0))

        def forward(self, x: Any) -> Any:
            return FixedGradients.apply(x, *self.parameters())

    return Net


def replicas(scenario: str) -> dict[str, Any]:
    """Of each method a model in DDP."""
    net = _replica_classes()
    return {spec: _replicas(net, spec, scenario) for spec in REPLICAS}


def _replicas(net: Any, spec: str, scenario: str) -> Any:
    import torch
    from golden_parts import SCRIPT, listening
    from torch.nn.parallel import DistributedDataParallel

    import mpcomp

    scaled = "scaled" in scenario
    model = net().to(torch.bfloat16 if scaled else torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15) if scaled else None
    path = {"path": "two-phase"} if "two-phase" in scenario else {}
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.003)
    try:
        handle = mpcomp.compress_gradients(
            ddp, spec, network=mpcomp.ReplicaNetwork(smallest=64, **path), scaler=scaler
        )
    except ValueError:
        return "refused"
    SCRIPT.reset()
    _replica_steps(ddp, handle, scaler, listening)
    return {**SCRIPT.tape.read(), **_handle_state(handle)}


def sharded(scenario: str) -> dict[str, Any]:
    """Of each method a model in FSDP2, of which each rank has a part."""
    net = _replica_classes()
    return {spec: _sharded(net, spec) for spec in SHARDED}


def _sharded(net: Any, spec: str) -> Any:
    from golden_parts import SCRIPT, listening
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import mpcomp

    model = net(kernel=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    handle = mpcomp.compress_gradients(model, spec, network=mpcomp.ReplicaNetwork(smallest=64))
    SCRIPT.reset()
    _replica_steps(model, handle, None, listening)
    return {**SCRIPT.tape.read(), **_handle_state(handle)}


def _replica_steps(model: Any, handle: Any, scaler: Any, listening: Any) -> None:
    import torch
    import torch.distributed as dist
    from golden_parts import SCRIPT

    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    handle.follow(optimizer)
    with listening(SCRIPT.tape):
        for number in range(6):
            SCRIPT.step = SCRIPT.tape.call = number
            SCRIPT.scale = 1.0 if scaler is None else 2.0**15 if number < 3 else 2.0**14
            SCRIPT.infinite = frozenset([0] if scaler is not None and number == 2 else [])
            optimizer.param_groups[0]["lr"] = 0.125 if number < 3 else 0.0625
            x = torch.ones(2, 3, requires_grad=True)
            loss = model(x)
            if scaler is not None:
                scaler.scale(loss.detach())  # makes it begin
            loss.backward()
            for name, parameter in model.named_parameters():
                name = name.removeprefix("module.")
                result = parameter.grad
                if hasattr(result, "to_local"):
                    result = result.to_local()
                    name = f"{name} of rank {dist.get_rank()}"
                SCRIPT.tape.note(f"result {name}", result)
            _step(optimizer, scaler)


def _handle_state(handle: Any) -> dict[str, str]:
    import torch.distributed as dist
    from golden_parts import digest

    tensors = handle.state_dict()["tensors"]
    return {f"state {k} of rank {dist.get_rank()}": digest(v) for k, v in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--meet")
    told = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from golden_parts import joined, leave, written

    if told.rank is None:
        sys.stdout.write(written(record(told.only)))
        return
    tempfile.tempdir = told.meet  # what is saved there goes when all have ended
    warnings.simplefilter("ignore")  # of methods that would not shrink such small tensors
    with joined(told.rank, told.ranks, told.meet):
        tree = of_rank(told.only)
    leave(told.meet, told.rank, tree)


if __name__ == "__main__":
    main()
