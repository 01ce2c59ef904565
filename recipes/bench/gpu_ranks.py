"""Parts of `recipes.bench.gpu_check` for two ranks: a pipeline on one GPU, and NCCL.

    python -m recipes.bench.gpu_check --parts pipeline nccl

A rank that hangs is killed at its limit, and that is a result.
"""

from __future__ import annotations

import importlib
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import mpcomp
from mpcomp.api.build import pipeline as pipeline_of
from mpcomp.api.pipeline import Pipeline
from mpcomp.comm.paced import slow_links
from mpcomp.core.context import TensorMeta
from recipes.bench.gpu_forks import GLOO, NCCL, alone, together
from recipes.bench.gpu_messages import traced
from recipes.bench.gpu_parts import DRY_SIZE, device_of
from recipes.bench.jobs import Reporter
from recipes.bench.workers import num_cores
from recipes.decoder import SIZES, decoder, equal_stages, token_batch, token_loss
from stages.clock import now

__all__ = ["apart", "load_coder", "nccl", "perceptron", "pipeline", "why_not"]

NUM_STAGES: Final = 2
#: A block to a stage, as in the race, in a step of 8 microbatches of 8 sequences.
SIZE: Final = SIZES["203M"]._replace(num_blocks=NUM_STAGES, batch=64, chunks=8)


class Setting(NamedTuple):
    """A setting of two stages.

    Attributes:
        method: both ways.
        background: whether messages are coded beside the stages.
        mbps: Mbit/s of the link between the ranks, each way; None leaves it as it is.
    """

    method: str
    background: bool = False
    mbps: float | None = None


SETTINGS: Final = (
    Setting("bf16"),
    Setting("auto:scratch"),
    Setting("auto:scratch", background=True),
    Setting("quant:4"),
    Setting("auto:scratch", background=True, mbps=1000.0),
    Setting("bf16", mbps=1000.0),
)
#: After which ranks have hung.
METHOD_S: Final = 40.0
WARMUPS: Final = 2
TIMED: Final = 3


def pipeline(reporter: Reporter, dry: bool) -> None:
    """Reports steps of two stages in two processes on one GPU, next to those in one process."""
    load_coder()
    expected: dict[str, Any] = {}
    for setting in SETTINGS:
        if reporter.left_s <= 0:
            return
        method = setting.method
        if method not in expected:
            expected[method] = alone(_steps, Setting(method), dry, "local")
        outcome = together(_steps, NUM_STAGES, setting, dry, None, seconds=METHOD_S)
        row = {**setting._asdict(), "outcome": outcome.text, "threads": _threads(dry)}
        reporter.say(row | _compared(outcome.values, expected[method]))


def load_coder() -> None:
    """Compiles the entropy coder here: ranks that are forked have it, and need no time for it."""
    x = torch.linspace(-1, 1, 64).reshape(4, 16)
    generator = torch.Generator()
    coder = mpcomp.parse("step:0.5")
    coder.decompress(coder.compress(x, generator), TensorMeta.of(x), generator)


