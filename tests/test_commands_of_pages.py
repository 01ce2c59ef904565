"""The commands that README and guide give, executed on little data, each page in a fresh folder.

What needs root, Docker or another machine is only parsed, by another test.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import GUIDES, ROOT, commands_of, name_of

#: What cannot be executed here: other machines, containers, and how a machine is set up.
NEEDS = re.compile(r"#.*machine|--nnodes|docker compose|^(?:cd|sudo|ip|sysctl|export) ")
#: New environments, and the suite within itself, are what `.ci/run` tries.
INSTALLS = "python3 -m venv "
#: A script of the reader's own, which the page names.
OWN = "train.py"
#: What makes a command short, by what is in it: the same program, on little more than a batch.
#: A run that goes on has its options in its folder.
LITTLE = {
    "-m recipes.cifar10 --data": " --epochs 1 --train-limit 256 --test-limit 128",
    "-m recipes.cifar10 --resume": " --epochs 2",
    "-m recipes.wikitext --model": " --epochs 1 --train-limit 24 --eval-limit 16",
    "mpcomp train --json cifar10": " --epochs 1 --train-limit 256 --test-limit 128",
    "mpcomp methods": " --repeats 1",
    "mpcomp methods --shape": " --only topk:0.1 quant:4",  # the line before it has all methods
    "mpcomp methods --tensor": " --only topk:0.1 quant:4",
}
TIMEOUT_S = 600

# Several trainings a page, on cores that other tests use too.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def executed(page: Path) -> list[str]:
    """The commands of a page that can be executed here, and that no page before it has."""
    before = {line for other in GUIDES[: GUIDES.index(page)] for line in commands_of(other)}
    return [
        line
        for line in commands_of(page)
        if not (NEEDS.search(line) or line.startswith(INSTALLS) or OWN in line or line in before)
    ]


@pytest.mark.parametrize(
    "page", [page for page in GUIDES if executed(page)], ids=lambda page: name_of(page)
)
def test_commands_do_what_they_are_given_for(page, tmp_path):
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    torch.save(torch.randn(4, 16, 64), tmp_path / "activation.pt")  # that a reader has saved
    for line in executed(page):
        little = [options for part, options in LITTLE.items() if part in line]
        code, said = end_of(line.partition(" #")[0] + "".join(little), tmp_path)
        assert code == 0, f"{line}\n{said[-4000:]}"


def end_of(line: str, folder: Path) -> tuple[int, str]:
    """How a command ends in this folder, as in one of a checkout, and what it says."""
    bin_folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, said
