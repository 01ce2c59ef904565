"""Parts of `recipes.bench.gpu_check` for one process: the machine, the tests, and coding.

    python -m recipes.bench.gpu_check --parts machine tests coding

A part reports each row as it has it, and begins nothing when its time is over.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mpcomp.plan import measure_coding
from recipes.bench.jobs import Reporter
from recipes.bench.workers import num_cores
from recipes.decoder import SIZES, Size, activation_of
from stages.clock import now

__all__ = ["DRY_SIZE", "coding", "device_of", "machine", "output_of", "result_of", "tests"]

ROOT: Final = Path(__file__).parents[2]

COPIED_BYTES: Final = 1 << 28
#: Rows and columns of a product.
MATRIX: Final = 8192
WAYS: Final = (
    *("host_to_gpu_pinned", "gpu_to_host_pinned", "host_to_gpu_pageable", "gpu_to_host_pageable"),
    *("in_gpu_memory", "in_host_memory"),
)
REPEATS: Final = 5

#: Row -> methods of activations and gradients, of the race to a loss as well.
METHODS: Final[Mapping[str, tuple[str, str]]] = {
    "fp32": ("none", "none"),
    "bf16": ("bf16", "bf16"),
    "int8, scale a token": ("quant:8:scale=token", "quant:8:scale=token"),
    "fw4-bw8": ("quant:4", "quant:8"),
    "top 50 %": ("topk:0.5+fp16", "topk:0.5+fp16"),
    "top 10 %": ("topk:0.1+fp16", "topk:0.1+fp16"),
    # Tiles of 64 elements with a scale each, as TAH-Quant has them.
    "tiles of 64, 4 bits": ("quant:4:scale=64", "quant:4:scale=64:rounding=stochastic"),
    "auto:scratch": ("auto:scratch", "auto:scratch"),
    # Coarser, as an early target forgives: right on average, gradients do not slow it down.
    "klt, step 0.2 / 0.7, dithered": (
        "klt+step:0.2:centre=true",
        "klt+step:0.7:rounding=dither",
    ),
    "klt, step 0.4 / 1, dithered": ("klt+step:0.4:centre=true", "klt+step:1:rounding=dither"),
    "klt, step 0.2 / 1": ("klt+step:0.2:centre=true", "klt+step:1"),
    "klt, step 0.5 / 1": ("klt+step:0.5:centre=true", "klt+step:1"),
}
#: Those that are timed first, by every number of threads; others by the most.
FIRST: Final = ("bf16", "fw4-bw8", "top 10 %", "tiles of 64, 4 bits", "auto:scratch")
THREADS: Final = (1, 4, 16)
CODING_REPEATS: Final = 2
#: Of a dry run.
DRY_SIZE: Final = Size(8, 32, 4, 64, 16, 4, 2)


def device_of(dry: bool) -> torch.device:
    """The device of a part: the first GPU, or the CPU."""
    return torch.device("cpu") if dry else torch.device("cuda", 0)


def machine(reporter: Reporter, dry: bool) -> None:
    """Reports GPU and software, then speeds of copies and of a product of matrices."""
    reporter.say(_gpu(dry) | _software())
    num_bytes, matrix = (1 << 20, 64) if dry else (COPIED_BYTES, MATRIX)
    reporter.say(_speeds(device_of(dry), num_bytes, matrix))


def _gpu(dry: bool) -> dict[str, Any]:
    names = ("gpu", "num_gpus", "compute_capability", "driver", "nccl")
    if dry:
        return dict.fromkeys(names)
    major, minor = torch.cuda.get_device_capability()
    found = (
        torch.cuda.get_device_name(),
        torch.cuda.device_count(),
        f"{major}.{minor}",
        _driver(),
        ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    )
    return dict(zip(names, found, strict=True))


def _driver() -> str | None:
    """The driver's version, where its own command is there to tell it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    asked = [command, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    return told.stdout.strip() if told.returncode == 0 else None


def _software() -> dict[str, Any]:
    there = importlib.util.find_spec("triton") is not None
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": importlib.metadata.version("triton") if there else None,
        "python": platform.python_version(),
        "cores": num_cores(),
    }


