"""A stage by itself: what it accepts and returns, devices, modes; and merging stages back."""

import copy
import pickle
import re

import pytest
import torch
from stage_models import Block, FreeResNet, assert_computes_the_same, images, run
from torch import nn

from stages import merge, resnet18, split


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Doubling(nn.Module):
    def forward(self, x):
        return x.mul_(2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return resnet18(width=4)


@pytest.mark.parametrize("build", [lambda: resnet18(width=4), FreeResNet])
def test_merge_returns_the_trained_model(build):
    model = build()
    expected = copy.deepcopy(model)
    stages = split(model, 3)
    x = images()
    for modules, forward in (([expected], expected), (stages, lambda x: run(stages, x))):
        parameters = [p for module in modules for p in module.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        for _ in range(2):
            output = forward(x)
            if forward is expected:
                output.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    merged = merge(stages)
    assert merged is model
    for (name, ours), theirs in zip(
        merged.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_merge_brings_back_what_containers_hold():
    model = resnet18(width=4)
    model.layer3.register_buffer("extra", torch.ones(3))
    stages = split(model, "paper")
    for stage in stages:
        stage.eval().to(torch.float64)
    merge(stages)
    assert model.layer3.extra.dtype == torch.float64
    assert not any(module.training for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda s, other: [], "got no stages"),
        (lambda s, other: s[:2], r"got stages \[0, 1\], expected all of \[0, 1, 2\]"),
        (lambda s, other: [s[1], s[0], s[2]], r"got stages \[1, 0, 2\]"),
        (lambda s, other: [s[0], other[1], s[2]], r"stage 1 \(.*\) at position 1 and stage 0"),
        (lambda s, other: [s[0], copy.deepcopy(s[1]), s[2]], "of stage 1 .* is not the model's"),
    ],
)
def test_merge_refuses(model, choose, message):
    with pytest.raises(ValueError, match=message):
        merge(choose(split(model, 3), split(resnet18(width=4), 3)))


def test_merge_refuses_what_is_no_stage(model):
    with pytest.raises(TypeError, match=re.escape("stages[0] is a ResNet, not a Stage")):
        merge([model])


def test_one_tensor_is_returned_or_an_error():
    stages = split(nn.Sequential(nn.Identity(), Pair()), 2)
    with pytest.raises(
        TypeError, match=r"stage 1 \(1\) returned a tuple \(Tensor, Tensor\), as the"
    ):
        stages[1](torch.ones(2))


def test_arguments_go_to_the_first_block():
    class Scale(nn.Module):
        def forward(self, x, *, by):
            return x * by

    first, second = split(nn.Sequential(Scale(), nn.Linear(2, 2)), 2)
    assert torch.equal(first(torch.ones(2), by=3.0), torch.full((2,), 3.0))
    with pytest.raises(TypeError, match="unexpected keyword"):
        second(torch.ones(2), by=3.0)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "block", [nn.Identity(), nn.Flatten(), nn.Unflatten(1, (3, 1)), nn.Dropout().eval()], ids=str
)
def test_the_output_is_never_a_view(block, mode):
    (stage,) = split(nn.Sequential(block), 1)
    with mode():
        x = torch.randn(2, 3)
        output = stage(x)
        assert torch.equal(output.flatten(), x.flatten())
        assert not output._is_view()
        assert output.data_ptr() != x.data_ptr()


def test_the_output_can_be_detached_in_place():
    (stage,) = split(nn.Sequential(nn.Linear(4, 4), nn.Flatten()), 1)
    output = stage(torch.randn(2, 2, 4))
    assert output.detach_().grad_fn is None  # torch's split backward does this


@pytest.mark.parametrize(
    "block",
    [
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5, inplace=True)),
        Block(3, inplace=True),
    ],
    ids=["relu", "dropout", "block"],
)
def test_the_input_is_left_alone(block):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), block)
    stages = split(model, ["0"])
    x = images()
    before = x.clone()
    assert_computes_the_same(model, stages, x)
    stages[1](x)
    assert torch.equal(x, before)


def test_blocks_that_write_to_their_input_are_given_a_copy_and_no_others():
    """In any mode; the first call shows it, of training and of evaluation."""
    given = []
    writing, reading = Doubling(), nn.Linear(2, 2)
    for block in (writing, reading):
        block.register_forward_pre_hook(lambda _, args: given.append(args[0].data_ptr()))
    for block, copies in ((writing, [True] * 4), (reading, [True, False, True, False])):
        _, stage = split(nn.Sequential(nn.Identity(), block), 2)
        for training, copied in zip((True, True, False, False), copies, strict=True):
            x = torch.ones(2)
            stage.train(training)(x)
            assert torch.equal(x, torch.ones(2))
            assert (given.pop() != x.data_ptr()) == copied


def test_an_input_changed_only_later_is_an_error():
    class Later(nn.Module):
        writes = False

        def forward(self, x):
            return x.mul_(2) if self.writes else x * 2

    model = nn.Sequential(nn.Identity(), Later())
    _, stage = split(model, 2)
    stage(torch.ones(2))
    model[1].writes = True
    with pytest.raises(ValueError, match=r"stage 1 \(1\) changed its input in place, and did not"):
        stage(torch.ones(2))


def test_modes_and_dtypes_propagate(model):
    stages = split(model, "paper")
    stages[1].eval()
    assert not model.layer2[0].bn1.training and model.layer1[0].bn1.training
    stages[1].double()
    assert model.layer2[0].conv1.weight.dtype == torch.float64
    assert model.layer1[0].conv1.weight.dtype == torch.float32


def test_a_stage_loads_its_part_of_a_checkpoint(model):
    checkpoint = resnet18(width=4).state_dict()
    for stage in split(model, 4):
        own = stage.state_dict()
        stage.load_state_dict({key: checkpoint[key] for key in own})
    assert all(torch.equal(value, checkpoint[key]) for key, value in model.state_dict().items())


def test_parameters_come_in_the_models_order():
    model = FreeResNet()
    names = [name for stage in split(model, 4) for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("build", [lambda: resnet18(width=4), FreeResNet])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_stages_can_be_copied_and_pickled(build, copied):
    model = build().eval()
    x = images()
    expected = model(x)
    for stage in split(model, 3):
        twin = copied(stage)
        assert twin.block_names == stage.block_names
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in stage.parameters()}
        x = twin(x)
    assert torch.equal(x, expected)


def test_its_name_and_repr(model):
    stage = split(model, "paper")[1]
    assert stage.name == "stage 1 (layer2.0 to layer2.1)"
    assert "index=1, num_stages=4" in repr(stage)
