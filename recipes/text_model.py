"""The language models of the text recipe: loaded, or made anew, perhaps with adapters."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from safetensors.torch import save_file
from torch import nn

import stages
from recipes.hub import cache_only_if_unreachable, first_line
from recipes.pretrained import source_of
from recipes.run_folder import write_json
from recipes.text_config import AUTO_SPLIT, LSTM, TextConfig

# Embeddings of a new model are as many as its tokens, rounded up to this.
VOCAB_MULTIPLE: Final = 64
NO_DROPOUT: Final = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
#: What new models of transformers have otherwise than GPT-2.
ARCHITECTURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, **NO_DROPOUT},
    "small": {"n_layer": 8, "n_embd": 128, "n_head": 4, "n_positions": 256, **NO_DROPOUT},
    "gpt2": {},
}


def model_config(config: TextConfig) -> Any:
    """The configuration of a run's model, as of transformers; a new one has no vocabulary yet.

    Raises:
        ValueError: there is no such model, it is no causal language model, or it has fewer
            positions than a block has tokens.
    """
    from transformers import AutoConfig

    if config.lora is not None and importlib.util.find_spec("peft") is None:
        raise ValueError(f"lora is {config.lora}, but peft is not installed: pip install peft")
    chosen = _new_config(config) if config.is_new else _load(AutoConfig, config.model)
    if chosen.is_encoder_decoder:
        raise ValueError(
            f"the model {config.model} is an encoder-decoder ({chosen.model_type}); pass --model a "
            "causal language model"
        )
    positions = getattr(chosen, "max_position_embeddings", None)
    if positions is not None and config.seq_len > positions:
        raise ValueError(
            f"seq_len is {config.seq_len}, but the model {config.model} has {positions} positions; "
            f"pass --seq-len {positions} or less"
        )
    return chosen


def make_model(config: TextConfig, tokenizer: Any) -> nn.Module:
    """The model to train, in fp32 on the CPU; a new one is a function of the seed alone.

    Raises:
        ValueError: it cannot be loaded, or it cannot have adapters.
    """
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):  # leave the caller's random state alone
        torch.manual_seed(config.seed)
        if config.is_new:
            chosen = model_config(config)
            chosen.vocab_size = -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
            chosen.bos_token_id = chosen.eos_token_id = tokenizer.eos_token_id
            model: nn.Module = (TextLSTM if config.model == LSTM else GPT2LMHeadModel)(chosen)
        else:
            model = _load(AutoModelForCausalLM, config.model, weights=True).float()
        if config.untie:
            _untie(model)
        return model if config.lora is None else _with_adapters(model, config.lora)


def split_of(config: TextConfig, chosen: Any) -> str:
    """Cut of the model: as the configuration says, or as suits it."""
    if config.split != AUTO_SPLIT:
        return config.split
    if chosen.model_type == "gpt2" and chosen.num_hidden_layers % 4 == 0:
        return "paper"
    return "paper" if chosen.model_type == LSTM else "4"


def _new_config(config: TextConfig) -> Any:
    """The configuration of a model with random weights."""
    from transformers import GPT2Config

    if config.model != LSTM:
        return GPT2Config(**ARCHITECTURES[config.model])
    return LSTMConfig() if config.hidden is None else LSTMConfig(hidden_size=config.hidden)


def _untie(model: nn.Module) -> None:
    """Gives the output layer a copy of the weights that it shares with the embedding, if it does.

    Then no gradient crosses the whole pipeline, and weights can change within a call.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return  # an LSTM's are never shared
    model.config.tie_word_embeddings = False  # for whoever loads it
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if output.weight is embedding.weight:
        output.weight = nn.Parameter(output.weight.detach().clone())


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    # GPT-2's matrices are transposed.
    transposed = model.config.model_type == "gpt2"  # type: ignore[union-attr]
    lora = LoraConfig(r=rank, task_type=TaskType.CAUSAL_LM, fan_in_fan_out=transposed)
    return get_peft_model(model, lora)


def _load(source: Any, name: str, *, weights: bool = False) -> Any:
    """The object that an Auto class of transformers loads from the hub, a folder or a GGUF file."""
    fix = "pass --model a folder that save_pretrained has written, or tiny, which needs no download"
    where, options = source_of(name, fix, weights=weights)
    try:
        with cache_only_if_unreachable(where, "model"):
            return source.from_pretrained(where, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the model {name} ({first_line(error)}); {fix}") from error


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
