"""Bad options are refused before any work, with the value, what is accepted, and the fix."""

import pytest
import torch

from recipes.config import Config, compute_dtype, devices_of, parse_split


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet19"}, "model is 'resnet19'; pass one of resnet18"),
        ({"precision": "int8"}, "precision is 'int8'; pass one of fp32"),
        ({"chunks": 0}, "chunks is 0; pass at least 1"),
        ({"width": -1}, "width is -1; pass at least 1"),
        ({"epochs": 0}, "epochs is 0; pass at least 1"),
        ({"train_limit": 0}, "train_limit is 0; pass at least 1"),
        ({"aug_seeds": -1}, "aug_seeds is -1; pass at least 0"),
        ({"lr": 0.0}, "lr is 0.0; pass a number above 0"),
        ({"lr": float("nan")}, "lr is nan; pass a number above 0"),
        ({"clip": -1.0}, "clip is -1.0; pass a number above 0"),
        ({"momentum": float("nan")}, "momentum is nan; pass at least 0"),
        ({"chunks": 9, "batch_size": 8}, "chunks is 9, batch_size is 8; .* at most as many chunks"),
        ({"warmup_steps": 1, "warmup_epochs": 1}, "pass one of the two"),
        ({"act": ("topc:0.1",)}, "topk"),
        ({"grad": ("topk:1.5",)}, "1.5"),
        ({"act": ()}, "need at least one spec"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_paper_defaults():
    config = Config()
    assert (config.lr, config.momentum, config.weight_decay) == (0.01, 0.9, 5e-4)
    assert (config.epochs, config.schedule_epochs, config.batch_size) == (100, 200, 128)
    assert config.drop_last and config.flip and config.crop_padding == 4


def test_digits_have_their_own_defaults_and_schedule():
    assert Config.for_data("digits").flip is False
    assert Config.for_data("digits", epochs=3).schedule_epochs == 3
    assert Config.for_data("digits", epochs=3, schedule_epochs=5).schedule_epochs == 5
    assert Config.for_data("somewhere/cifar") == Config(data="somewhere/cifar")


def test_json_round_trip():
    config = Config(act=("topk:0.1", "none", "quant:4"), clip=1.0)
    assert Config.from_json(config.to_json()) == config


def test_configuration_of_another_version():
    with pytest.raises(ValueError, match=r"unknown options \['colour'\]"):
        Config.from_json({"colour": "red"})


def test_uncompressed_changes_nothing_else():
    config = Config(act=("topk:0.1",), grad=("quant:4",), warmup_steps=3, seed=5)
    assert config.uncompressed() == Config(act=("none",), grad=("none",), seed=5)


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
    assert devices_of(Config(device="cpu,cpu")) == [torch.device("cpu")] * 2
    with pytest.raises(ValueError, match="device is 'gpu'; pass auto, cpu, cuda"):
        devices_of(Config(device="gpu"))
    too_many = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=f"torch sees {torch.cuda.device_count()} GPUs"):
        devices_of(Config(device=too_many))


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
