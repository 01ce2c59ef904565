"""Bad options are refused before any work, with the value, what is accepted, and the fix."""

import json

import pytest
import torch

from recipes.image_config import ImageConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet19"}, "model is 'resnet19'; pass one of resnet18"),
        ({"precision": "int8"}, "precision is 'int8'; pass one of fp32"),
        ({"chunks": 0}, "chunks is 0; pass at least 1"),
        ({"model": "wide_resnet", "depth": 0}, "depth is 0; pass at least 1"),
        ({"widen": 2}, "widen is 2, but the model resnet18 has its own; drop --widen, or pass"),
        ({"width": -1}, "width is -1; pass at least 1"),
        ({"epochs": 0}, "epochs is 0; pass at least 1"),
        ({"train_limit": 0}, "train_limit is 0; pass at least 1"),
        ({"aug_seeds": -1}, "aug_seeds is -1; pass at least 0"),
        ({"lr": 0.0}, "lr is 0.0; pass a number above 0"),
        ({"lr": float("nan")}, "lr is nan; pass a number above 0"),
        ({"clip": -1.0}, "clip is -1.0; pass a number above 0"),
        ({"momentum": float("nan")}, "momentum is nan; pass at least 0"),
        ({"replicas": 0}, "replicas is 0; pass at least 1"),
        ({"replicas": 3}, "batch_size is 128, replicas is 3; .* pass a multiple of 3"),
        ({"replicas": 4, "chunks": 33}, "batch_size is 128, 32 for each of 4 replicas"),
        ({"dp_small": "fp8"}, "dp_small is 'fp8'; pass one of none, bf16, fp16"),
        ({"replicas": 2, "dp_small": "bf16"}, "dp_comp is none; nothing .* --dp-comp bf16"),
        ({"schedule": "GPie"}, "schedule='GPie'.*GPipe"),
        ({"in_flight": 0}, "in_flight is 0; pass at least 1"),
        ({"in_flight": "all"}, "in_flight is 'all'; pass a number of microbatches, or auto"),
        ({"timeout": 0.0}, "timeout is 0.0; pass a number above 0"),
        ({"chunks": 9, "batch_size": 8}, "chunks is 9, batch_size is 8; .* at most as many chunks"),
        ({"warmup_steps": 1, "warmup_epochs": 1}, "pass one of the two"),
        ({"act": ("topc:0.1",)}, "topk"),
        ({"grad": ("topk:1.5",)}, "1.5"),
        ({"act": ()}, "need at least one spec"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ImageConfig(**options)


def test_paper_defaults():
    config = ImageConfig()
    assert (config.lr, config.momentum, config.weight_decay) == (0.01, 0.9, 5e-4)
    assert (config.epochs, config.schedule_epochs, config.batch_size) == (100, 200, 128)
    assert config.drop_last and config.flip and config.crop_padding == 4


def test_digits_have_their_own_defaults_and_schedule():
    assert ImageConfig.for_data("digits").flip is False
    assert ImageConfig.for_data("digits", epochs=3).schedule_epochs == 3
    assert ImageConfig.for_data("digits", epochs=3, schedule_epochs=5).schedule_epochs == 5
    assert ImageConfig.for_data("somewhere/cifar") == ImageConfig(data="somewhere/cifar")


def test_channels_of_narrow_models_do_not_lie_last():
    """oneDNN writes past the end of its memory for them (issue 6035), on machines with AVX2."""
    config = ImageConfig.for_data("digits", width=8)
    assert config.channels_last and config.memory_format == torch.channels_last
    assert ImageConfig.for_data("digits", width=7).memory_format == torch.contiguous_format
    plain = ImageConfig.for_data("digits", width=8, channels_last=False)
    assert plain.memory_format == torch.contiguous_format


def test_wide_networks_are_as_wide_as_in_the_paper():
    assert ImageConfig.for_data("somewhere/cifar", model="wide_resnet").width == 16
    assert ImageConfig.for_data("somewhere/cifar", model="wide_resnet", width=4).width == 4


def test_json_round_trip():
    config = ImageConfig(
        act=("topk:0.1", "none", "quant:4"),
        budget="1 %",
        clip=1.0,
        replicas=2,
        in_flight="auto",
        lr_milestones=(80, 90),
    )
    assert ImageConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_configuration_of_another_version():
    with pytest.raises(ValueError, match=r"unknown options \['colour'\]"):
        ImageConfig.from_json({"colour": "red"})


def test_uncompressed_changes_nothing_else():
    config = ImageConfig(act=("auto",), grad=("quant:4",), budget="1 %", warmup_steps=3, seed=5)
    assert config.uncompressed() == ImageConfig(act=("none",), grad=("none",), seed=5)


def test_momentum_on_replicas_is_not_that_of_an_outer_step():
    """Beside the first the optimizer has none and more decay; beside the second all is as ever."""
    options = {"replicas": 2, "optimizer": "sgd", "weight_decay": 1e-3}
    with pytest.raises(ValueError, match="this method has the momentum itself"):
        ImageConfig(dp_comp="dgc:0.001", momentum=0.9, **options)
    beside = ImageConfig(dp_comp="dgc:0.001", momentum=0.0, **options)
    apart = ImageConfig(dp_comp="diloco:30", momentum=0.9, **options)
    assert beside.optimizer_decay == pytest.approx(1e-2) and apart.optimizer_decay == 1e-3
