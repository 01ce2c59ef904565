"""Models that compute their own loss, as nanoGPT's does: `forward(x, targets=None)`."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from torch import nn

from stages import split

CLASSES = 7


class OwnLoss(nn.Module):
    """Tokens to (logits, loss); without targets of the last position alone, as nanoGPT."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, CLASSES)

    def hidden(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x, targets=None):
        x = self.hidden(x)
        if targets is not None:
            logits = self.head(x)
            return logits, self.loss(logits, targets, x)
        return self.head(x[:, [-1], :]), None

    def loss(self, logits, targets, x):
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class OfAModule(OwnLoss):
    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(ignore_index=-1)

    def loss(self, logits, targets, x):
        return self.criterion(logits.flatten(0, 1), targets.flatten())


class Shifted(OwnLoss):
    def loss(self, logits, targets, x):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


class Summed(OwnLoss):
    def loss(self, logits, targets, x):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class OfTwoTerms(OwnLoss):
    def loss(self, logits, targets, x):
        return super().loss(logits, targets, x) + 0.1 * logits.square().mean()


class NeedsHidden(OwnLoss):
    def loss(self, logits, targets, x):
        return super().loss(logits, targets, x) + x.square().mean()


class Weighted(OwnLoss):
    def __init__(self):
        super().__init__()
        self.register_buffer("of_class", torch.ones(CLASSES))

    def loss(self, logits, targets, x):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=self.of_class)


class Trained(OfAModule):
    def __init__(self):
        super().__init__()
        self.criterion.weight = nn.Parameter(torch.ones(CLASSES))


class Teaches(OwnLoss):
    def forward(self, x, targets=None):
        x = self.hidden(x)
        if targets is not None:
            logits = self.head(x + self.embed(targets))
            return logits, self.loss(logits, targets, x)
        return self.head(x), None


def batch():
    torch.manual_seed(0)
    x, y = torch.randint(CLASSES, (2, 5, 6)).unbind()
    return x, y


def chained(stages, x):
    for stage in stages:
        x = stage(x)
    return x


@pytest.mark.parametrize("kind", [OwnLoss, OfAModule, Shifted, Summed, OfTwoTerms])
@pytest.mark.parametrize("where", [3, ["blocks.0", "blocks.1"]])
def test_stages_give_the_models_output_and_loss(kind, where):
    model = kind()
    x, y = batch()
    expected_output, expected = model(x, y)
    stages = split(model, where)
    output = chained(stages, x)
    assert same_bits(output, expected_output)
    (again,) = {id(stage.own_loss): stage.own_loss for stage in stages}.values()
    assert same_bits(again(output, y), expected)
    assert same_bits(pickle.loads(pickle.dumps(again))(output, y), expected)


def test_over_what_a_loss_is_the_mean():
    _, y = batch()
    y[0, :4] = -1
    y[1, 0] = -1
    assert split(OwnLoss(), 2)[0].own_loss.num_terms(y) == 25
    assert split(OfAModule(), 2)[0].own_loss.num_terms(y) == 25
    y[2, 3] = -100
    y[2, 0] = -100  # cut off by the shift
    assert split(Shifted(), 2)[0].own_loss.num_terms(y) == 24
    assert split(OfTwoTerms(), 2)[0].own_loss.num_terms(y) == 5  # nothing is known: rows
    assert [split(k(), 2)[0].own_loss.reduction for k in (OwnLoss, Summed)] == ["mean", "sum"]


@pytest.mark.parametrize(
    "kind, message",
    [
        (NeedsHidden, "its loss needs a result of .* besides.*loss_fn="),
        (Weighted, "its loss reads 'of_class'.*loss_fn="),
        (Trained, "its loss calls 'criterion', which has parameters or buffers.*loss_fn="),
        (Teaches, "its output depends on 'targets'"),
    ],
)
def test_a_loss_that_cannot_be_parted_from_the_stages(kind, message):
    with pytest.raises(ValueError, match=f"{kind.__name__}.*{message}"):
        split(kind(), 2)


def test_targets_do_not_go_into_the_first_stage():
    x, y = batch()
    with pytest.raises(AssertionError, match="forward_backward"):
        split(OwnLoss(), 2)[0](x, y)


def test_a_model_without_a_loss_of_its_own():
    class Plain(OwnLoss):
        def forward(self, x, targets=None):
            return self.head(self.hidden(x))

    assert all(stage.own_loss is None for stage in split(Plain(), 2))
