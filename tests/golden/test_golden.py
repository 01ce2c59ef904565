"""Checkpoints that lie here go on bit for bit: see ``resume.py``.

They are read in processes of their own, whose kernels are those that every x86 processor has.
"""

import json
import platform
from pathlib import Path

import pytest
import torch
from golden_parts import differences, written
from resume import CASES, MADE_WITH_TORCH, gone_on

HERE = Path(__file__).parent
RESUMED = json.loads((HERE / "resumed.json").read_text())

pytestmark = [
    pytest.mark.skipif(
        platform.machine().lower() not in ("x86_64", "amd64"),
        reason="the bits are those of x86 processors",
    ),
    pytest.mark.skipif(
        ".".join(torch.__version__.split(".")[:2]) != MADE_WITH_TORCH,
        reason="the bits are those of another torch, whose kernels may round otherwise",
    ),
]


def test_going_on_from_checkpoints_that_lie_here():
    said = differences(RESUMED, gone_on("--load", str(HERE / "checkpoints")), "checkpoint")
    shown = "\n".join(said[:40])
    more = f"\nand {len(said) - 40} more" if len(said) > 40 else ""
    assert not said, f"{len(said)} entries are not as they were:\n{shown}{more}"


def test_there_is_one_of_every_case():
    assert set(RESUMED) == set(CASES) == {path.name for path in (HERE / "checkpoints").iterdir()}


def test_differences_are_named():
    """By case, entry and call; what is missing, and what nobody has recorded, too."""
    assert not differences(RESUMED, RESUMED)
    found = json.loads(written(RESUMED))
    assert found == RESUMED
    hashes = found["ddp-ef"]["weight"].split()
    found["ddp-ef"]["weight"] = " ".join([*hashes[:2], "00000000"])
    del found["ddp-dgc"]["gradient"]
    found["new"] = {}
    assert differences(RESUMED, found) == [
        "ddp-dgc / gradient: missing",
        "ddp-ef / weight: differs in call 2",
        "new: not in the record",
    ]
