"""Cuts and devices as the command line names them; processes that do not fit are told the fix."""

import pytest
import torch

import stages
from mpcomp.core.precision import compute_dtype
from recipes import ranks as recipe_ranks
from recipes.image_config import ImageConfig
from recipes.placement import check_ranks, common_dtype, devices_of, parse_split
from recipes.ranks import Ranks


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("paper", "paper"),
        ("4", 4),
        ("3,2,2,3", [3, 2, 2, 3]),
        ("layer1, layer2", ["layer1", "layer2"]),
        ("layer2", ["layer2"]),
    ],
)
def test_split(text, split):
    assert parse_split(text) == split


@pytest.mark.parametrize("text", ["", "3,,2", ","])
def test_bad_split(text):
    with pytest.raises(ValueError, match="pass paper, a number of stages"):
        parse_split(text)


def test_devices():
    assert devices_of(ImageConfig(device="cpu,cpu"), Ranks()) == [torch.device("cpu")] * 2
    with pytest.raises(ValueError, match="device is 'gpu'; pass auto, cpu, cuda"):
        devices_of(ImageConfig(device="gpu"), Ranks())
    too_many = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=f"torch sees {torch.cuda.device_count()} GPUs"):
        devices_of(ImageConfig(device=too_many), Ranks())


@pytest.mark.parametrize(
    ("features", "expected"), [({}, None), ({"avx512_bf16": True}, torch.bfloat16)]
)
def test_automatic_precision_asks_the_processor(monkeypatch, features, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert compute_dtype("auto", torch.device("cpu")) == expected


def test_chosen_precision():
    cpu = torch.device("cpu")
    assert compute_dtype("fp32", cpu) is None
    assert compute_dtype("fp16", cpu) is torch.float16


def test_precision_that_all_machines_have(monkeypatch):
    """One that has no fast bf16 brings all to fp32, as the numbers must be those of one run."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": True})
    cpu = torch.device("cpu")
    assert common_dtype("auto", cpu, Ranks()) is torch.bfloat16
    monkeypatch.setattr(Ranks, "gather", lambda self, own: [own, "None"])
    assert common_dtype("auto", cpu, Ranks()) is None


def test_devices_under_torchrun(monkeypatch):
    """Each process has its own, by its number on the machine."""
    ranks = Ranks(rank=3, size=4, local_rank=1, local_size=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices_of(ImageConfig(), ranks) == [torch.device("cpu")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("auto", "cuda", "cuda:0,cuda:1,cuda:0,cuda:1"):
        assert devices_of(ImageConfig(device=name), ranks) == [torch.device("cuda", 1)]
    assert devices_of(ImageConfig(device="cpu"), ranks) == [torch.device("cpu")]
    with pytest.raises(ValueError, match="names 3 for 4 processes"):
        devices_of(ImageConfig(device="cpu,cpu,cpu"), ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 processes on this machine, but torch sees 1 GPUs"):
        devices_of(ImageConfig(), ranks)


def test_processes_that_share_a_gpu_meet_on_the_cpu(monkeypatch):
    """NCCL would refuse them."""
    for gpus, size, place in ((0, 1, "cpu"), (1, 1, "cuda"), (1, 4, "cpu"), (4, 4, "cuda")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(size))
        assert recipe_ranks._meeting_place() == torch.device(place)


@pytest.mark.parametrize(
    ("chosen", "num_ranks"),
    [
        ({}, 1),
        ({}, 4),
        ({"replicas": 2}, 8),
        ({"split": "layer1,layer3"}, 3),
        ({"schedule": "Interleaved1F1B"}, 2),
        ({"schedule": "ZBVZeroBubble"}, 2),
    ],
)
def test_stages_that_fit_the_processes(chosen, num_ranks):
    check_ranks(ImageConfig(**chosen), stages.resnet18(width=4), num_ranks)


@pytest.mark.parametrize(
    ("chosen", "num_ranks", "message"),
    [
        ({}, 2, "makes 4 stages, but the 2 processes take 2 .* pass --split 2, or start 4"),
        ({"replicas": 2}, 4, "the 2 processes of a replica take 2 .* or start 8 processes"),
        ({"schedule": "DualPipeV"}, 4, "take 8 with the schedule DualPipeV; .* or start 2"),
        ({"replicas": 4}, 6, "replicas is 4, but there are 6 processes"),
        ({"replicas": 4}, 4, "the 1 processes of a replica take 1 .* pass --split 1, or start 16"),
    ],
)
def test_stages_that_do_not(chosen, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        check_ranks(ImageConfig(**chosen), stages.resnet18(width=4), num_ranks)
