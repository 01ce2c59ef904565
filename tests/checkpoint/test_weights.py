"""Weights of stages: read by name, checked beforehand, and let go where other ranks train them."""

import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import (
    CONV_SPLIT,
    MLP_SPLIT,
    RESNET_SPLIT,
    assert_same_training,
    convnet,
    convnet_channels_last,
    images,
    mlp,
    resnet,
    resnet_channels_last,
    rows,
    sgd,
)
from safetensors.torch import save_file
from torch import nn

import mpcomp
import stages
from mpcomp.checkpoint.weights import check_weights, load_weights, to_meta
from stages import split


def on_meta(make):
    with torch.device("meta"):
        return make()


def write(model, folder, name="model", only=lambda name: True, **changed):
    """A file with what a model's state_dict has, or a part of it."""
    tensors = {**model.state_dict(), **changed}
    folder.mkdir(exist_ok=True)
    kept = {key: value.contiguous().clone() for key, value in tensors.items() if only(key)}
    save_file(kept, folder / f"{name}.safetensors")
    return folder


class Tied(nn.Sequential):
    """The first two layers are one matrix, as an embedding and a head would be."""

    def __init__(self):
        layers = [nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 13), nn.ReLU(), nn.Linear(13, 5)]
        super().__init__(*layers)
        self[2].weight = self[0].weight


