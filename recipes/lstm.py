"""An LSTM language model with what the text recipe asks of models of transformers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save_file

import stages
from recipes.run_folder import write_json


@dataclass(kw_only=True)
class LSTMConfig:
    """The sizes of an LSTM, under transformers' names where it has them.

    An LSTM takes no attention mask, and needs none: padding comes after the text, where nothing
    before it can see it, and has no labels.
    """

    model_type: ClassVar[str] = "lstm"
    is_encoder_decoder: ClassVar[bool] = False
    takes_mask: ClassVar[bool] = False

    hidden_size: int = 1500
    num_hidden_layers: int = 2
    dropout: float = 0.5
    vocab_size: int | None = None  # of the tokenizer, once there is one
    bos_token_id: int | None = None
    eos_token_id: int | None = None


class TextLSTM(stages.LSTMLM):
    """`stages.LSTMLM` with a configuration, which it is saved with.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, config: LSTMConfig) -> None:
        assert config.vocab_size is not None
        super().__init__(
            config.vocab_size,
            hidden=config.hidden_size,
            num_layers=config.num_hidden_layers,
            dropout=config.dropout,
        )
        self.config = config

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes config.json and model.safetensors, as models of transformers do."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        sizes: dict[str, Any] = dataclasses.asdict(self.config)
        write_json(path / "config.json", {"model_type": self.config.model_type, **sizes})
        weights = {name: value.cpu().contiguous() for name, value in self.state_dict().items()}
        save_file(weights, path / "model.safetensors")
