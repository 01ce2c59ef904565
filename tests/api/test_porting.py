"""Lines of a plain training loop that a port leaves in: each is an error with its cure."""

import copy
import inspect
import io
import json
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from methods import same_bits
from models import CLASSES, MLP_SPLIT, mlp, pipe_of, rows
from torch import Tensor, nn
from tqdm import tqdm

import mpcomp

SCALER = torch.amp.GradScaler("cpu")
BACKWARDS = {
    "loss": lambda loss: loss,
    "scaled": SCALER.scale,
    "mean of accumulation": lambda loss: loss / 4,
    "sum of two": lambda loss: loss + loss,
    "item of a stack": lambda loss: torch.stack([loss, loss]).mean(),
    "beside a constant": lambda loss: loss + torch.ones(()),
}


@pytest.mark.parametrize("way", BACKWARDS)
@pytest.mark.parametrize("with_output", [False, True])
def test_a_second_backward(way, with_output):
    result = pipe_of().forward_backward(*rows(6), with_output=with_output)
    loss = result[1] if with_output else result
    with pytest.raises(RuntimeError, match="has done the backward pass.*Leave out .backward"):
        BACKWARDS[way](loss).backward()


def mean_of_meter(loss):
    """As torchmetrics: a buffer that is added to, and read from a state that was saved."""
    meter = nn.Module()
    meter.register_buffer("total", torch.zeros(()))
    for _ in range(2):
        meter.total += loss.detach()
    return nn.Module.state_dict(meter)["total"]


def accumulated(loss):
    total = 0.0
    for _ in range(2):
        total += loss / 2
    return total


def on_a_bar(loss):
    with tqdm([], file=io.StringIO()) as bar:
        bar.set_postfix(loss=loss)
        return bar.postfix


USES = {
    "printed": repr,
    "formatted": "{0:.4f} {0}".format,
    "copied": copy.copy,
    "deeply copied": copy.deepcopy,
    "pickled": lambda loss: pickle.loads(pickle.dumps(loss)),
    "sent to a process": lambda loss: ForkingPickler.loads(ForkingPickler.dumps(loss)),
    "as JSON": lambda loss: json.dumps(loss.item()),
    "float": float,
    "array": np.asarray,
    "list of arrays": lambda loss: np.mean([loss.cpu().numpy(), loss]),
    "stacked": lambda loss: torch.stack([loss, loss]),
    "tensor of": lambda loss: torch.tensor([loss, loss]),
    "added up": accumulated,
    "meter": mean_of_meter,
    "perplexity": torch.exp,
    "compared": lambda loss: bool(loss < 3) and max(loss, loss * 0.5),
    "moved": lambda loss: loss.to("cpu", torch.float64),
    "progress bar": on_a_bar,
}


@pytest.mark.parametrize("use", USES)
def test_the_loss_is_a_tensor_like_any_other(use):
    loss = pipe_of().forward_backward(*rows(6))
    plain = loss.as_subclass(Tensor)
    assert isinstance(loss, Tensor) and loss.shape == () and not loss.requires_grad
    expected, found = USES[use](plain), USES[use](loss)
    if isinstance(expected, Tensor):
        assert same_bits(found.as_subclass(Tensor), expected)
    else:
        assert type(found) is type(expected) and found == expected


def test_a_saved_loss_is_a_plain_tensor(tmp_path):
    loss = pipe_of().forward_backward(*rows(6))
    torch.save({"loss": loss, "sum": loss + 1}, tmp_path / "file.pt")
    read = torch.load(tmp_path / "file.pt", weights_only=True)
    for copied in (read["loss"], copy.copy(loss), copy.deepcopy(loss)):
        assert type(copied) is Tensor and same_bits(copied, loss.as_subclass(Tensor))