class Buffered(nn.Module):
    """Three kinds of tensors: stored, stored and not trained, and not stored."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(13))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.arange(13.0), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        return x * self.weight + self.table + self.count


def buffered():
    return nn.Sequential(Buffered(), nn.Linear(13, 13), Buffered(), nn.Linear(13, 5))


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, where", [(mlp, MLP_SPLIT), (convnet, CONV_SPLIT), (resnet, RESNET_SPLIT)]
)
def test_each_stage_reads_its_own_tensors(make, where, tmp_path):
    """From two files, one of which holds names of another model too."""
    model = make()
    names = list(model.state_dict())
    half = set(names[: len(names) // 2])
    write(model, tmp_path, "one", lambda name: name in half)
    other = torch.full((3,), torch.nan)
    write(model, tmp_path, "two", lambda name: name not in half, foreign=other)
    cut = split(on_meta(make), where)
    check_weights(cut, tmp_path)
    for i, stage in enumerate(cut):
        load_weights(stage, tmp_path)
        for name, value in stage.state_dict().items():
            assert same_bits(value, model.state_dict()[name])
        for later in cut[i + 1 :]:
            assert all(tensor.is_meta for tensor in later.state_dict().values())


def test_a_file_in_another_dtype_is_read_in_the_models(tmp_path):
    model = mlp()
    write(model.half(), tmp_path)
    [stage] = split(on_meta(mlp), 1)
    load_weights(stage, tmp_path)
    for name, value in stage.state_dict().items():
        assert same_bits(value, model.state_dict()[name].float())


def test_weights_that_are_there_are_replaced(tmp_path):
    """As in fine-tuning: the model was built with random ones."""
    stored, model = mlp(), mlp()
    write(stored, tmp_path)
    for stage in split(model, MLP_SPLIT):
        load_weights(stage, tmp_path)
    for name, value in model.state_dict().items():
        assert same_bits(value, stored.state_dict()[name])


def test_the_file_is_no_longer_needed(tmp_path):
    """Weights are not a window onto the file: it may be written anew while they are trained."""
    model = mlp()
    folder = write(model, tmp_path)
    [stage] = split(on_meta(mlp), 1)
    load_weights(stage, folder)
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    for name, parameter in stage.named_parameters():
        assert same_bits(parameter, model.state_dict()[name])
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4


def test_what_is_frozen_stays_frozen(tmp_path):
    write(mlp(), tmp_path)
    model = on_meta(mlp)
    model.two.requires_grad_(False)
    cut = split(model, MLP_SPLIT)
    for stage in cut:
        load_weights(stage, tmp_path)
    trained = {name: p.requires_grad for stage in cut for name, p in stage.named_parameters()}
    assert trained == {name: not name.startswith("two") for name in trained}
    assert all(isinstance(p, nn.Parameter) for stage in cut for p in stage.parameters())


def test_memory_order_is_the_models(tmp_path):
    """Files are in row-major order; convolutions of a channels-last model are not."""
    model = resnet()
    write(model, tmp_path)
    [stage] = split(on_meta(resnet).to(memory_format=torch.channels_last), 1)
    load_weights(stage, tmp_path)
    ours = dict(stage.named_parameters())
    for name, expected in model.to(memory_format=torch.channels_last).named_parameters():
        assert same_bits(ours[name], expected) and ours[name].stride() == expected.stride()


@pytest.mark.parametrize("stored", ["both", "first", "second"])
def test_tied_weights_stay_tied(stored, tmp_path):
    """Files of Hugging Face models hold one of the names."""
    model = Tied()
    left_out = {"both": "-", "first": "2.weight", "second": "0.weight"}[stored]
    write(model, tmp_path, only=lambda name: name != left_out)
    tied = on_meta(Tied)
    cut = split(tied, [4, 1])
    check_weights(cut, tmp_path)
    for stage in cut:
        load_weights(stage, tmp_path)
    assert tied[0].weight is tied[2].weight
    assert same_bits(tied[0].weight, model[0].weight)
    assert len(list(cut[0].parameters())) == 3


# -- what is wrong with them ----------------------------------------------------------------------


def check(make, folder, where=1):
    cut = split(on_meta(make), where)
    check_weights(cut, folder)
    for stage in cut:
        load_weights(stage, folder)


def test_without_a_folder_every_tensor_must_have_a_value():
    cut = split(mlp(), MLP_SPLIT)
    check_weights(cut, None)
    to_meta(cut[1])
    check_weights([cut[0], cut[2]], None)
    message = r"two.weight and 1 more tensors are on the meta device.*pass weights=, a folder"
    with pytest.raises(ValueError, match=message):
        check_weights(cut, None)


def test_a_buffer_without_a_value_counts_too():
    model = mlp()
    model.one.register_buffer("mask", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="one.mask and 0 more tensors are on the meta device"):
        check_weights(split(model, 1), None)


def test_names_that_no_file_has(tmp_path):
    write(mlp(), tmp_path, only=lambda name: name != "two.bias")
    with pytest.raises(ValueError, match=r"the .safetensors files there lack two.bias$"):
        check(mlp, tmp_path)
    check_weights(split(on_meta(mlp), MLP_SPLIT)[:1], tmp_path)  # a rank without that stage
    write(mlp(), tmp_path, only=lambda name: name == "two.bias")
    with pytest.raises(ValueError, match=r"lack one.weight, one.bias, two.weight and 2 more$"):
        check(mlp, tmp_path)


@pytest.mark.parametrize("shape", [[17, 18], [1, 19], [17 * 19], []], ids=str)
def test_a_tensor_of_another_shape(shape, tmp_path):
    """Found before anything has been read, as a model that is half one and half other is none."""
    write(mlp(), tmp_path, **{"two.weight": torch.randn(shape)})
    message = re.escape(f"two.weight has shape {shape}, the model [17, 19]")
    with pytest.raises(ValueError, match=message):
        check_weights(split(on_meta(mlp), MLP_SPLIT), tmp_path)
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        mpcomp.pipeline(model, 2, split=MLP_SPLIT, weights=tmp_path)
    assert all(same_bits(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("damage", ["cut short", "empty", "text"])
def test_a_damaged_file(tmp_path, damage):
    write(mlp(), tmp_path)
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes({"cut short": raw[:-10], "empty": b"", "text": b"version https://git"}[damage])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or foreign: "):
        check(mlp, tmp_path)


@pytest.mark.parametrize("what", ["empty folder", "no folder", "other files"])
def test_a_folder_without_weights(tmp_path, what):
    folder = tmp_path / "absent" if what == "no folder" else tmp_path
    if what == "other files":
        torch.save(mlp().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"weights={folder}: no .safetensors file there"):
        check(mlp, folder)


def test_a_buffer_that_no_file_can_have(tmp_path):
    write(buffered(), tmp_path)
    message = r"buffer 0.table is on the meta device and not part of the state_dict.*on the CPU"
    with pytest.raises(ValueError, match=message):
        check(buffered, tmp_path)
    model = on_meta(buffered)
    for i in (0, 2):
        model[i].table = torch.arange(13.0)
    [stage] = split(model, 1)
    check_weights([stage], tmp_path)
    load_weights(stage, tmp_path)
    assert not any(tensor.is_meta for tensor in (*stage.parameters(), *stage.buffers()))


# -- letting go -----------------------------------------------------------------------------------


def test_memory_is_freed_and_shapes_stay():
    model = convnet()
    model.conv2.requires_grad_(False)
    cut = split(model, CONV_SPLIT)
    before = {name: (t.shape, t.dtype) for name, t in cut[1].state_dict().items()}
    held = [weakref.ref(p) for p in cut[1].parameters()]
    to_meta(cut[1])
    assert all(reference() is None for reference in held)
    after = cut[1].state_dict(keep_vars=True)
    assert {name: (t.shape, t.dtype) for name, t in after.items()} == before
    assert all(t.is_meta for t in after.values())
    assert {k: p.requires_grad for k, p in cut[1].named_parameters()} == {
        "conv2.weight": False,
        "conv2.bias": False,
        "bn2.weight": True,
        "bn2.bias": True,
    }
    for other in (cut[0], cut[2]):
        assert not any(t.is_meta for t in other.state_dict().values())


def test_tied_weights_that_are_let_go_stay_tied():
    """Else their stage would seem to have more parameters on one rank than on another."""
    model = Tied()
    cut = split(model, [4, 1])
    names = [name for name, _ in cut[0].named_parameters()]
    to_meta(cut[0])
    assert model[0].weight is model[2].weight and model[0].weight.is_meta
    assert [name for name, _ in cut[0].named_parameters()] == names


def test_buffers_that_nothing_could_bring_back_stay():
    model = buffered()
    cut = split(model, [2, 2])
    to_meta(cut[0])
    assert same_bits(model[0].table, torch.arange(13.0))
    assert model[0].count.is_meta and model[0].weight.is_meta and model[0].absent is None
    assert list(cut[0].state_dict()) == ["0.weight", "0.count", "1.weight", "1.bias"]


def test_letting_go_twice_changes_nothing():
    cut = split(convnet(), CONV_SPLIT)
    for _ in range(2):
        to_meta(cut[0])
    assert all(t.is_meta for t in cut[0].state_dict().values())


def test_what_was_let_go_can_be_read_again(tmp_path):
    model = convnet()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    write(model, tmp_path)
    cut = split(model, CONV_SPLIT)
    to_meta(cut[1])
    load_weights(cut[1], tmp_path)
    assert all(same_bits(model.state_dict()[name], value) for name, value in expected.items())


# -- a pipeline from a folder ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, where",
    [
        *((mlp, MLP_SPLIT), (convnet, CONV_SPLIT), (convnet_channels_last, CONV_SPLIT)),
        *((resnet, RESNET_SPLIT), (resnet_channels_last, RESNET_SPLIT), (Tied, [4, 1])),
    ],
    ids=["mlp", "convnet", "convnet, last", "resnet", "resnet, last", "tied"],
)
def test_a_pipeline_from_a_folder_trains_as_the_model_itself(make, where, tmp_path):
    model, empty = make(), on_meta(make)
    write(model, tmp_path)
    options = {"split": where, "loss_fn": F.cross_entropy, "act_comp": "ef21+topk:0.3"}
    pipes = [
        mpcomp.pipeline(model, 3, **options),
        mpcomp.pipeline(empty, 3, weights=tmp_path, **options),
    ]
    batch = rows if make in (mlp, Tied) else images
    optimizers = [sgd(pipe) for pipe in pipes]
    for step in range(3):
        x, y = batch(7, step)
        losses = [pipe.forward_backward(x, y) for pipe in pipes]
        assert same_bits(*losses)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_training(*pipes)
    merged = pipes[1].merge()
    assert merged is empty
    assert all(same_bits(merged.state_dict()[k], v) for k, v in model.state_dict().items())


def test_a_model_on_meta_needs_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"one.weight and 5 more tensors.*pass weights="):
        mpcomp.pipeline(on_meta(mlp), 2, split=MLP_SPLIT)
    with pytest.raises(ValueError, match=r"no .safetensors file there"):
        mpcomp.pipeline(on_meta(mlp), 2, split=MLP_SPLIT, weights=tmp_path)


def test_an_lstm_lets_go_of_its_second_list_of_weights_too():
    """nn.LSTM computes with `_flat_weights`, which would keep the memory of another rank's."""
    cut = split(stages.lstm_lm(20, hidden=8), 2)
    held = [weakref.ref(p) for p in cut[1].parameters()]
    to_meta(cut[1])
    assert held and all(ref() is None for ref in held)