def _speeds(device: torch.device, num_bytes: int, matrix: int) -> dict[str, float | None]:
    """GB/s of copies, read and written where both ends are in one memory; TFLOP/s of a product."""
    host, other_host = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    ways = {"in_host_memory": (other_host, host)}
    if device.type == "cuda":
        pinned, here, there = host.pin_memory(), host.to(device), host.to(device)
        ways |= {
            "host_to_gpu_pinned": (here, pinned),
            "gpu_to_host_pinned": (pinned, here),
            "host_to_gpu_pageable": (here, host),
            "gpu_to_host_pageable": (host, here),
            "in_gpu_memory": (there, here),
        }
    speeds: dict[str, float | None] = dict.fromkeys(f"{way}_gb_s" for way in WAYS)
    for way, (to, source) in ways.items():
        moved = num_bytes * (2 if way.startswith("in_") else 1)
        speeds[f"{way}_gb_s"] = moved / _seconds(functools.partial(to.copy_, source)) / 1e9
    a, b = (torch.randn(matrix, matrix, device=device).bfloat16() for _ in range(2))
    speeds["bf16_product_tflop_s"] = 2 * matrix**3 / _seconds(lambda: a @ b) / 1e12
    return speeds


def _seconds(work: Callable[[], Any]) -> float:
    """Median of a few, after one that is not counted."""
    times = []
    for _ in range(1 + REPEATS):
        begin = now()
        work()
        times.append(now() - begin)
    return statistics.median(times[1:])


def tests(reporter: Reporter, dry: bool) -> None:
    """Reports how the tests that are marked gpu end; a dry run only collects some."""
    # A package that is missing costs the tests that need it, and no others.
    arguments = ["-q", "-m", "gpu", "--continue-on-collection-errors"]
    if importlib.util.find_spec("xdist") is not None:
        arguments += ["-n", "0" if dry else "8"]
    if dry:
        arguments += ["--collect-only", "tests/test_cuda.py"]
    if importlib.util.find_spec("pytest") is None:
        reporter.say({"why_skipped": "pytest is not installed"})
        return
    if not (ROOT / "tests").is_dir():
        reporter.say({"why_skipped": "this copy has no tests"})
        return
    begin = time.perf_counter()
    code, lines = output_of([sys.executable, "-m", "pytest", *arguments], reporter)
    seconds = time.perf_counter() - begin
    reporter.say({"command": " ".join(arguments), "seconds": seconds, **result_of(lines)})
    if code not in (0, 1, None):  # 1: some tests failed, which is a result
        raise RuntimeError(f"pytest ended with code {code}: {' '.join(lines[-2:])}")


def output_of(command: Sequence[str], reporter: Reporter) -> tuple[int | None, list[str]]:
    """A command's exit code and lines; no code if it was killed, as the time was over."""
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(max(0.0, reporter.left_s))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        file.seek(0)
        return code, [line.rstrip() for line in file if line.strip()]


def result_of(lines: Sequence[str]) -> dict[str, Any]:
    """Numbers from the last lines that pytest prints; None where it was killed before."""
    last = lines[-1] if lines else ""
    collected = re.search(r"(?:(\d+)/)?(\d+) tests? collected", last)
    numbers = {name: int(count) for count, name in re.findall(r"(\d+) ([a-z]+)", last)}
    ended = bool(re.search(r" in [\d.]+s", last)) and collected is None
    return {
        "collected": int(collected[1] or collected[2]) if collected else None,
        **{
            name: numbers.get(name, 0) if ended else None
            for name in ("passed", "failed", "skipped")
        },
        "errors": numbers.get("error", numbers.get("errors", 0)) if ended else None,
        "failures": [line for line in lines if line.startswith(("FAILED ", "ERROR "))],
        "last_lines": list(lines[-5:]),
    }


def coding(reporter: Reporter, dry: bool) -> None:
    """Reports seconds of coding a microbatch of the race, by method and threads of the coder."""
    threads = sorted({min(each, num_cores()) for each in THREADS})
    by_name = {name: threads if name in FIRST else threads[-1:] for name in (*FIRST, *METHODS)}
    if dry:
        by_name = dict.fromkeys(("bf16", "auto:scratch"), threads[:1])
    x = activation_of(DRY_SIZE if dry else SIZES["203M"], device_of(dry))
    for name, of_name in by_name.items():
        for num_threads in of_name:
            if reporter.left_s <= 0:
                return
            act, grad = METHODS[name]
            told = {"row": name, "act": act, "grad": grad, "threads": num_threads}
            reporter.say(told | _coding_of(act, grad, x, num_threads, 1 if dry else CODING_REPEATS))


def _coding_of(act: str, grad: str, x: Tensor, num_threads: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(num_threads)
    cost, _ = measure_coding(act, grad, x, x.clone(), repeats=repeats)
    return {"elements": x.numel(), "repeats": repeats, **cost._asdict()}
