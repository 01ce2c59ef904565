"""Loops written for a plain model: `output, loss = model(x, y)`, accumulation, accuracies."""

import copy

import pytest
import torch
import torch.nn.functional as F
from lms import VOCABULARY
from methods import same_bits
from models import MLP_SPLIT, mlp, rows
from torch import nn

import mpcomp


class OwnLoss(nn.Module):
    """A tied language model that computes its own loss, as nanoGPT's does."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.embed.weight = self.head.weight

    def forward(self, idx, targets=None):
        x = self.embed(idx)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def tokens(seed):
    """Of batches with other numbers of targets in each row, so that a wrong share shows."""
    x, y = torch.randint(
        VOCABULARY, (2, 6, 9), generator=torch.Generator().manual_seed(seed)
    ).unbind()
    return x, torch.where(torch.arange(9) < torch.arange(6).view(-1, 1), -1, y)


def plain_steps():
    """Losses, and the weights after it, of the loop as nanoGPT writes it."""
    torch.manual_seed(0)
    model = OwnLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        for micro_step in range(2):
            _, loss = model(*tokens(2 * step + micro_step))
            (loss / 2).backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(norm.item())
    model.eval()
    with torch.no_grad():
        logits, loss = model(*tokens(9))
    return [*losses, loss.item()], logits, model.state_dict()


def pipeline_steps(**methods):
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(OwnLoss(), chunks=3, split=2, **methods)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        for micro_step in range(2):
            loss = pipe.forward_backward(*tokens(2 * step + micro_step), weight=1 / 2)
            losses.append(loss.item())
        losses.append(mpcomp.clip_grad_norm_(pipe, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    pipe.eval()
    with torch.no_grad():
        logits, loss = pipe(*tokens(9))
    assert pipe.evaluate([tokens(9)]) == pytest.approx(loss.item(), rel=1e-5)
    return [*losses, loss.item()], logits, pipe.merge().state_dict()


def assert_same(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-4, atol=1e-4)


def test_a_model_with_a_loss_of_its_own():
    assert_same(pipeline_steps(), plain_steps())


def test_a_model_with_a_loss_of_its_own_on_two_ranks(ranks):
    for ours in ranks(pipeline_steps, 2):
        assert_same(ours, plain_steps())


def test_it_is_compressed():
    losses, *_ = pipeline_steps(act_comp="quant:4", grad_comp="quant:8")
    assert losses != plain_steps()[0] and all(torch.tensor(losses).isfinite())


def outputs_of_training():
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(mlp(), 3, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    x, y = rows(7)
    output, loss = pipe.forward_backward(x, y, with_output=True)
    again = pipe.forward_backward(x, y)
    assert same_bits(loss, again)
    return output


def test_the_output_of_a_training_step():
    torch.manual_seed(0)
    model = mlp()
    output = outputs_of_training()
    torch.testing.assert_close(output, model(rows(7)[0]).detach())
    assert not output.requires_grad


def test_the_output_of_a_training_step_on_every_rank(ranks):
    expected = outputs_of_training()
    assert all(same_bits(output, expected) for output in ranks(outputs_of_training, 3))


def test_output_and_loss_have_gradients_in_one_process():
    model = mlp()
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, 2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    x, y = rows(6)
    _, loss = pipe(x, y)
    loss.backward()
    expected = F.cross_entropy(plain(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_target_without_a_loss():
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT)
    with pytest.raises(ValueError, match=r"loss_fn=.*a tuple, pipe\(\(x, y\)\)"):
        pipe(*rows(6))


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number(weight):
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    with pytest.raises(ValueError, match=rf"weight={weight}"):
        pipe.forward_backward(*rows(6), weight=weight)
    assert pipe.num_steps == 0
