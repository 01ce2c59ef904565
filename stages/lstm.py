"""LSTM language models as plain chains, to be cut after the embedding or any layer.

W. Zaremba, I. Sutskever and O. Vinyals, Recurrent Neural Network Regularization, 2014: dropout on
what goes from layer to layer, none on what goes from token to token. Every block gives one tensor:

    input_ids [B, S] -> embedding -> layer1 -> layer2 -> head -> logits [B, S, V]
                                 ^ [B, S, D] ^        ^

The hidden state is zero where a row of `input_ids` begins, and is given to nobody at its end.
Truncated backpropagation through time, which carries it on to the next batch, would need
batches in the order of the text, and each row in the microbatch of its predecessor: a pipeline's
batches are shuffled, and its microbatches are under way at the same time.

Shape suffixes: B batch, S sequence, D hidden units, V vocabulary.
"""

from collections import OrderedDict
from typing import Final

from torch import Tensor, nn

#: Embedding and head begin uniform within this; layers as `nn.LSTM` has it.
_INIT_RANGE: Final = 0.1


class TokenEmbedding(nn.Module):
    """Tokens [B, S] to [B, S, D], with dropout."""

    def __init__(self, vocab_size: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.dropout = nn.Dropout(dropout)

    # Named as language models of transformers have it: a batch may be {"input_ids": ...}.
    def forward(self, input_ids: Tensor) -> Tensor:
        x_BSD: Tensor = self.dropout(self.embedding(input_ids))
        return x_BSD


class LSTMLayer(nn.Module):
    """One layer, from zero state, with dropout on its output: [B, S, D] -> [B, S, D].

    Dropout stands here and not before the next layer: what it zeroes is not worth sending.
    """

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        # The last state stays here: one tensor crosses a cut. nn.LSTM gives a transposed view.
        y_BSD: Tensor = self.dropout(self.lstm(x_BSD)[0].contiguous())
        return y_BSD


class LSTMLM(nn.Sequential):
    """embedding, layer1 to layerL, head: `input_ids` [B, S] -> logits [B, S, V].

    Args:
        vocab_size: number of tokens.
        hidden: units of a layer, and size of an embedding.
        num_layers: LSTM layers.
        dropout: probability, on the output of the embedding and of each layer. Zaremba et al. have
            0.5 with 650 units and 0.65 with 1500.
        tie: give the head the embedding's weight. Cut apart, the two become equal copies, whose
            gradients whoever trains adds up (`stages.ties`).

    Attributes:
        paper_cut: after each layer: as many stages as there are layers, and one for the head, which
            with a large vocabulary computes more than a layer. The embedding computes nothing.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        hidden: int = 1500,
        num_layers: int = 2,
        dropout: float = 0.5,
        tie: bool = False,
    ) -> None:
        for name, value in (
            ("vocab_size", vocab_size),
            ("hidden", hidden),
            ("num_layers", num_layers),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; pass 1 or more")
        embed = TokenEmbedding(vocab_size, hidden, dropout)
        head = nn.Linear(hidden, vocab_size)
        for weight in (embed.embedding.weight, head.weight):
            nn.init.uniform_(weight, -_INIT_RANGE, _INIT_RANGE)
        nn.init.zeros_(head.bias)
        if tie:
            head.weight = embed.embedding.weight
        layers = {f"layer{i}": LSTMLayer(hidden, dropout) for i in range(1, num_layers + 1)}
        super().__init__(OrderedDict(embedding=embed, **layers, head=head))
        self.paper_cut = tuple(layers)


def lstm_lm(
    vocab_size: int,
    *,
    hidden: int = 1500,
    num_layers: int = 2,
    dropout: float = 0.5,
    tie: bool = False,
) -> LSTMLM:
    """LSTM language model, a function of torch's seed alone; for arguments see `LSTMLM`.

    The model of GraVAC, `lstm_lm(10_000)` for the Penn Treebank: 66,034,000 parameters, 252 MiB.
    """
    return LSTMLM(vocab_size, hidden=hidden, num_layers=num_layers, dropout=dropout, tie=tie)
