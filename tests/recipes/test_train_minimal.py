"""The recipe in one file: short enough to copy, and the same run in one process and in two."""

import os
from pathlib import Path

import torch.distributed as dist
from endings import end_of

from recipes import train_minimal

SHORT = ["--epochs", "1", "--limit", "64", "--width", "4", "--batch-size", "16", "--chunks", "2"]


def trained(command):
    return end_of(train_minimal.main, command)


def trained_on_a_rank(command):
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    return trained(command)


def test_it_can_be_read_at_once():
    assert len(Path(train_minimal.__file__).read_text().splitlines()) <= 150


def test_two_processes_train_the_same(ranks):
    alone = trained(SHORT)
    first, second = ranks(trained_on_a_rank, 2, SHORT, timeout_s=120.0)
    assert [one.code for one in (alone, first, second)] == [0, 0, 0]
    assert second.out == ""
    epoch, accuracy, *report = alone.out.splitlines()
    assert epoch.startswith("epoch 1: loss ")
    _, sent, fewer, _ = epoch.split(", ")
    assert float(sent.removesuffix(" kB sent")) > 0
    assert float(fewer.removesuffix(" times below bf16")) > 0.5 / 0.6  # uncompressed fp32 has 0.5
    assert accuracy.startswith("test accuracy ") and "topk:0.1" in "\n".join(report)
    # all but the seconds
    told, *_ = first.out.splitlines()
    assert told.rpartition(",")[0] == epoch.rpartition(",")[0]
    assert first.out.splitlines()[1] == accuracy
