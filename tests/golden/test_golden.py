"""What an earlier mpcomp sent and remembered, bit for bit: a record, and checkpoints of it.

See ``program.py`` for the record and ``resume.py`` for the checkpoints. Both run in processes of
their own, whose kernels are those that every x86 processor has.
"""

import json
import platform
from pathlib import Path

import pytest
import torch
from everyday import slow_after
from golden_parts import differences, written
from program import CUTS, PARTS, REPLICAS, SHARDED, TIES, record
from resume import CASES, gone_on

HERE = Path(__file__).parent
RECORD = json.loads((HERE / "record.json").read_text())
RESUMED = json.loads((HERE / "resumed.json").read_text())
RELEASE = ".".join(torch.__version__.split(".")[:2])

pytestmark = [
    pytest.mark.skipif(
        platform.machine().lower() not in ("x86_64", "amd64"),
        reason="the record's bits are those of x86 processors",
    ),
    pytest.mark.skipif(
        RECORD["made with"]["torch"] != RELEASE,
        reason="the record's bits are those of another torch, whose kernels may round otherwise",
    ),
]


def check(said: list[str]) -> None:
    """Fails if something differs, and says what."""
    shown = "\n".join(said[:40])
    more = f"\nand {len(said) - 40} more" if len(said) > 40 else ""
    assert not said, f"{len(said)} entries are not as they were:\n{shown}{more}"


#: What is recorded in one start of processes: all scenarios of a door, or one that takes long.
STARTS = ["replicas/fp32", "replicas/bf16 two-phase scaled", "replicas/sharded", "tie", "cut"]


@pytest.mark.parametrize("start", slow_after(1, STARTS))
def test_what_is_sent_and_remembered(start):
    door, _, scenario = start.partition("/")
    found, recorded = record(start)[door], RECORD[door]
    if scenario:
        recorded = {scenario: recorded[scenario]}
    check(differences(recorded, found, door))


@pytest.mark.slow
def test_going_on_from_old_checkpoints():
    check(differences(RESUMED, gone_on("--load", str(HERE / "checkpoints")), "checkpoint"))


def test_the_record_is_whole():
    """Every method has its entries, at every door and in every scenario."""
    assert all(sum(part.startswith(start) for start in STARTS) == 1 for part in PARTS)
    assert sorted(PARTS) == sorted(
        f"{door}/{scenario}" for door in ("cut", "tie", "replicas") for scenario in RECORD[door]
    )
    named = {act if act == grad else f"{act} | {grad}" for act, grad in CUTS}
    assert len(named) == len(CUTS)
    for entries in RECORD["cut"].values():
        assert named == {key for key in entries if not key.endswith(" state")} - {"loss"}
        for name in named:
            assert len(entries[name]) == 4, name  # both ways what was sent, and what arrived
            for told in entries[name].values():
                assert len(told.split()) == 7, name
    for entries in RECORD["tie"].values():
        assert set(entries) == set(TIES)
    for scenario, entries in RECORD["replicas"].items():
        assert set(entries) == set(SHARDED if scenario == "sharded" else REPLICAS)
    assert set(RESUMED) == set(CASES) == {path.name for path in (HERE / "checkpoints").iterdir()}


def test_differences_are_named():
    """By method, door, scenario and call; what is missing, and what nobody has recorded, too."""
    assert not differences(RECORD, RECORD)
    found = json.loads(written(RECORD))
    assert found == RECORD
    sent = found["cut"]["fp32"]["ef+topk:0.1"]
    hashes = sent["act sent"].split()
    sent["act sent"] = " ".join([*hashes[:3], "00000000", *hashes[4:]])
    del found["tie"]["fp32"]["sign"]
    found["replicas"]["sharded"]["new"] = {}
    assert differences(RECORD, found) == [
        "cut / fp32 / ef+topk:0.1 / act sent: differs in call 3",
        "replicas / sharded / new: not in the record",
        "tie / fp32 / sign: missing",
    ]
