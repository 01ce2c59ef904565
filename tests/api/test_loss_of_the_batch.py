"""The loss of a step is the plain model's over the batch, or an error that names the cure."""

import functools
import random
import re
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from torch import nn

import mpcomp

CLASSES = 5
WEIGHTS = torch.tensor([9.0, 1.0, 0.5, 3.0, 0.0])
partial = functools.partial


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(a=nn.Linear(6, 4), b=nn.Tanh(), c=nn.Linear(4, CLASSES)))


class Tokens(nn.Module):
    """Tokens [b, s] to classes that come second, as `F.cross_entropy` takes them."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.embed(x)).movedim(-1, 1)


def rows(count=8):
    """Sorted classes, of which microbatches have different ones."""
    torch.manual_seed(1)
    return torch.randn(count, 6), torch.arange(count) * 4 // count


def padded(count=8, ignored=-100):
    x, y = rows(count)
    y[1:4] = ignored
    return x, y


def plain(model, loss_fn, x, y):
    loss = loss_fn(model(x), y)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


def pipe_of(loss_fn, chunks=4, model=None, **options):
    return mpcomp.pipeline(model or classifier(), chunks, split=2, loss_fn=loss_fn, **options)


def assert_plain(loss_fn, x, y, chunks=4):
    loss, gradients = plain(classifier(), loss_fn, x, y)
    pipe = pipe_of(loss_fn, chunks)
    torch.testing.assert_close(pipe.forward_backward(x, y), loss)
    for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert pipe.evaluate([(x, y)]) == pytest.approx(loss.item(), rel=1e-5)


def own(output, target):
    return F.cross_entropy(output, target)


class Modules(nn.Module):
    """A loss in another."""

    def __init__(self):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(weight=WEIGHTS)

    def forward(self, output, target):
        return self.inner(output, target)


class SaysNothing:
    """A masked mean, as a method."""

    def loss(self, output, target):
        mask = target != -100
        return ((output.mean(1) - 1).square() * mask).sum() / mask.sum()


def contrastive(output, target):
    normal = F.normalize(output)
    return F.cross_entropy(normal @ normal.T / 0.1, torch.arange(len(output)))


def focal(output, target):
    losses = F.cross_entropy(output, target, reduction="none")
    return (losses * (1 - (-losses).exp()) ** 2).sum() / (target != -100).sum()


HAD = {
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), rows),
    "class weights and padding": (nn.CrossEntropyLoss(weight=WEIGHTS), padded),
    "of log-probabilities": (nn.NLLLoss(weight=WEIGHTS), padded),
    "smoothed": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), padded),
    "partial": (partial(F.cross_entropy, weight=WEIGHTS), padded),
    "partial of another class": (
        partial(F.cross_entropy, ignore_index=4),
        partial(padded, ignored=4),
    ),
    "partial of log-probabilities": (partial(F.nll_loss, weight=WEIGHTS), padded),
    "partial of a partial": (partial(partial(F.cross_entropy, weight=WEIGHTS)), padded),
    "partial of a module": (partial(nn.CrossEntropyLoss(weight=WEIGHTS)), padded),
    "sum": (partial(F.cross_entropy, reduction="sum"), padded),
    "weighted sum": (partial(F.cross_entropy, reduction="sum", weight=WEIGHTS), padded),
    "sum of a module": (nn.CrossEntropyLoss(reduction="sum"), padded),
    "sum of a partial module": (partial(nn.NLLLoss(reduction="sum")), padded),
}
REFUSED = {
    "function": (own, padded),
    "weights in a function": (lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS), rows),
    "module in a module": (Modules(), rows),
    "method": (SaysNothing().loss, padded),
    "masked mean in a method's partial": (partial(SaysNothing().loss), padded),
    "multiple": (lambda o, t: 3 * F.cross_entropy(o, t), padded),
    "sum of terms": (lambda o, t: F.cross_entropy(o, t) + o.square().mean(), padded),
    "focal": (focal, padded),
    "sum in a function": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), rows),
    "sum over rows' mean": (lambda o, t: o.square().mean(1).sum(), rows),
    "root of a mean": (lambda o, t: (o - 1).square().mean().sqrt(), rows),
    "statistic of rows": (lambda o, t: o.var(0, correction=0).mean(), rows),
    "negatives of the batch": (contrastive, rows),
    "nonsense of a sum": (partial(own), padded),
}


@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize("name", HAD)
def test_what_can_be_had_is_the_plain_models(name, chunks):
    loss_fn, batch = HAD[name]
    assert_plain(loss_fn, *batch(), chunks)


@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_is_refused_with_both_numbers(name, chunks):
    """In training and in evaluation; on microbatches of one row, of two or more, uneven."""
    loss_fn, batch = REFUSED[name]
    x, y = batch()
    number = re.escape(f"{loss_fn(classifier()(x), y).item():.6g}")
    both = rf"loss_fn is {number} for 8 rows of {chunks} .*over microbatches is \S+,"
    message = rf"({both}|loss_fn is .*over microbatches is nan,).*num_terms"
    with pytest.raises(ValueError, match=message):
        pipe_of(loss_fn, chunks).forward_backward(x, y)
    with pytest.raises(ValueError, match=message):
        pipe_of(loss_fn, chunks).evaluate([(x, y)])
    with pytest.raises(ValueError, match="metric is .*num_terms"):
        pipe_of(F.cross_entropy, chunks).evaluate([(x, y)], loss_fn)
    one = pipe_of(loss_fn, 1).forward_backward(x, y)  # which is the batch
    torch.testing.assert_close(one, loss_fn(classifier()(x), y).detach())


def test_terms_that_the_loss_names_are_the_cure():
    def counted(output, target):
        return 2 * F.cross_entropy(output, target, weight=WEIGHTS)

    counted.num_terms = lambda target: WEIGHTS[target[target != -100]].sum()
    assert_plain(counted, *padded())

    def summed(output, target):
        return F.cross_entropy(output, target, reduction="sum")

    summed.reduction = "sum"
    assert_plain(summed, *padded())
    counted.num_terms = len
    with pytest.raises(ValueError, match="num_terms"):
        pipe_of(counted).forward_backward(*padded())


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_microbatch_of_padding_alone_adds_nothing_or_is_refused(place):
    """Also where the gradient of the padding is NaN, not 0."""
    x, y = rows()
    y[2 * place : 2 * place + 2] = -100
    for loss_fn in (F.cross_entropy, nn.CrossEntropyLoss(weight=WEIGHTS)):
        assert_plain(loss_fn, x, y)
    for loss_fn in (own, SaysNothing().loss, labels(-100)[0]):
        with pytest.raises(ValueError, match="over microbatches is nan.*num_terms"):
            pipe_of(loss_fn).forward_backward(x, y)
        one = pipe_of(loss_fn, chunks=1).forward_backward(x, y)
        torch.testing.assert_close(one, loss_fn(classifier()(x), y).detach())
    with pytest.raises(FloatingPointError, match="the loss of step 0 is NaN or Inf"):
        pipe_of(lambda o, t: own(o, t) / 0).forward_backward(x, y)  # of all rows too


@pytest.mark.parametrize("kind", ["tuple", "mapping", "mapping with a number"])
def test_targets_of_several_tensors(kind):
    x, y = padded()
    scale = torch.arange(8.0)
    target = {"tuple": (y, scale)}.get(kind, {"y": y, "scale": scale})
    if kind == "mapping with a number":
        target["times"] = 3

    def masked(output, target):
        y, scale = target if isinstance(target, tuple) else (target["y"], target["scale"])
        return F.cross_entropy(output, y) + scale.mean()

    with pytest.raises(ValueError, match="num_terms"):
        pipe_of(masked).forward_backward(x, target)
    y.clamp_(min=0)
    pipe_of(masked).forward_backward(x, target)


class Stateful(nn.Module):
    """Counts, remembers, draws: in attributes, a closure, a global, a buffer, in containers."""

    seen: list

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))
        self.calls, self.seen, self.meters = 0, [], {"loss": {"count": 0}}
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, output, target):
        self.rows += len(output)
        self.calls += 1
        self.seen.append(len(output))
        self.meters["loss"]["count"] += 1
        draws = (torch.rand(1), torch.rand(1, generator=self.generator))
        assert all(draw < 1 for draw in (*draws, random.random(), np.random.rand()))  # noqa: NPY002
        return F.mse_loss(output, F.one_hot(target, CLASSES).float())


COUNT = 0


def test_the_comparison_leaves_no_trace():
    global COUNT
    x, y = rows()
    loss_fn = Stateful()
    calls, names = 0, set()

    def counting(output, target):
        nonlocal calls
        global COUNT
        calls, COUNT = calls + 1, COUNT + 1
        names.add(calls)
        output.mul_(1.0)
        return loss_fn(output, target)

    pipe = pipe_of(counting)
    states = []
    for step in range(2):  # the first compares
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        pipe.forward_backward(x, y)
        states.append((torch.rand(1), random.random(), np.random.rand()))  # noqa: NPY002
        assert (calls, COUNT, len(names)) == (4 * step + 4,) * 3
        assert loss_fn.calls == loss_fn.meters["loss"]["count"] == len(loss_fn.seen) == calls
        assert loss_fn.rows == 2 * calls
    assert states[0] == states[1]
    expected = torch.Generator().manual_seed(0)
    for _ in range(8):
        torch.rand(1, generator=expected)
    assert same_bits(loss_fn.generator.get_state(), expected.get_state())


def test_a_loss_is_compared_by_one_call_with_all_rows(capsys):
    x, y = rows()

    class Unseen:
        """Prints, which nothing takes back."""

        def __call__(self, output, target):
            print(len(output))
            return F.cross_entropy(output, target)

    pipe = pipe_of(Unseen())
    pipe.forward_backward(x, y)
    assert capsys.readouterr().out.split() == ["2"] * 3 + ["8"] + ["2"] * 5
    pipe.forward_backward(x, y)  # the second step and the fourth are compared again
    pipe.evaluate([(x, y)])
    assert capsys.readouterr().out.split() == ["2"] * 3 + ["8"] + ["2"] * 9
    pipe.evaluate([(x, y)], Unseen())
    assert len(capsys.readouterr().out.split()) == 9


def masked(output, target):
    y, mask = (target["y"], target["mask"]) if isinstance(target, dict) else target
    losses = F.cross_entropy(output, y, reduction="none")
    return (losses * mask).sum() / mask.sum()


def labels(mark, **options):
    """Targets whose entries that do not count have a mark of their own."""

    def loss_fn(output, target):
        losses = F.cross_entropy(output, target.clamp(0, CLASSES - 1), reduction="none")
        return (losses * (target != mark)).sum() / (target != mark).sum()

    def marked(y, padding):
        return torch.where(padding, mark, y)

    return loss_fn, marked


#: Losses that are masked means, and targets for classes and padding.
LATER = {
    "ignored by default": (own, labels(-100)[1]),
    "void of images": labels(255),
    "padding of tokens": labels(-1),
    "mask of bool": (masked, lambda y, padding: {"y": y, "mask": ~padding}),
    "mask of floats": (masked, lambda y, padding: {"y": y, "mask": (~padding).float()}),
    "weights of a tuple": (masked, lambda y, padding: (y, 1.0 - 0.5 * padding)),
    "method": (SaysNothing().loss, labels(-100)[1]),
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("step", [3, 7, 13])
def test_padding_that_comes_later_is_noticed_when_it_comes(name, step):
    loss_fn, targets = LATER[name]
    x, y = rows()
    padding = torch.zeros(8, dtype=torch.bool)
    pipe, evaluated = pipe_of(loss_fn), pipe_of(loss_fn)
    for _ in range(step - 1):
        pipe.forward_backward(x, targets(y, padding))
    batches = [(x, targets(y, padding))] * (step - 1)
    evaluated.evaluate(batches)
    padding[1:4] = True
    with pytest.raises(ValueError, match="num_terms"):
        pipe.forward_backward(x, targets(y, padding))
    with pytest.raises(ValueError, match="num_terms"):
        evaluated.evaluate([(x, targets(y, padding))])


def test_padding_without_a_mark_is_noticed_at_a_step_that_is_compared():
    """As much in each microbatch at first, then not."""
    x, y = rows()
    even = y.clone()
    even[::2] = -100
    pipe = pipe_of(own)
    for _ in range(5):
        pipe.forward_backward(x, even)
    uneven = y.clone()
    uneven[0] = -100
    for _ in range(6, 8):
        pipe.forward_backward(x, uneven)
    with pytest.raises(ValueError, match="num_terms"):
        pipe.forward_backward(x, uneven)  # the eighth


def test_a_microbatch_of_padding_alone_that_comes_later():
    x, y = rows()
    pipe = pipe_of(own)
    for _ in range(4):
        pipe.forward_backward(x, y)
    y = y.clone()
    y[:2] = -100
    with pytest.raises(ValueError, match="over microbatches is nan.*num_terms"):
        pipe.forward_backward(x, y)


POWERS = {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize(
    "targets, others",
    [("same", set()), ("ascending", set(range(3, 39)) - POWERS), ("random", None)],
)
def test_few_steps_are_compared(targets, others, capsys):
    """As random numbers seldom are less than all before; 32 at most beside the powers of two."""

    def loss_fn(output, target):
        print(len(output))  # which nothing takes back
        return F.mse_loss(output[:, 0], target.float())

    x, y = rows()
    pipe, compared = pipe_of(loss_fn), set()
    for step in range(1, 101):
        target = {"same": y, "ascending": y + 8 * step, "random": torch.randn(8)}[targets]
        pipe.forward_backward(x, target)
        if "8" in capsys.readouterr().out.split():
            compared.add(step)
    assert compared >= POWERS
    assert len(compared) < 25 if others is None else compared == POWERS | others


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)

    def forward(self, output, target):
        return F.cross_entropy(self.norm(output), target)


class Running(nn.Module):
    """A normaliser that autograd needs, changed in place by each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output, target):
        loss = F.cross_entropy(output, target)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean


class Remembered:
    """A normaliser in an attribute."""

    mean = None

    def __call__(self, output, target):
        loss = F.mse_loss(output, F.one_hot(target, CLASSES).to(output))
        self.mean = loss.detach() if self.mean is None else 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


def sampled(output, target):
    """Negatives that all rows of a call share."""
    chosen = torch.cat([target[:, None], torch.randint(CLASSES, (2,)).expand(len(output), 2)], 1)
    return F.cross_entropy(output.gather(1, chosen), torch.zeros_like(target))


@functools.lru_cache
def ones(count):
    return torch.ones(count)


class Slow(nn.Module):
    """Its value depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, target):
        self.calls += 1
        return F.cross_entropy(output, target) * (1 + 0.1 / self.calls)


def penalty(output, target):
    (gradient,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
    return F.cross_entropy(output, target) + gradient.square().sum(1).mean()


def time_first(output, target):
    return F.mse_loss(output.transpose(0, 1), target[..., None].expand(-1, -1, 4).float())


QUIET = {
    "mean": own,
    "mean of squares": lambda o, t: F.mse_loss(o, F.one_hot(t, CLASSES).float()),
    "multiple": lambda o, t: -0.5 * F.cross_entropy(o, t),
    "mean about zero": lambda o, t: (o - o.detach().mean(1, keepdim=True)).mean(),
    "signed": lambda o, t: (o[:, 0] * (2.0 * (t > 1) - 1)).mean(),
    "constant": lambda o, t: o.sum() * 0,
    "dropout": lambda o, t: F.cross_entropy(F.dropout(o, 0.5), t),
    "noise": lambda o, t: F.cross_entropy(o + torch.randn_like(o), t),
    "BatchNorm": Normed(),
    "state": Slow(),
    "gradient of the output": penalty,
    "normaliser": Running(),
    "normaliser in an attribute": Remembered(),
    "compiled": torch.compile(own, backend="eager"),
    "compiled normaliser": torch.compile(Running(), backend="eager"),
    "sampled negatives": sampled,
    "a little noise": lambda o, t: F.cross_entropy(o + 1e-3 * torch.randn_like(o), t),
    "critic": lambda o, t: (o[:, 0] * (2.0 * (t % 2) - 1)).mean(),
    "difference to a constant": lambda o, t: F.cross_entropy(o, t) - 1.6,
    "smoothed": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1),
    "cached weights": lambda o, t: (F.cross_entropy(o, t, reduction="none") * ones(len(t))).mean(),
    "small": lambda o, t: 1e-30 * F.cross_entropy(o, t),
    "large": lambda o, t: 1e4 * F.cross_entropy(o.float(), t),
    "clipped": lambda o, t: F.cross_entropy(o, t, reduction="none").clamp(max=1.5).mean(),
    "in place": lambda o, t: F.cross_entropy(o.div_(2), t),
    "of fp64": lambda o, t: F.cross_entropy(o.double(), t),
    "of bf16": lambda o, t: F.cross_entropy(o.bfloat16().float(), t),
}


@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize("name", QUIET)
def test_no_false_alarm(name, chunks):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(loss_fn|metric)")
        pipe_of(QUIET[name], chunks).forward_backward(*rows(24))
        if name != "gradient of the output":  # which evaluation has none of
            pipe_of(QUIET[name], chunks).evaluate([rows(24)])


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("count, chunks", [(1, 1), (5, 2), (8, 8), (513, 4)])
def test_no_false_alarm_in_any_precision(dtype, size, count, chunks):
    x, y = rows(count)
    for name, loss_fn in QUIET.items():
        if name == "BatchNorm" or (name, dtype) == ("large", torch.float16):
            continue  # which is of fp32; overflows
        model = classifier().to(dtype)
        with torch.no_grad():
            model.c.weight *= size
        pipe = pipe_of(loss_fn, chunks, model)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*loss_fn")
            for _ in range(2):
                pipe.forward_backward(x.to(dtype), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_no_false_alarm_by_rounding(dtype):
    for batch in (rows(24), rows(23)):
        x = batch[0].to(dtype)
        pipe_of(own, model=classifier().to(dtype)).forward_backward(x, batch[1])
    with torch.autocast("cpu", torch.bfloat16):
        pipe_of(own).forward_backward(*rows(24))
    with pytest.raises(ValueError, match="num_terms"):
        x, y = padded()
        pipe_of(own, model=classifier().to(dtype)).forward_backward(x.to(dtype), y)


@pytest.mark.parametrize("batch", [4, 6])
def test_rows_of_another_dim_than_the_first_are_not_compared(batch):
    """Sequences [s, b, h] of s = 6: one as long as the batch, which shapes cannot tell."""

    class First(nn.Module):
        def forward(self, x):
            return x.transpose(0, 1)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), First())
    x, y = torch.randn(batch, 6, 4), torch.randint(9, (batch, 6))
    pipe_of(time_first, 2, model).forward_backward(x, y)


def test_rows_may_be_several_of_the_output():
    def flat(output, target):
        return F.cross_entropy(output, target.flatten())

    class Flat(nn.Module):
        def forward(self, x):
            return x.flatten(0, 1)

    model = nn.Sequential(nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES), Flat())
    y = torch.randint(CLASSES, (6, 7))
    pipe_of(flat, 3, model).forward_backward(y, y)
    y = y.clone()
    y[:2, 1:] = -100
    with pytest.raises(ValueError, match="num_terms"):
        pipe_of(flat, 3, model).forward_backward(y.clamp(min=0), y)


def test_a_loss_that_fails_for_several_microbatches_is_said():
    def of_two(output, target):
        return F.cross_entropy(output.reshape(2, CLASSES), target)

    with pytest.warns(UserWarning, match="loss_fn takes a microbatch, but failed for rows of 4"):
        pipe_of(of_two).forward_backward(*rows())


def test_large_outputs_are_compared_in_part(monkeypatch):
    monkeypatch.setattr("mpcomp.core.loss_check._ELEMENTS", 3 * CLASSES)
    with pytest.raises(ValueError, match="for 3 rows of 2 microbatches"):
        pipe_of(lambda o, t: F.cross_entropy(o, t, reduction="sum")).forward_backward(*rows())


def test_figures_beside_a_loss_are_no_losses():
    """Numbers, counts and accuracies are means of microbatches; a loss among them is compared."""
    x, y = padded()
    figures = {"n": lambda o, t: float(len(t)), "right": lambda o, t: (o.argmax(1) == t).sum()}
    for figure in figures.values():
        pipe_of(F.cross_entropy).evaluate([(x, y)], figure)
    with torch.inference_mode(), pytest.raises(ValueError, match="metric's 'loss' is .*num_terms"):
        pipe_of(own).evaluate([(x, y)], lambda o, t: {"loss": own(o, t), "n": len(t)})


class OfItsOwn(nn.Module):
    """Tokens to (logits, loss), as nanoGPT."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x, targets=None):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, self.loss(logits.flatten(0, 1), targets.flatten())

    def loss(self, logits, targets):
        return F.cross_entropy(logits, targets)


