"""Law 1: with compression off a pipeline is bitwise the plain model over the same microbatches.

Loss, every gradient by name, buffers and parameters, over three steps of an optimizer.
"""

import pytest
import torch
import torch.nn.functional as F
from models import (
    CONV_SPLIT,
    MLP_SPLIT,
    RESNET_SPLIT,
    adamw,
    assert_same_training,
    clone,
    convnet,
    convnet_channels_last,
    images,
    mlp,
    plain_step,
    resnet,
    resnet_channels_last,
    rows,
    sgd,
)
from torch import nn

import mpcomp
from mpcomp import Identity, TopK

#: (rows of the batch, chunks) -> rows of its microbatches
SIZES = {
    (4, 1): [4],
    (4, 2): [2, 2],
    (4, 4): [1, 1, 1, 1],
    (7, 2): [4, 3],
    (7, 4): [2, 2, 2, 1],
}
MODELS = {
    "mlp": (mlp, MLP_SPLIT, rows),
    "convnet": (convnet, CONV_SPLIT, images),
    "resnet18": (resnet, RESNET_SPLIT, lambda count, seed: images(count, seed, side=16)),
}
CHANNELS_LAST = {
    "convnet": (convnet_channels_last, *MODELS["convnet"][1:]),
    "resnet18": (resnet_channels_last, *MODELS["resnet18"][1:]),
}


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("count, chunks", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_compression_off_is_the_plain_model(name, count, chunks, recompute, global_rng_untouched):
    """Microbatches in ascending order, each loss weighted by its share, with dropout too."""
    make, where, batch = MODELS[name]
    model = make()
    plain = clone(model)
    pipe = mpcomp.pipeline(
        model, chunks, split=where, loss_fn=F.cross_entropy, recompute=recompute, seed=3
    )
    optimizers = sgd(pipe), sgd(plain)
    for step in range(3):
        x, y = batch(count, step)
        with global_rng_untouched():
            loss = pipe.forward_backward(x, y)
        sizes = SIZES[count, chunks]
        # Dropout is drawn per stage; without it the uncut model itself is the reference.
        cut = where if name == "convnet" else 1
        expected = plain_step(plain, x, y, sizes, where=cut, seed=3, step=step)
        assert torch.equal(loss, expected) and not loss.requires_grad
        for optimizer in optimizers:
            optimizer.step()
        assert_same_training(pipe, plain)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert pipe.num_steps == 3 and pipe.wire_bytes > pipe.dense_bytes  # headers, nothing saved


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("name", CHANNELS_LAST)
def test_channels_last_is_the_plain_model_in_channels_last(name, recompute):
    """Cuts keep the memory order, so convolutions take the same path."""
    make, where, batch = CHANNELS_LAST[name]
    model = make()
    plain = clone(model)
    pipe = mpcomp.pipeline(model, 2, split=where, loss_fn=F.cross_entropy, recompute=recompute)
    optimizers = adamw(pipe), adamw(plain)
    for step in range(2):
        x, y = batch(7, step)
        loss = pipe.forward_backward(channels_last(x), y)
        cut = where if name == "convnet" else 1
        assert torch.equal(
            loss, plain_step(plain, channels_last(x), y, [4, 3], where=cut, step=step)
        )
        assert_same_training(pipe, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("act", [None, Identity(), "none"], ids=["None", "Identity", "spec"])
@pytest.mark.parametrize("grad", [None, Identity()], ids=["None", "Identity"])
def test_every_way_to_say_none(act, grad):
    model = mlp()
    plain = clone(model)
    pipe = mpcomp.pipeline(
        model, 2, split=MLP_SPLIT, act_comp=act, grad_comp=grad, loss_fn=F.cross_entropy
    )
    x, y = rows(7)
    assert torch.equal(pipe.forward_backward(x, y), plain_step(plain, x, y, [4, 3]))
    assert_same_training(pipe, plain)


@pytest.mark.parametrize("switch", ["uncompressed", "warm-up"])
def test_compression_switched_off_is_the_plain_model(switch):
    """With methods given, but within uncompressed() or their warm-up."""
    model = convnet()
    plain = clone(model)
    pipe = mpcomp.pipeline(
        model,
        2,
        split=CONV_SPLIT,
        act_comp="ef21+topk:0.1",
        grad_comp="ef+topk:0.1",
        loss_fn=F.cross_entropy,
        warmup_steps=2 if switch == "warm-up" else 0,
    )
    for step in range(2):
        x, y = images(6, step)
        if switch == "warm-up":
            loss = pipe.forward_backward(x, y)
        else:
            with pipe.uncompressed():
                loss = pipe.forward_backward(x, y)
        assert torch.equal(loss, plain_step(plain, x, y, [3, 3], where=CONV_SPLIT, step=step))
        assert_same_training(pipe, plain)
    pipe.forward_backward(*images(6, 9))
    plain_step(plain, *images(6, 9), [3, 3], where=CONV_SPLIT, step=2)
    with pytest.raises(AssertionError, match="gradient"):  # now it is compressed
        assert_same_training(pipe, plain)


def test_the_comparison_can_fail():
    """A pipeline that does compress differs from the plain model, and the law's test sees it."""
    model = mlp()
    plain = clone(model)
    pipe = mpcomp.pipeline(model, 2, split=MLP_SPLIT, act_comp=TopK(0.5), loss_fn=F.cross_entropy)
    x, y = rows(6)
    assert not torch.equal(pipe.forward_backward(x, y), plain_step(plain, x, y, [3, 3]))


def test_a_sum_loss_is_not_weighted():
    """reduction="sum" adds up over microbatches as over rows."""
    loss_fn = nn.CrossEntropyLoss(reduction="sum")
    model = mlp()
    plain = clone(model)
    pipe = mpcomp.pipeline(model, 3, split=MLP_SPLIT, loss_fn=loss_fn)
    x, y = rows(7)
    loss = pipe.forward_backward(x, y)
    total = torch.zeros(())
    for xs, ys in zip(x.split([3, 2, 2]), y.split([3, 2, 2]), strict=True):
        part = loss_fn(plain(xs), ys)
        part.backward()
        total = total + part.detach()
    assert torch.equal(loss, total)
    assert_same_training(pipe, plain)


@pytest.mark.parametrize("chunks", [1, 3])
def test_evaluation_is_the_plain_model(chunks):
    model = convnet()
    plain = clone(model).eval()
    pipe = mpcomp.pipeline(model, chunks, split=CONV_SPLIT).eval()
    x, _ = images(7)
    with torch.no_grad():
        output = pipe(x)
        assert torch.equal(output, torch.cat([plain(part) for part in x.tensor_split(chunks)]))
    assert not output.requires_grad


def test_a_frozen_first_stage_needs_no_gradient():
    """Nothing to differentiate before the cut: no gradient is sent over it."""
    model = mlp()
    for parameter in model.one.parameters():
        parameter.requires_grad_(False)
    plain = clone(model)
    pipe = mpcomp.pipeline(model, 2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    x, y = rows(6)
    assert torch.equal(pipe.forward_backward(x, y), plain_step(plain, x, y, [3, 3]))
    assert_same_training(pipe, plain)
    assert pipe.boundaries[0].grad.meter.train.messages == 0
    assert pipe.boundaries[1].grad.meter.train.messages == 2


class Masked(nn.Module):
    """A first stage of several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.rest = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 5))

    def forward(self, ids, mask):
        return self.rest(self.embed(ids).mul(mask.unsqueeze(-1)).sum(dim=1))


@pytest.mark.parametrize("form", ["tuple", "mapping"])
@pytest.mark.parametrize("recompute", [False, True])
def test_batches_of_several_tensors(form, recompute):
    """Integer ids and attention masks, by position or by name."""
    model = Masked()
    plain = clone(model)
    pipe = mpcomp.pipeline(model, 2, split=["rest.0"], loss_fn=F.cross_entropy, recompute=recompute)
    ids, mask = torch.randint(20, (5, 7)), torch.rand(5, 7).round()
    target = torch.randint(5, (5,))
    batch = (ids, mask) if form == "tuple" else {"ids": ids, "mask": mask}
    loss = pipe.forward_backward(batch, target)
    total = torch.zeros(())
    for part, size in ((slice(0, 3), 3), (slice(3, 5), 2)):
        one = F.cross_entropy(plain(ids[part], mask[part]), target[part]) * (size / 5)
        one.backward()
        total = total + one.detach()
    assert torch.equal(loss, total)
    assert_same_training(pipe, plain)


def test_targets_of_several_tensors():
    def loss_fn(output, target):
        return (F.cross_entropy(output, target["y"], reduction="none") * target["w"]).mean()

    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, loss_fn=loss_fn)
    plain = clone(pipe.merge())
    x, y = rows(4)
    weight = torch.tensor([1.0, 0.0, 2.0, 0.5])
    loss = pipe.forward_backward(x, {"y": y, "w": weight})
    expected = sum(
        loss_fn(plain(x[part]), {"y": y[part], "w": weight[part]}) * 0.5
        for part in (slice(0, 2), slice(2, 4))
    )
    assert torch.equal(loss, expected)