def test_tensorboard_takes_it(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard comes with mpcomp[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    loss = pipe_of().forward_backward(*rows(6))
    with SummaryWriter(tmp_path) as writer:
        writer.add_scalar("loss", loss, 0)
    (saved,) = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert saved.value == loss.item()


def test_what_is_added_with_a_graph_can_be_differentiated():
    loss = pipe_of().forward_backward(*rows(6))
    weight = nn.Parameter(torch.ones(()))
    (loss + 3 * weight).backward()
    assert weight.grad == 3


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss, nn.MSELoss, nn.NLLLoss, nn.BCEWithLogitsLoss, nn.L1Loss]
)
def test_a_class_for_a_function(loss_fn):
    message = rf"={loss_fn.__name__} is a class: pass an object of it, {loss_fn.__name__}\(\)"
    with pytest.raises(TypeError, match="loss_fn" + message):
        pipe_of(loss_fn=loss_fn)
    with pytest.raises(TypeError, match="metric" + message):
        pipe_of().evaluate([rows(6)], loss_fn)


@pytest.mark.parametrize("loss_fn", ["mse", 3, torch.zeros(2)])
def test_no_function_at_all(loss_fn):
    with pytest.raises(TypeError, match=r"loss_fn is a \w+: expected a function of output"):
        pipe_of(loss_fn=loss_fn)


@pytest.mark.parametrize("target", [rows(6)[1], [0, 1], {"y": rows(6)[1]}, np.zeros(2), 3.0])
def test_a_batch_for_a_loader(target):
    message = r"metric is a \w+: expected a function.*pipe.evaluate\(\[\(x, y\)\]\)"
    with pytest.raises(TypeError, match=message):
        pipe_of().evaluate(rows(6)[0], target)


@pytest.mark.parametrize("names", [["input"], ["input_ids", "labels"], ["x", "target"]])
def test_an_unpacked_batch(names):
    batch = dict(zip(names, rows(6), strict=False))
    message = f"got an unexpected keyword argument '{names[0]}'"
    with pytest.raises(TypeError, match=rf"pipe {message}.*pipe\(batch\), not"):
        pipe_of()(**batch)
    with pytest.raises(TypeError, match=rf"pipe.forward_backward {message}"):
        pipe_of().forward_backward(**batch)


def test_signatures_are_those_that_are_documented():
    expected = ["self", "batch", "target", "sample_ids", "everywhere"]
    assert list(inspect.signature(mpcomp.api.pipeline.Pipeline.forward).parameters) == expected
    for call in (pipe_of(), pipe_of().eval(), pipe_of().forward_backward):
        with pytest.raises(ValueError, match=r"without a batch: .* built with data='first'"):
            call()


def encoded(way):
    """A batch and target, one of which something else than the pipeline has computed."""
    x, y = rows(6)
    torch.manual_seed(0)
    before, score = nn.Linear(x.shape[1], x.shape[1]), nn.Linear(x.shape[1], CLASSES)
    return {
        "linear": lambda: (before(x), y),
        "saved by its graph": lambda: (before(x).tanh(), y),
        "embedding": lambda: (F.embedding(y, before.weight), y),
        "one of a tuple": lambda: ((x, before(x)), y),
        "in a mapping": lambda: ({"x": before(x)}, y),
        "teacher": lambda: (x, score(x).softmax(1)),
        "target in a mapping": lambda: (x, {"soft": score(x), "y": y}),
    }[way]()


ENCODED = [
    *("linear", "saved by its graph", "embedding", "one of a tuple", "in a mapping", "teacher"),
    "target in a mapping",
]


def refused(ways, chunks=2):
    """Messages for batches with a graph, and for one that is a leaf with a gradient."""
    pipe, found = pipe_of(chunks=chunks, split=2), []
    for batch, target in map(encoded, ways):
        with pytest.raises(ValueError, match="requires a gradient") as caught:
            pipe.forward_backward(batch, target)
        found.append(str(caught.value))
    x, y = rows(6)
    x.requires_grad_()
    if pipe.num_ranks == 1:
        pipe.forward_backward(x, y)
        return found, x.grad
    with pytest.raises(ValueError, match="batch requires a gradient: ") as caught:
        pipe.forward_backward(x, y)
    return found, None


@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_what_something_else_has_computed(chunks):
    messages, gradient = refused(ENCODED, chunks)
    for way, message in zip(ENCODED, messages, strict=True):
        name = "target" if way.startswith("t") else "batch"
        assert f"a tensor of the {name} requires a gradient, computed by " in message
        assert f"{name}.detach()" in message and "nn.Sequential(encoder, model)" in message
    x, y = rows(6)
    x.requires_grad_()
    torch.manual_seed(0)
    F.cross_entropy(mlp()(x), y).backward()
    torch.testing.assert_close(gradient, x.grad)