class Multiple(OfItsOwn):
    def loss(self, logits, targets):
        return 2 * F.cross_entropy(logits, targets)


class Terms(OfItsOwn):
    def loss(self, logits, targets):
        return F.cross_entropy(logits, targets) + 1e-2 * logits.square().mean()


class Masked(OfItsOwn):
    def loss(self, logits, targets):
        losses = F.cross_entropy(logits, targets, reduction="none")
        return losses.sum() / (targets != -100).sum()


class Halved(OfItsOwn):
    def loss(self, logits, targets):
        return F.cross_entropy(logits, targets, reduction="sum") / 100


class Negatives(OfItsOwn):
    def loss(self, logits, targets):
        return (logits @ logits.T).logsumexp(1).mean()


class Summed(OfItsOwn):
    def loss(self, logits, targets):
        return F.cross_entropy(logits, targets, reduction="sum")


OWN = [OfItsOwn, Summed, Multiple, Terms, Masked, Halved, Negatives]


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("chunks", [2, 6])
def test_a_loss_of_the_models_own(kind, chunks):
    x = torch.randint(CLASSES, (6, 5))
    y = x.clone()
    y[:3, 1:] = -100
    expected = kind()(x, y)[1].detach()
    pipe = pipe_of(None, chunks, kind())
    if kind in (OfItsOwn, Summed):
        torch.testing.assert_close(pipe.forward_backward(x, y), expected)
        return
    number = re.escape(f"{expected:.6g}"[:5])
    with pytest.raises(ValueError, match=f"loss_fn is {number}.*num_terms.*give loss_fn="):
        pipe.forward_backward(x, y)


def on_a_rank(name):
    """Numbers of a member of `HAD`, or the errors of one of `REFUSED`."""
    loss_fn, batch = {**HAD, **REFUSED}[name]
    x, y = batch()
    pipe = pipe_of(loss_fn)
    if name in HAD:
        return pipe.forward_backward(x, y), pipe.evaluate([(x, y)])
    with pytest.raises(Exception, match="num_terms") as caught:  # PeerError where the loss is not
        pipe.forward_backward(x, y)
    return str(caught.value)


def on_ranks():
    return [on_a_rank(name) for name in ("class weights and padding", "partial", "sum", "function")]


@pytest.mark.timeout(120)
def test_ranks_have_one_number_and_one_error(ranks):
    first, second = ranks(on_ranks, 2)
    assert first[:-1] == second[:-1] == on_ranks()[:-1]
    numbers = "loss_fn is .* over microbatches is"
    assert all(re.search(numbers, outcomes[-1]) for outcomes in (first, second))
