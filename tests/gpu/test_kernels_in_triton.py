"""Kernels for GPUs, tested without one: bits when interpreted, and machine code."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from mpcomp.core import kernels

triton = pytest.importorskip("triton", reason="Triton is no dependency: pip install triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from recipes.bench.gpu_kernels import calls_of, in_triton  # noqa: E402

HERE = Path(__file__).parent
TYPES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32",
    torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
METHODS = [
    "quant:3:scale=128:rounding=stochastic",
    "quant:7",
    "quant:8:scale=token",
    "step:0.5:centre=true:rounding=dither",
    "step:0.5:dead_zone=0.8",
    "topk:0.1",
]


@pytest.mark.slow
def test_interpreted_kernels_have_the_bits_of_the_cpu():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", "-rs"]
    told = subprocess.run(
        [*command, str(HERE / "test_gpu_bits.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 0 and "8 passed" in told.stdout, told.stdout + told.stderr


class Launches:
    """Launches, to be compiled instead: kernel, types, constants, options."""

    def __init__(self):
        self.asked = {}

    def run(self, function, *args, grid, warmup, enable_fp_fusion, num_warps=4, **constants):
        """Notes a launch, in the place of `triton.runtime.JITFunction.run`."""
        assert warmup is False and enable_fp_fusion is False and grid[0] > 0
        signature = {}
        for name, value in zip(function.arg_names, args, strict=False):
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value is None or (value == 1 and name not in (function.do_not_specialize or ())):
                constants[name] = value
            else:
                signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        signature |= dict.fromkeys(constants, "constexpr")
        signature = {name: signature[name] for name in function.arg_names}
        key = (function.__name__, num_warps, *signature.values(), *constants.values())
        options = {"num_warps": num_warps, "enable_fp_fusion": False}
        self.asked[key] = function, signature, constants, options


@pytest.mark.slow
def test_compiled_kernels_divide_and_round_as_the_cpu_does(monkeypatch, tmp_path):
    """For two kinds of GPUs: no operation that a CPU does not have, and little shared memory."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    x = torch.randn(40, 72, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    there, launches = in_triton(), Launches()
    filled = mock.patch.object(torch, "empty", torch.ones)  # by no kernel, and lanes read sizes
    with (
        filled,
        mock.patch.object(
            triton.runtime.JITFunction,
            "run",
            lambda function, *a, **k: launches.run(function, *a, **k),
        ),
    ):
        for method in METHODS:
            for call in calls_of(method, x):
                if call.name in there:
                    kernels.KERNELS[call.name].by_device["cuda"](*call.args)
    assert len(launches.asked) > len(there) - 1
    for function, signature, constants, options in launches.asked.values():
        for capability in (80, 90):
            source = ASTSource(function, signature, constants)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            inexact = re.findall(
                r"fma\.\w+\.f|div\.(?:full|approx)|\.approx|\.ftz", made.asm["ptx"]
            )
            rounded = re.findall(r"\b(?:add|sub|mul|div)\.(\w+\.)?f(?:32|64)\b", made.asm["ptx"])
            assert not inexact and set(rounded) <= {"rn."}, (function, inexact, rounded)
            assert made.metadata.shared < 48 << 10, function


def test_what_triton_cannot_have_is_run_by_torch(monkeypatch):
    """The table takes torch's operations where Triton is switched off, missing, or has no code."""
    device = torch.device("cuda", 0)
    chosen = kernels._in_triton.__wrapped__
    with pytest.raises(ValueError, match="MPCOMP_TRITON='yes': expected 1"):
        monkeypatch.setenv("MPCOMP_TRITON", "yes")
        chosen(device)
    for given in ({}, {"MPCOMP_TRITON": "0"}):
        monkeypatch.delenv("MPCOMP_TRITON", raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert not chosen(device)
    monkeypatch.setenv("MPCOMP_TRITON", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not chosen(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert chosen(device)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not chosen(device)
