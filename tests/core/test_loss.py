"""The loss of a step: shares of microbatches, tokens that do not count, transformers' numbers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lms import VOCABULARY, gpt2, language_model, logits_of, num_tokens, text, without_labels
from methods import same_bits
from torch import nn
from transformers import BatchEncoding

import mpcomp
from mpcomp import CausalLMLoss
from mpcomp.core.loss import StepLoss, is_sum, num_terms, with_target


def logits(rows=3, positions=7, dtype=torch.float32):
    return torch.randn(rows, positions, VOCABULARY).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_causal_lm_loss_is_transformers_own(side, dtype):
    """Bit for bit, gradient too."""
    labels = text(3, side=side, positions=7)["labels"]
    ours = logits(dtype=dtype)
    theirs = ours.detach().clone().requires_grad_()
    loss = CausalLMLoss()(ours, labels)
    expected = gpt2().loss_function(logits=theirs, labels=labels, vocab_size=VOCABULARY)
    assert same_bits(loss, expected)
    loss.backward()
    expected.backward()
    assert same_bits(ours.grad, theirs.grad)


@pytest.mark.parametrize("positions", [1, 7])
def test_without_a_label_it_is_zero_and_so_is_its_gradient(positions):
    x = logits(positions=positions)
    labels = torch.full((3, positions), -100)
    labels[:, 0] = 5  # nothing predicts the first token
    loss = CausalLMLoss()(x, labels)
    loss.backward()
    assert loss.item() == 0 and same_bits(x.grad, torch.zeros_like(x))


def test_num_terms():
    labels = torch.tensor([[1, 2, -100, 4], [-100, -100, -100, 4], [1, -100, -100, -100]])
    assert num_terms(CausalLMLoss(), labels, 3) == 3
    classes = torch.tensor([1, -100, 2])
    for loss_fn in (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss(), nn.NLLLoss()):
        assert num_terms(loss_fn, classes, 3) == 2
    assert num_terms(nn.CrossEntropyLoss(ignore_index=2), classes, 3) == 2
    # Class weights make the mean one over weights.
    weights = torch.tensor([4.0, 0.5, 0.25])
    for loss_fn in (nn.CrossEntropyLoss(weights), partial(F.nll_loss, weight=weights)):
        assert num_terms(loss_fn, classes, 3) == 0.75
    assert num_terms(partial(F.cross_entropy, ignore_index=2), classes.clamp(min=0), 3) == 2
    assert is_sum(partial(F.mse_loss, reduction="sum")) and not is_sum(partial(F.mse_loss))
    assert num_terms(F.cross_entropy, torch.randn(3, 5), 3) == 3
    assert num_terms(F.mse_loss, torch.tensor([-100, 1, 2]), 3) == 3
    assert num_terms(F.cross_entropy, (classes, classes), 3) == 3


@pytest.mark.parametrize(
    "labels, message",
    [
        (torch.zeros(3, 5, dtype=torch.long), r"\[3, 5\] torch.int64, but the logits \[3, 7, 53\]"),
        (torch.zeros(3, dtype=torch.long), r"labels are \[3\] torch.int64: expected whole"),
        (torch.zeros(3, 7), r"labels are \[3, 7\] torch.float32: expected whole numbers \[b, s\]"),
        ([1], "labels are a list"),
    ],
    ids=["shape", "1-d", "float", "list"],
)
def test_bad_labels(labels, message):
    with pytest.raises(ValueError, match=message):
        CausalLMLoss()(logits(), labels)


@pytest.mark.parametrize("kind", ["language model", "classes"])
def test_microbatches_weigh_by_what_counts_in_them(kind):
    """Very different numbers of labels, one microbatch without: the loss of the whole batch."""
    if kind == "classes":
        loss_fn, x = F.cross_entropy, torch.randn(8, VOCABULARY)
        y = torch.tensor([1, -100, 3, 4, -100, -100, -100, 8])
        counts = [1, 2, 0, 1]
    else:
        loss_fn, x = CausalLMLoss(), torch.randn(8, 7, VOCABULARY)
        y = torch.randint(VOCABULARY, (8, 7))
        y[1:2], y[2:4, 2:], y[4:6] = -100, -100, -100
        counts = [6, 2, 0, 12]
    parts, targets = x.split(2), y.split(2)
    assert [num_terms(loss_fn, target, 2) for target in targets] == counts
    whole = x.clone().requires_grad_()
    loss_fn(whole, y).backward()
    step = StepLoss(loss_fn, counts, None)
    for i, (part, target) in enumerate(zip(parts, targets, strict=True)):
        part = part.clone().requires_grad_()
        step(part, target, i).backward()
        torch.testing.assert_close(part.grad, whole.grad[2 * i : 2 * i + 2], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(step.total, loss_fn(x, y), rtol=1e-6, atol=0)


def test_a_sum_is_not_weighted():
    x, y = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 1, -100, -100, 2])
    step = StepLoss(nn.CrossEntropyLoss(reduction="sum"), [2, 0, 1], None)
    for i, rows in enumerate((slice(0, 2), slice(2, 4), slice(4, 5))):
        step(x[rows], y[rows], i)
    torch.testing.assert_close(step.total, F.cross_entropy(x, y, reduction="sum").detach())


def test_pipeline_with_classes_that_do_not_count():
    """An ordinary model: microbatch 2 of 3 has no class that counts, and spoils nothing."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6))
    pipe = mpcomp.pipeline(model, 3, split=2, loss_fn=F.cross_entropy)
    x, y = torch.randn(6, 4), torch.tensor([1, 2, -100, -100, 5, -100])
    expected = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    loss = pipe.forward_backward(x, y)
    torch.testing.assert_close(loss, expected.detach())
    for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert pipe.evaluate([(x, y)]) == pytest.approx(expected.item(), rel=1e-6)


