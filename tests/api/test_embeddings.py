"""Sparse gradients and rows of bounded norm: the plain model's numbers, or refused by name."""

import copy
import re
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpcomp

ROWS, WIDTH, CLASSES = 11, 6, 3
X = torch.arange(24).reshape(8, 3) % ROWS
Y = torch.arange(8) % CLASSES


class Bag(nn.Module):
    """An EmbeddingBag, which is called with rows of equal lengths."""

    def __init__(self, **options):
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, **options)

    def forward(self, x):
        return self.bag(x).unsqueeze(1)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def model_of(kind=nn.Embedding, **options):
    torch.manual_seed(0)
    first = Bag(**options) if kind is Bag else kind(ROWS, WIDTH, **options)
    return nn.Sequential(
        OrderedDict(
            embed=first, mean=Mean(), one=nn.Linear(WIDTH, 5), tanh=nn.Tanh(), two=nn.Linear(5, 3)
        )
    )


def pipe_of(model, chunks=4, **options):
    return mpcomp.pipeline(model, chunks, split=["mean"], loss_fn=F.cross_entropy, **options)


def step_of(model):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return step


def trained(model, step, clip, scaler=None, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        losses.append(step(X.roll(i, 0), Y).item())
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip(model)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return losses


def assert_plain(pipe, of_pipe, model, of_model):
    assert of_pipe == pytest.approx(of_model, rel=1e-5)
    for ours, theirs in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# -- max_norm -------------------------------------------------------------------------------------

BOUNDED = {
    "small": (nn.Embedding, {"max_norm": 0.5}),
    "L1": (nn.Embedding, {"max_norm": 1.0, "norm_type": 1.0}),
    "padded": (nn.Embedding, {"max_norm": 0.7, "padding_idx": 2}),
    "bag": (Bag, {"max_norm": 0.5}),
    "sum of a bag": (Bag, {"max_norm": 0.5, "mode": "sum"}),
    "sparse": (nn.Embedding, {"max_norm": 0.5, "sparse": True}),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("case", BOUNDED)
def test_rows_of_bounded_norm_are_the_plain_models(case, chunks, recompute):
    kind, options = BOUNDED[case]
    model = model_of(kind, **options)
    losses = trained(model, step_of(model), lambda model: None)
    pipe = pipe_of(model_of(kind, **options), chunks, recompute=recompute)
    found = trained(pipe, pipe.forward_backward, lambda pipe: None)
    assert_plain(pipe, found, model, losses)
    x, y = X.flip(0), Y
    ours = pipe.evaluate([(x, y)])
    with torch.no_grad():
        assert ours == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)


class Tied(nn.Module):
    """Tokens to logits, by one weight at both ends."""

    def __init__(self, **options):
        super().__init__()
        self.embed, self.one = nn.Embedding(ROWS, WIDTH, **options), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.one(self.embed(x)).tanh().mean(1))


def tied(split, chunks=2, **options):
    torch.manual_seed(0)
    return mpcomp.pipeline(Tied(**options), chunks, split=split, loss_fn=F.cross_entropy)


