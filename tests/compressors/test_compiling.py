"""Compiling ahead covers all that messages need: none waits for a compiler afterwards."""

import sys

import pytest
import torch

from mpcomp.compressors.compiling import compile_coder
from mpcomp.plan import measure_coding


def loops():
    """All that is compiled when it first runs, by its name."""
    return {
        f"{name}.{key}": value
        for name, module in sorted(sys.modules.items())
        if name.startswith("mpcomp.")
        for key, value in vars(module).items()
        if hasattr(value, "machine_code") and value.__module__ == name
    }


def kinds_of_arguments():
    """Signatures that each loop is compiled for by now."""
    machine_codes = {name: one.machine_code() for name, one in loops().items()}
    return {
        name: set(code.signatures)
        for name, code in machine_codes.items()
        if hasattr(code, "signatures")  # a step on vectors is part of the loop that calls it
    }


@pytest.fixture
def compiled_ahead():
    for function in loops().values():
        function.machine_code.cache_clear()  # as in a process that has coded nothing
    compile_coder()
    return kinds_of_arguments()


@pytest.mark.usefixtures("_no_walk_through_memory")
def test_no_message_compiles_more(compiled_ahead):
    """Of images and of tokens, in both dtypes, with few large values and with many."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((16, 16, 8, 8), (4, 32, 64)):
        for power in (1, 5):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(shape, generator=generator).relu().to(dtype)
                g = (torch.randn(shape, generator=generator) ** power).to(dtype)
                for method in ("auto", "auto:scratch", "auto:relu"):
                    measure_coding(method, method, x, g, repeats=1)
    many = torch.randn((512, 256), generator=generator)
    for method in ("step:0.3:lanes=true", "step:1:rounding=dither:lanes=true"):
        measure_coding(method, method, many, many, repeats=1)
    now = kinds_of_arguments()
    more = {name: now[name] - kinds for name, kinds in compiled_ahead.items()}
    assert {name for name, kinds in more.items() if kinds} == set()
    assert sum(map(len, now.values())) > 10
