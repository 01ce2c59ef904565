"""Masks that a model of one's own is given: they mean what the model says, not what we guess."""

import copy

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from torch import nn

import mpcomp

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
ROWS, POSITIONS, VOCABULARY, WIDTH = 6, 8, 11, 16
#: True behind the end of a row, with rows of unlike lengths.
IGNORED = torch.arange(POSITIONS)[None, :] >= torch.tensor([8, 3, 5, 1, 7, 4])[:, None]


class First(nn.Module):
    """An embedding that ignores some positions, as ``counts(mask)`` says."""

    def __init__(self, counts, name):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self._counts, self._name = counts, name

    def forward(self, ids, **given):
        return self.embedding(ids) * self._counts(given[self._name])[:, :, None]


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(x.sum(1))


#: What stands in the batch, and the factor of each position that the model makes of it.
MEANINGS = {
    "torch's: True is ignored": (IGNORED, lambda m: (~m).float()),
    "torch's, as whole numbers": (IGNORED.long(), lambda m: 1.0 - m),
    "added to scores: 0 counts": (
        torch.zeros(ROWS, POSITIONS).masked_fill(IGNORED, -1e9),
        lambda m: m.exp(),
    ),
    "transformers': 1 counts": ((~IGNORED).long(), lambda m: m.float()),
    "weights, of which 0 has a share": (IGNORED.float(), lambda m: 1 / (1 + m)),
    "numbers of segments, from 0": (IGNORED.long(), lambda m: torch.ones_like(m)),
}


def trained(model, name, mask, ids, y, **methods):
    pipe = mpcomp.pipeline(copy.deepcopy(model), 2, split=2, loss_fn=F.cross_entropy, **methods)
    loss = pipe.forward_backward({"ids": ids, name: mask}, y)
    nats = pipe.evaluate([({"ids": ids, name: mask}, y)])
    return loss, {name: p.grad for name, p in pipe.named_parameters()}, nats


@pytest.mark.parametrize("spec", ["quant:8", "topk:0.5", "ef21+quant:4"])
@pytest.mark.parametrize("meaning", MEANINGS)
def test_the_name_of_a_mask_changes_no_number(meaning, spec):
    mask, counts = MEANINGS[meaning]
    ids, y = torch.randint(VOCABULARY, (ROWS, POSITIONS)), torch.arange(ROWS) % 3
    found = []
    torch.manual_seed(0)
    model = nn.Sequential(First(counts, "attention_mask"), Last())
    for name in ("attention_mask", "mask"):
        model[0]._name = name
        found.append(trained(model, name, mask, ids, y, act_comp=spec, grad_comp=spec))
    (loss, grads, nats), (other_loss, other_grads, other_nats) = found
    assert same_bits(loss, other_loss) and nats == other_nats
    assert grads.keys() == other_grads.keys()
    assert all(same_bits(grads[key], other_grads[key]) for key in grads)


@pytest.mark.parametrize("meaning", MEANINGS)
def test_a_mask_of_ones_own_blanks_nothing_that_counts(meaning):
    """Eight bits are close to none: the loss is the plain model's within their error."""
    mask, counts = MEANINGS[meaning]
    ids, y = torch.randint(VOCABULARY, (ROWS, POSITIONS)), torch.arange(ROWS) % 3
    model = nn.Sequential(First(counts, "attention_mask"), Last())
    expected = F.cross_entropy(model[1](model[0](ids, attention_mask=mask)), y).item()
    loss, _, nats = trained(model, "attention_mask", mask, ids, y, act_comp="quant:8")
    assert float(loss) == pytest.approx(expected, rel=0.02)
    assert nats == pytest.approx(expected, rel=0.02)


def test_padded_positions_of_a_language_model_are_blank():
    """Where 1 counts by definition: a bit of a padded position cannot reach the next stage."""
    pytest.importorskip("transformers")
    from lms import gpt2, text

    batch = text(4, side="right")
    pipe = mpcomp.pipeline(gpt2(tie_word_embeddings=False), 2, split=2, act_comp="quant:8")
    received = []
    pipe.stages[1].register_forward_pre_hook(lambda _m, args: received.append(args[0].detach()))
    pipe.forward_backward(batch)
    x = torch.cat([each for each in received if not each.is_meta])
    padded = batch["attention_mask"] == 0
    assert padded.any() and not x[padded].any() and x[~padded].any()
