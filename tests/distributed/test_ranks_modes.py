"""Modules that compute in evaluation another way than in training, or give another shape there."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from everyday import slow
from torch import nn

import mpcomp

WORDS, WIDTH, CLASSES = 9, 4, 3


class Encoder(nn.Module):
    """Tokens to vectors, [b, s] to [b, s, h]; 0 is padding."""

    def __init__(self, how):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.how, self.embed = how, nn.Embedding(WORDS, WIDTH)
        self.encoder = layer if how == "layer" else nn.TransformerEncoder(layer, 2)
        if how == "attention":
            self.encoder = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, ids):
        x, padding = self.embed(ids), ids == 0
        if self.how == "attention":
            return self.encoder(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return self.encoder(x, src_key_padding_mask=None if self.how == "no mask" else padding)


class Mean(nn.Module):
    """The mean over tokens, padding among them, which the fast path leaves zero."""

    def forward(self, x):
        return x.mean(1)


class LastInEvaluation(nn.Module):
    """All tokens in training, the last alone in evaluation."""

    def forward(self, x):
        return x if self.training else x[:, -1:]


class TwoViews(nn.Module):
    """A sequence in training; beside it, in evaluation, its reverse: twice as long."""

    def forward(self, x):
        return x if self.training else torch.cat([x, x.flip(1)], dim=1)


class PooledInEvaluation(nn.Module):
    """[b, s, h] in training, [b, 1, 2 h] in evaluation, which the next layer folds again."""

    def forward(self, x):
        return x if self.training else torch.cat([x.mean(1), x.amax(1)], dim=-1)[:, None]


class Folded(nn.Module):
    def forward(self, x):
        return x.unflatten(-1, (-1, WIDTH)).flatten(1, -2) if x.shape[-1] != WIDTH else x


def model(name):
    """Cut after its first part, which is what differs."""
    torch.manual_seed(0)
    if name in ("encoder", "layer", "attention", "no mask"):
        parts = [Encoder(name)]
    else:
        parts = [nn.Embedding(WORDS, WIDTH), MODULES[name]()]
    return nn.Sequential(nn.Sequential(*parts), Folded(), Mean(), nn.Linear(WIDTH, CLASSES))


MODULES = {"last": LastInEvaluation, "two views": TwoViews, "pooled": PooledInEvaluation}
NAMES = ["encoder", "layer", "attention", "no mask", *MODULES]
CHUNKS = (1, 2, 4)
ALL = list(itertools.product(NAMES, CHUNKS))
EACH = list(zip(NAMES, itertools.cycle(CHUNKS)))
#: Padding of four rows at their ends, in some, in all so that the longest is short, and in none.
LENGTHS = {"some": [2, 4, 3, 4], "all": [2, 3, 1, 3], "none": [4, 4, 4, 4]}


def batch(padding):
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(1, WORDS, (4, 4), generator=drawn)
    ids[torch.arange(4) >= torch.tensor(LENGTHS[padding])[:, None]] = 0
    return ids, torch.tensor([0, 1, 2, 1])


def numbers(name, chunks):
    """Losses of training, evaluation, training for each padding: the pipeline's, the model's."""
    found = []
    for padding in LENGTHS:
        plain = model(name).train()
        pipe = mpcomp.pipeline(copy.deepcopy(plain), chunks, split=["0"], loss_fn=F.cross_entropy)
        x, y = batch(padding)
        trained = F.cross_entropy(plain(x), y).item()
        with torch.no_grad():
            evaluated = F.cross_entropy(plain.eval()(x), y).item()
        own = [pipe.forward_backward(x, y), pipe.evaluate([(x, y)]), pipe.forward_backward(x, y)]
        found.append(([float(loss) for loss in own], [trained, evaluated, trained]))
    return found


def of_cases(cases):
    enabled = torch.backends.mha.get_fastpath_enabled()
    found = [numbers(*case) for case in cases]
    assert torch.backends.mha.get_fastpath_enabled() == enabled
    return found


def assert_plain(found):
    for of_padding in found:
        for own, expected in of_padding:
            assert own == pytest.approx(expected, rel=1e-5)


def test_in_one_process_they_are_the_plain_models():
    found = of_cases(ALL)
    assert_plain(found)
    differ = [abs(trained - evaluated) for _, (trained, evaluated, _) in found[0]]
    assert differ[0] > 1e-3 < differ[1] and differ[2] < 1e-5  # the fast path was taken


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("cases", [EACH, slow(ALL)], ids=["each", "all"])
def test_on_ranks_they_are_the_plain_models(ranks, cases):
    first, second = ranks(of_cases, 2, cases)
    assert first == second == of_cases(cases)
    assert_plain(first)


def by_values():
    """A stage whose shape in evaluation is its longest row's, as no rank can tell ahead."""

    class Longest(nn.Module):
        def forward(self, x):
            return x if self.training else x[:, : int((x.abs().sum((0, 2)) > 0).sum())]

    MODULES["longest"] = Longest
    pipe = mpcomp.pipeline(model("longest"), 1, split=["0"], loss_fn=F.cross_entropy)
    x, y = batch("all")
    pipe.forward_backward(x, y)
    with pytest.raises(Exception, match=r"stage 0 .*cannot be run without data") as caught:
        pipe.evaluate([(x, y)])
    return str(caught.value)


@pytest.mark.timeout(60)
def test_a_shape_that_goes_by_values_is_named_on_both_ranks(ranks):
    assert all("must not" in message for message in ranks(by_values, 2))