def test_evaluate_weighs_tokens():
    """Batches and microbatches of different lengths: the mean over all tokens together."""
    model = language_model("llama")
    pipe = mpcomp.pipeline(model, 2, split=2)
    batches = [text(5, seed, side="right") for seed in range(2)] + [text(1), text(3, positions=4)]
    total, tokens = 0.0, 0
    for batch in batches:
        count = num_tokens(batch["labels"])
        total += float(CausalLMLoss()(logits_of(model, batch), batch["labels"])) * count
        tokens += count
    assert pipe.evaluate(batches) == pytest.approx(total / tokens, rel=1e-6)
    pairs = [(without_labels(batch), batch["labels"]) for batch in batches]
    assert pipe.evaluate(pairs) == pipe.evaluate(batches)
    no_labels = {**text(2), "labels": torch.full((2, 9), -100)}
    assert pipe.evaluate([*batches, no_labels]) == pipe.evaluate(batches)

    def named(logits, labels):  # says nothing of terms, so rows
        return {"rows": labels.shape[0], "loss": CausalLMLoss()(logits, labels)}

    found = pipe.evaluate([text(3), text(1)], named)
    assert found["rows"] == pytest.approx((2 * 2 + 1 + 1) / 4)
    with pytest.raises(ValueError, match="no token of the loader's batches has a label"):
        pipe.evaluate([no_labels])
    with pytest.raises(ValueError, match="yielded no batch"):
        pipe.evaluate([])
    assert model.training


def test_labels_may_come_with_the_batch():
    """Mapping, BatchEncoding, or apart: the same step."""
    batch = text(4)
    losses = []
    for given in (
        (batch,),
        (BatchEncoding(batch),),
        (without_labels(batch), batch["labels"]),
    ):
        torch.manual_seed(0)
        pipe = mpcomp.pipeline(gpt2(), 2, split=2)
        losses.append(pipe.forward_backward(*given))
    assert len({loss.item() for loss in losses}) == 1


@pytest.mark.parametrize("batch", [torch.zeros(2), {"x": 1}, (1, 2)], ids=["tensor", "map", "2"])
def test_a_missing_target_is_an_error(batch):
    with pytest.raises(ValueError, match="no target: pass one, or a mapping with 'labels'"):
        with_target(batch, None)


def test_a_weight_is_on_what_is_differentiated_and_not_on_the_total():
    x, y = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    plain = StepLoss(F.cross_entropy, [4], None)
    halved = StepLoss(F.cross_entropy, [4], None, weight=0.5, keeps_outputs=True)
    assert same_bits(halved(x, y, 0), plain(x, y, 0) * 0.5)
    assert same_bits(halved.total, plain.total)
    assert same_bits(halved.outputs[0], x.detach()) and not halved.outputs[0].requires_grad
    assert plain.outputs == {}
