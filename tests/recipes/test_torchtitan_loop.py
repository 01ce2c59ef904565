"""The loop in torchtitan's shape: short enough to be read, and it trains with compressed cuts."""

from pathlib import Path

import pytest
from endings import end_of

from recipes import torchtitan_loop

SHORT = ["--steps", "12"]
WAYS = {
    "one stage a rank": ["--schedule", "1F1B"],
    "two stages a rank, the default's words": [
        *("--schedule", "Interleaved1F1B"),
        *("--act", "auto", "--grad", "auto"),
    ],
}


def trained(command):
    return end_of(torchtitan_loop.main, command)


def test_it_can_be_read_at_once():
    lines = Path(torchtitan_loop.__file__).read_text().splitlines()
    assert len(lines) <= 120
    assert sum("compressed(" in line for line in lines) == 1
    assert not any("mpcomp.pipeline(" in line for line in lines)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train(ranks, way):
    first, last = ranks(trained, 2, [*SHORT, *WAYS[way]], timeout_s=180.0)
    assert [first.code, last.code] == [0, 0]
    steps = [line for line in last.out.splitlines() if line.startswith("step ")]
    losses = [float(line.split()[3].rstrip(",")) for line in steps]
    assert len(losses) == 12 and losses[-1] < 0.9 * losses[0]
    assert not any(line.startswith("step ") for line in first.out.splitlines())
    sent = [line for one in (first, last) for line in one.out.splitlines() if "boundary" in line]
    assert len(sent) == (2 if way == "one stage a rank" else 6)
    for line in sent:
        assert float(line.split(", ")[-1].split()[0]) > 2, line