def _threads(dry: bool) -> int:
    """Threads of each process."""
    return 1 if dry else max(1, num_cores() // NUM_STAGES)


def _steps(setting: Setting, dry: bool, engine: str | None) -> dict[str, Any]:
    """Losses, seconds and bytes of some steps in this process; of a rank, the GPU's part in one."""
    device = device_of(dry)
    size = DRY_SIZE._replace(num_blocks=NUM_STAGES) if dry else SIZE
    torch.set_num_threads(_threads(dry))
    os.environ["MPCOMP_BACKGROUND"] = str(int(setting.background))
    _repeat_exactly()
    model = decoder(
        num_blocks=size.num_blocks,
        width=size.width,
        num_heads=size.num_heads,
        vocab=size.vocab,
        context=size.context,
    )
    with slow_links(setting.mbps):
        pipe = pipeline_of(
            model,
            size.chunks,
            split=equal_stages(NUM_STAGES, NUM_STAGES),
            devices=device,
            act_comp=setting.method,
            grad_comp=setting.method,
            loss_fn=token_loss,
            engine=engine,
        )
    batch = token_batch(batch=size.batch, context=size.context, vocab=size.vocab)
    x, y = (each.to(device) for each in batch)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses, seconds, sent = [], [], [0]

    def step() -> None:
        begin = now()
        with torch.autocast(device.type, torch.bfloat16):
            loss = pipe.forward_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(now() - begin)
        losses.append(loss.item())
        sent.append(pipe.wire_bytes)

    for _ in range(WARMUPS + TIMED):
        step()
    found = {
        "losses": list(losses),
        "step_s": statistics.median(seconds[WARMUPS:]),
        "wire_bytes": sent[-1] - sent[-2],
    }
    if engine is None:
        events = traced(step)
        kernels = [event["dur"] for event in events if event.get("cat") == "kernel"]
        found["kernel_s"] = sum(kernels) / 1e6 if device.type == "cuda" else None
        found["traced_s"] = seconds[-1]
    return found


def _repeat_exactly() -> None:
    """Has torch choose kernels that give the same bits again, or an error."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _compared(ranks: Sequence[Mapping[str, Any]] | None, expected: Mapping[str, Any]) -> Any:
    """The rest of a row: what ranks have found, next to what one process has."""
    of_one = {"one_process_step_s": expected["step_s"], "one_process_losses": expected["losses"]}
    if ranks is None:
        names = ("step_s", "gpu_idle", "wire_bytes", "losses", "losses_equal", "largest_difference")
        return of_one | dict.fromkeys(names)
    idle = None
    if all(rank["kernel_s"] is not None for rank in ranks):
        whole = max(rank["traced_s"] for rank in ranks)
        idle = 1 - sum(rank["kernel_s"] for rank in ranks) / whole
    losses = [rank["losses"] for rank in ranks]
    return {
        **of_one,
        "step_s": max(rank["step_s"] for rank in ranks),
        "gpu_idle": idle,
        "wire_bytes": ranks[0]["wire_bytes"],
        "losses": losses[0],
        "losses_equal": all(own == expected["losses"] for own in losses),
        "largest_difference": apart(losses, expected["losses"]),
    }


def apart(losses: Sequence[Sequence[float]], expected: Sequence[float]) -> float:
    """The largest difference between a rank's losses and those expected."""
    return max(abs(a - b) for own in losses for a, b in zip(own, expected, strict=True))


# -- NCCL ------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A training between two ranks.

    Attributes:
        messages: what is sent, in words.
        act: method of activations.
        grad: method of gradients.
        tied: whether the model is a GPT-2, whose embedding is its head.
    """

    messages: str
    act: str
    grad: str
    tied: bool = False


#: From here on two ranks may share a GPU.
NCCL_THAT_SHARES: Final = (2, 31, 0)
CASES: Final = {
    "fixed": Case("topk:0.1, of one length", "topk:0.1", "topk:0.1"),
    "variable": Case("step:0.3 and step:0.5, of any length", "step:0.3", "step:0.5"),
    "tied": Case("uncompressed, and a tied embedding's", "none", "none", tied=True),
}
#: After which ranks have hung.
CASE_S: Final = 12.0
CASE_STEPS: Final = 3


def nccl(reporter: Reporter, dry: bool) -> None:
    """Reports which messages two ranks exchange over NCCL; a dry run's go over gloo."""
    devices = ["cpu", "cpu"]
    if not dry:
        num_gpus, version = alone(_gpus_and_nccl)
        why = why_not(num_gpus, version)
        if why is not None:
            reporter.say({"why_skipped": why})
            return
        devices = ["cuda:0", "cuda:1" if num_gpus > 1 else "cuda:0"]
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    load_coder()
    expected = alone(_losses_in_one_process, devices[0])
    for name, case in CASES.items():
        if reporter.left_s <= 0:
            return
        outcome = together(_losses, 2, case, devices, seconds=CASE_S, backend=GLOO if dry else NCCL)
        text = outcome.text
        if outcome.values is not None:
            most = apart(outcome.values, expected[name])
            text += ", losses as in one process" if most == 0 else f", losses {most:.1e} apart"
        row = {"case": name, "messages": case.messages, "devices": devices}
        reporter.say({**row, "outcome": text})


def why_not(num_gpus: int, version: tuple[int, ...] | None) -> str | None:
    """The reason for which two ranks cannot be tried here, if there is one.

    Args:
        num_gpus: of this machine.
        version: of NCCL; None without it.
    """
    if version is None:
        return "this torch has no NCCL"
    if num_gpus > 1 or version >= NCCL_THAT_SHARES:
        return None
    there, needed = (".".join(map(str, one)) for one in (version, NCCL_THAT_SHARES[:2]))
    return f"NCCL {there} on one GPU; two ranks on one need {needed} or later"


def _gpus_and_nccl() -> tuple[int, tuple[int, ...] | None]:
    there = dist.is_nccl_available()
    version = torch.cuda.nccl.version() if there else None  # type: ignore[no-untyped-call]
    return torch.cuda.device_count(), version


def _losses_in_one_process(device: str) -> dict[str, list[float]]:
    return {name: _losses(case, [device, device], "local") for name, case in CASES.items()}


def _losses(case: Case, devices: list[str], engine: str | None = None) -> list[float]:
    """Losses of a few steps: of this rank, or of one process that has both stages."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if engine is None and devices[0] != "cpu":
        torch.cuda.set_device(devices[dist.get_rank()])
    pipe, batch = (_gpt2 if case.tied else perceptron)(
        act_comp=case.act, grad_comp=case.grad, devices=devices, engine=engine
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for _ in range(CASE_STEPS):
        losses.append(pipe.forward_backward(*batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def perceptron(**settings: Any) -> tuple[Pipeline, tuple[Tensor, Tensor]]:
    """A model in two stages with those settings, and a batch."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    pipe = pipeline_of(model, 4, split=2, loss_fn=F.cross_entropy, **settings)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 64, generator=generator)
    return pipe, (x, torch.randint(10, (32,), generator=generator))


def _gpt2(**settings: Any) -> tuple[Pipeline, tuple[Any, Tensor]]:
    import transformers  # it takes seconds, for which only one part waits

    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    pipe = pipeline_of(transformers.GPT2LMHeadModel(config), 4, split=2, **settings)
    tokens, _ = token_batch(batch=8, context=16, vocab=64)
    return pipe, ({"input_ids": tokens}, tokens)
