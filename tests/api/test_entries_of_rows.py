"""Lists and arrays with an entry a row, in batch and target: the plain model's numbers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from ranks import preload
from torch import nn

import mpcomp

preload("test_entries_of_rows")
ROWS, CHUNKS = 6, 3
WORDS = ["a", "bbb", "cc", "dddd", "e", "ff"]
LENGTHS = [len(word) for word in WORDS]


def scales(value):
    """One number a row, of any of the kinds below."""
    if isinstance(value, dict):
        value = value["words"]
    numbers = [len(v) if isinstance(v, str | list) else v for v in value]
    return torch.tensor(np.array(numbers, dtype=np.float32))


#: Each gives the same number a row.
KINDS = {
    "list of words": WORDS,
    "tuple of words": tuple(WORDS),
    "list of numbers": LENGTHS,
    "list of lists": [list(word) for word in WORDS],
    "array of numbers": np.array(LENGTHS),
    "array of words": np.array(WORDS),
    "mapping of a list": {"words": WORDS},
}


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 8)

    def forward(self, x, extra, sizes=()):
        assert sizes == [1, 2] or sizes == ()
        assert len(scales(extra)) == len(x)
        return self.linear(x) * scales(extra)[:, None]


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(First(), nn.Linear(8, 3))


def loss_of(output, target):
    y, extra = target
    return (F.cross_entropy(output, y, reduction="none") * scales(extra)).mean()


def data(value):
    torch.manual_seed(1)
    return torch.randn(ROWS, 5), torch.arange(ROWS) % 3, value


def trained(kind, **options):
    x, y, value = data(KINDS[kind])
    pipe = mpcomp.pipeline(model_of(), CHUNKS, split=2, loss_fn=loss_of, **options)
    batch = {"x": x, "extra": value, "sizes": [1, 2]}
    loss = pipe.forward_backward(batch, (y, value))
    nats = pipe.evaluate([((x, value), (y, value))])
    return float(loss), nats, {name: p.grad for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_the_plain_models(kind):
    x, y, value = data(KINDS[kind])
    model = model_of()
    expected = loss_of(model[1](model[0](x, value)), (y, value))
    expected.backward()
    loss, nats, grads = trained(kind)
    assert loss == pytest.approx(expected.item()) and nats == pytest.approx(expected.item())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


def of_all_kinds():
    return {kind: trained(kind, timeout=60.0) for kind in KINDS}


def test_two_ranks_do_what_one_process_does(ranks):
    alone = of_all_kinds()
    for of_rank in ranks(of_all_kinds, 2):
        for kind, (loss, nats, grads) in of_rank.items():
            assert (loss, nats) == alone[kind][:2] and grads
            assert all(same_bits(grad, alone[kind][2][name]) for name, grad in grads.items())


@pytest.mark.parametrize(
    "target", [WORDS, tuple(WORDS), LENGTHS, np.array(LENGTHS), {"words": WORDS}]
)
def test_a_target_without_a_tensor(target):
    def loss_fn(output, part):
        return (output.mean(1) * scales(part)).mean()

    x = torch.randn(ROWS, 5)
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))
    expected = loss_fn(model(x), target)
    pipe = mpcomp.pipeline(model, CHUNKS, split=2, loss_fn=loss_fn)
    assert float(pipe.forward_backward(x, target)) == pytest.approx(expected.item())
    with pytest.raises((TypeError, ValueError), match="target of type"):
        pipe.forward_backward(x[1:], target)
    with pytest.raises((TypeError, ValueError), match="target of type"):
        pipe.evaluate([(x[1:], target)])