def on_a_rank():
    loss = pipe_of(split=2).forward_backward(*rows(6))
    with pytest.raises(RuntimeError, match="has done the backward pass"):
        SCALER.scale(loss / 2).backward()
    if not dist.is_initialized():
        return 2 * loss.item(), refused(ENCODED)[0]
    summed = loss.clone()
    dist.all_reduce(summed)
    everywhere = [torch.empty(()) for _ in range(2)]
    dist.all_gather(everywhere, loss)
    assert same_bits(sum(everywhere), summed.as_subclass(Tensor))
    return summed.item(), refused(ENCODED)[0]


@pytest.mark.timeout(120)
def test_ranks_refuse_the_same_lines(ranks):
    first, second = ranks(on_a_rank, 2)
    assert first == second == on_a_rank()


def test_the_cures_train_the_encoder_as_the_plain_model_does():
    x, y = rows(6)

    def run(train):
        torch.manual_seed(0)
        before, model = nn.Linear(x.shape[1], x.shape[1]), mlp()
        loss = train(before, model)
        return loss.item(), before.weight.grad

    def plain(before, model):
        loss = F.cross_entropy(model(before(x).tanh()), y)
        loss.backward()
        return loss

    def within(before, model):
        both = nn.Sequential(before, nn.Tanh(), model)
        pipe = mpcomp.pipeline(both, 2, split=["0"], loss_fn=F.cross_entropy)
        return pipe.forward_backward(x, y)

    def autograd(before, model):
        pipe = mpcomp.pipeline(model, 2, split=MLP_SPLIT)
        loss = F.cross_entropy(pipe(before(x).tanh()), y)
        loss.backward()
        return loss

    loss, gradient = run(plain)
    for cure in (within, autograd):
        found, at_cure = run(cure)
        assert found == pytest.approx(loss)
        torch.testing.assert_close(at_cure, gradient)


X = rows(6)[0].requires_grad_()


class Penalty:
    """Of the gradient with respect to the input, while it is on."""

    on = True

    def __call__(self, output, target):
        loss = F.cross_entropy(output, target)
        if self.on:
            (gradient,) = torch.autograd.grad(output.sum(), X, create_graph=True)
            loss = loss + gradient.square().mean()
        return loss


@pytest.mark.parametrize("way", ["in the loss", "beside the loss", "backward", "of parameters"])
def test_a_second_derivative_through_a_cut(way):
    penalty, y = Penalty(), rows(6)[1]
    pipe = pipe_of(loss_fn=penalty, chunks=1)
    with pytest.raises(RuntimeError, match="create_graph=True through a cut.*pipe.merge()"):
        if way == "in the loss":
            pipe.forward_backward(X, y)
        loss = F.cross_entropy(pipe(X), y)
        if way == "beside the loss":
            torch.autograd.grad(loss, X, create_graph=True)
        if way == "of parameters":
            torch.autograd.grad(loss, list(pipe.parameters()), create_graph=True)
        loss.backward(create_graph=True)
    plain, penalty.on = pipe_of(chunks=1), False
    for _ in range(2):
        one, other = (each.forward_backward(rows(6)[0], y) for each in (pipe, plain))
        assert same_bits(one, other)  # it goes on as if nothing had been


def test_a_gradient_with_respect_to_the_output_is_none_through_a_cut():
    def of_output(output, target):
        (gradient,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
        return F.cross_entropy(output, target) + gradient.square().sum(1).mean()

    x, y = rows(6)
    torch.manual_seed(0)
    expected = of_output(mlp()(x), y)
    torch.testing.assert_close(pipe_of(loss_fn=of_output).forward_backward(x, y), expected.detach())


@pytest.mark.parametrize(
    "target, message",
    [
        ("abc", "target of type str holds no tensor"),
        (3, "target of type int holds no tensor"),
        ([1, 2], "target of type list holds no tensor"),
        (torch.zeros(()), "tensors of a target differ in dim 0"),
        ((torch.zeros(6), torch.zeros(5)), "tensors of a target differ in dim 0"),
        (torch.zeros(5), "target has 5 rows, the batch 6"),
    ],
)
def test_a_bad_target_is_called_a_target(target, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pipe_of().forward_backward(rows(6)[0], target)
