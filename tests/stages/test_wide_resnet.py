"""Wide ResNets: sizes of the paper, what a block computes, and that stages are the model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpcomp
from stages import WideResNet, blocks, merge, split, wide_resnet


def size(model):
    return sum(p.numel() for p in model.parameters())


def small(**chosen):
    return wide_resnet(**{"depth": 10, "widen": 2, "width": 4, **chosen})


@pytest.mark.parametrize(
    ("sizes", "millions"),
    [
        ({}, 36.5),  # table 4 of the paper, and its text
        ({"depth": 40, "widen": 4}, 8.9),
        ({"depth": 16, "widen": 8}, 11.0),
        ({"depth": 22, "widen": 8}, 17.2),
        ({"depth": 16, "widen": 10}, 17.1),
    ],
)
def test_parameter_counts_of_the_paper(sizes, millions):
    with torch.device("meta"):
        model = wide_resnet(**sizes)
    assert round(size(model) / 1e6, 1) == millions
    if not sizes:
        assert size(model) == 36_479_194
        convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        assert sum(one.kernel_size == (3, 3) for one in convolutions) == 25
        assert sum(one.kernel_size == (1, 1) for one in convolutions) == 3  # together 28


def test_shapes_at_the_paper_cut():
    with torch.device("meta"):
        model = wide_resnet(100)
        x = torch.empty(5, 3, 32, 32)
    shapes = []
    for stage in split(model, "paper"):
        x = stage(x)
        shapes.append(tuple(x.shape))
    assert shapes == [(5, 160, 32, 32), (5, 320, 16, 16), (5, 100)]


@pytest.mark.parametrize("layer", ["layer1", "layer2"])
def test_a_block_normalizes_first(layer):
    model = small(depth=16).eval()
    first, second = list(getattr(model, layer))
    assert (first.projects, second.projects) == (True, False)
    x = torch.randn(2, first.bn1.num_features, 8, 8)

    def branch(block, normed):
        return block.conv2(F.relu(block.bn2(block.conv1(normed))))

    normed = F.relu(first.bn1(x))
    y = first(x)
    assert torch.equal(y, branch(first, normed) + first.shortcut(normed))
    assert torch.equal(second(y), branch(second, F.relu(second.bn1(y))) + y)


def test_a_layer_as_wide_as_the_one_before_has_the_identity():
    """With a factor of 1, as in the narrow network: no projection where shapes allow none."""
    model = small(widen=1)
    assert [one[0].projects for one in (model.layer1, model.layer2)] == [False, True]


def test_blocks_leave_their_input_alone():
    for layer in (small().layer1, small().layer2):
        for block in layer:
            x = torch.randn(2, block.bn1.num_features, 8, 8)
            before = x.clone()
            block(x)
            assert torch.equal(x, before)


def test_stages_are_the_model():
    """Loss, gradients and statistics, bit for bit."""
    torch.manual_seed(0)
    model = small(depth=16)
    torch.manual_seed(0)
    plain = small(depth=16)
    x, y = torch.randn(3, 3, 8, 8), torch.tensor([0, 3, 9])
    F.cross_entropy(plain(x), y).backward()
    cut = split(model, "paper")
    value = x
    for stage in cut:
        value = stage(value)
    F.cross_entropy(value, y).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert len(blocks(model)) == 12 and merge(cut) is model
    assert isinstance(model, WideResNet)


def test_dropout_is_between_the_convolutions():
    model = small(dropout=0.5)
    x = torch.randn(2, 4, 8, 8)
    block = model.layer1[0]
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))
    assert all(one.p == 0.0 for one in small().modules() if isinstance(one, nn.Dropout))


def test_it_learns_through_compressed_cuts():
    """Eight images by heart."""
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(
        small(),
        2,
        split="paper",
        act_comp="quant:4",
        grad_comp="ef+quant:4",
        loss_fn=F.cross_entropy,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(8, 3, 16, 16), torch.arange(8)
    losses = []
    for _ in range(40):
        losses.append(float(pipe.forward_backward(x, y)))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > 1.5 and losses[-1] < 0.1, losses[-1]
    assert pipe.wire_bytes < 0.25 * pipe.dense_bytes  # compressed indeed


@pytest.mark.parametrize("depth", [0, 4, 18, 27])
def test_depths_that_are_no_sum_of_blocks(depth):
    with pytest.raises(ValueError, match=rf"depth is {depth}; pass 6 n \+ 4"):
        wide_resnet(depth=depth)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"widen": 0}])
def test_sizes_below_one(wrong):
    with pytest.raises(ValueError, match="pass 1 or more"):
        wide_resnet(**wrong)


def test_seed_decides_the_weights():
    def made(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in small().parameters()])

    assert torch.equal(made(1), made(1)) and not torch.equal(made(1), made(2))