class Norms(nn.Module):
    """Two embeddings of one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(ROWS, WIDTH, max_norm=0.5), nn.Embedding(ROWS, WIDTH)
        self.b.weight = self.a.weight
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.out((self.a(x) + self.b(x)).mean(1))


CANNOT = {
    "tied over a cut": lambda: tied(["one"], max_norm=1.0),
    "tied over a cut, one microbatch": lambda: tied(["one"], chunks=1, max_norm=1.0),
    "updates within a step": lambda: pipe_of(model_of(max_norm=1.0)).forward_backward(
        X, Y, update=lambda: None, updates=2
    ),
    "shared in a stage": lambda: mpcomp.pipeline(
        nn.Sequential(OrderedDict(a=Norms(), b=nn.Tanh())), 2, split=["a"], loss_fn=F.cross_entropy
    ),
    "frozen, tied": lambda: tied(["one"], max_norm=1.0, _freeze=True),
}


@pytest.mark.parametrize("case", CANNOT)
def test_rows_of_bounded_norm_that_cannot_be_right_are_refused(case):
    with pytest.raises(ValueError, match=r"has max_norm, by which.*torch\.renorm"):
        CANNOT[case]()


@pytest.mark.parametrize("kind", [nn.Embedding, Bag])
def test_gradients_by_frequency_are_the_plain_models_or_refused(kind):
    options = {"scale_grad_by_freq": True}
    model = model_of(kind, **options)
    losses = trained(model, step_of(model), lambda model: None)
    pipe = pipe_of(model_of(kind, **options), 1)
    assert_plain(pipe, trained(pipe, pipe.forward_backward, lambda pipe: None), model, losses)
    with pytest.raises(ValueError, match="scale_grad_by_freq=True, and each of 4 parts"):
        pipe_of(model_of(kind, **options), 4)


def test_a_shared_weight_of_bounded_norm_in_one_microbatch():
    model = nn.Sequential(OrderedDict(a=Norms(), b=nn.Linear(CLASSES, CLASSES)))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    pipe = mpcomp.pipeline(copy.deepcopy(model), 1, split=["a"], loss_fn=F.cross_entropy)
    losses = trained(model, step_of(model), lambda model: None)
    assert_plain(pipe, trained(pipe, pipe.forward_backward, lambda pipe: None), model, losses)


# -- sparse gradients -----------------------------------------------------------------------------

SPARSE = {
    "embedding": (nn.Embedding, {"sparse": True}),
    "padded": (nn.Embedding, {"sparse": True, "padding_idx": 0}),
    "bag": (Bag, {"sparse": True}),
    "sum of a bag": (Bag, {"sparse": True, "mode": "sum"}),
    "bounded": (nn.Embedding, {"sparse": True, "max_norm": 1.0}),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("case", SPARSE)
def test_sparse_gradients_are_the_plain_models(case, scaled):
    """With the norm over all stages, of which plain torch takes none: that of dense gradients."""
    kind, options = SPARSE[case]
    dense = model_of(kind, **{**options, "sparse": False})
    norms = []

    def clip_plain(model):
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())

    losses = trained(dense, step_of(dense), clip_plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    pipe = pipe_of(model_of(kind, **options), scaler=scaler)
    of_pipe = []
    found = trained(
        pipe,
        pipe.forward_backward,
        lambda pipe: of_pipe.append(mpcomp.clip_grad_norm_(pipe, 0.3).item()),
        scaler,
    )
    assert next(pipe.parameters()).grad.is_sparse
    assert of_pipe == pytest.approx(norms, rel=1e-4)
    assert_plain(pipe, found, dense, losses)


def test_a_scaler_skips_a_sparse_gradient_that_overflowed():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    pipe = pipe_of(model_of(sparse=True), scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    weight = next(pipe.parameters())
    before = weight.detach().clone()
    weight.register_hook(lambda grad: grad * float("inf"))
    pipe.forward_backward(X, Y)
    assert pipe.step_skipped
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, before) and scaler.get_scale() == 4.0


def test_a_sparse_weight_of_two_stages_is_refused():
    with pytest.raises(ValueError, match=r"embed is an Embedding\(sparse=True\), and the exchange"):
        tied(["one"], sparse=True)


# -- ranks ----------------------------------------------------------------------------------------


def sparse_on_ranks():
    pipe = pipe_of(model_of(sparse=True))
    losses = trained(pipe, pipe.forward_backward, lambda pipe: mpcomp.clip_grad_norm_(pipe, 0.3))
    bounded = pipe_of(model_of(max_norm=0.5))
    return losses, trained(bounded, bounded.forward_backward, lambda pipe: None)


def refused_on_ranks():
    """Messages by their subjects."""
    calls = {}
    for kind in (nn.Embedding, Bag):
        for options in ({"sparse": True}, {"max_norm": 1.0}):
            name = f"replicas, {kind.__name__}, {next(iter(options))}"
            calls[name] = lambda kind=kind, options=options: mpcomp.pipeline(
                model_of(kind, **options), 2, split=1, replicas=2, loss_fn=F.cross_entropy
            )
        calls[f"ddp, {kind.__name__}, sparse"] = lambda kind=kind: mpcomp.compress_gradients(
            DistributedDataParallel(model_of(kind, sparse=True)), "powersgd:2"
        )
    said = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as error:
            call()
        said[name] = str(error.value)
    return said


def test_two_ranks(ranks):
    alone = [
        trained(pipe, pipe.forward_backward, clip)
        for pipe, clip in (
            (pipe_of(model_of(sparse=True)), lambda pipe: mpcomp.clip_grad_norm_(pipe, 0.3)),
            (pipe_of(model_of(max_norm=0.5)), lambda pipe: None),
        )
    ]
    for found in ranks(sparse_on_ranks, 2):
        assert list(found) == alone


def test_what_replicas_cannot_take_is_refused_on_each(ranks):
    first, second = ranks(refused_on_ranks, 2)
    assert first == second and len(first) == 6
    for name, message in first.items():
        of = r"sparse=True\).*write sparse=False" if "sparse" in name else "max_norm.*come apart"
        assert re.search(of, message) and message.startswith("embed"), name
        assert "compress_gradients" in message or "ddp" not in name
