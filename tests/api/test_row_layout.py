"""Layers of torch's default layout, sequence first: a warning, as microbatches are cut in dim 0."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from ranks import preload
from torch import nn

import mpcomp
import stages

preload("test_row_layout")
WIDTH = 4


class First(nn.Module):
    """The first output of a recurrent or attention layer."""

    def __init__(self, layer, transposes=False):
        super().__init__()
        self.layer, self._transposes = layer, transposes

    def forward(self, x):
        x = x.transpose(0, 1) if self._transposes else x
        given = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        y = self.layer(*given)[0]
        return y.transpose(0, 1) if self._transposes else y


class Attending(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def encoder(**options):
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, **options)


#: Each makes a block with a layer of either layout.
LAYERS = {
    "LSTM": lambda **o: First(nn.LSTM(WIDTH, WIDTH, **o)),
    "GRU": lambda **o: First(nn.GRU(WIDTH, WIDTH, **o)),
    "RNN": lambda **o: First(nn.RNN(WIDTH, WIDTH, **o)),
    "a subclass": lambda **o: Attending(WIDTH, WIDTH, **o),
    "MultiheadAttention": lambda **o: First(nn.MultiheadAttention(WIDTH, 2, **o)),
    "TransformerEncoderLayer": encoder,
    "TransformerEncoder": lambda **o: nn.TransformerEncoder(
        encoder(**o), 2, enable_nested_tensor=False
    ),
    "TransformerDecoderLayer": lambda **o: nn.TransformerDecoderLayer(WIDTH, 2, 8, **o),
    "Transformer": lambda **o: nn.Transformer(WIDTH, 2, 1, 1, 8, **o),
}


def pipe_of(block, **options):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, 3))
    return mpcomp.pipeline(model, 2, split=["0"], loss_fn=loss_of, **options)


def loss_of(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", LAYERS)
def test_sequence_first_is_said_when_the_pipeline_is_built(name):
    with pytest.warns(UserWarning, match=r"^1.*has batch_first=False.*Pass batch_first=True"):
        pipe_of(LAYERS[name]())


@pytest.mark.parametrize("name", LAYERS)
def test_rows_first_is_right_and_nothing_is_said(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = pipe_of(LAYERS[name](batch_first=True))
    if "Decoder" in name or name == "Transformer":
        return  # takes two inputs
    x, y = torch.randn(6, 3, WIDTH), torch.randint(3, (6, 3))
    expected = loss_of(pipe.merge()(x), y).item()
    assert float(pipe.forward_backward(x, y)) == pytest.approx(expected)


def test_who_transposes_has_the_numbers_of_the_plain_model():
    with pytest.warns(UserWarning, match="If the model transposes before this layer"):
        pipe = pipe_of(First(nn.GRU(WIDTH, WIDTH), transposes=True))
    x, y = torch.randn(6, 3, WIDTH), torch.randint(3, (6, 3))
    assert float(pipe.forward_backward(x, y)) == pytest.approx(loss_of(pipe.merge()(x), y).item())


def test_models_of_the_project_are_rows_first():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = stages.LSTMLM(11, hidden=6, num_layers=2, dropout=0.0)
        mpcomp.pipeline(model, 2, split=["layer1"], loss_fn=loss_of)


def told():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe_of(LAYERS["LSTM"](), timeout=60.0)
    return sum("batch_first" in str(each.message) for each in caught)


def test_one_rank_says_it(ranks):
    assert ranks(told, 2) == [1, 0]
