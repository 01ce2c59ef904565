"""Models by name: known sizes that need no download, folders, and functions of one's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stages
from mpcomp.command.model_config import model_of
from mpcomp.core.loss import CausalLMLoss
from mpcomp.core.spec import closest

__all__ = ["Candidate", "candidate", "function_named"]

IMAGES: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "resnet18": stages.resnet18,
    "resnet34": stages.resnet34,
    "resnet50": stages.resnet50,
    "resnet101": stages.resnet101,
    "vgg16": stages.vgg16,
    "wide_resnet": stages.wide_resnet,
}
#: Sizes of GPT-2; other architectures have that of transformers' default configuration.
GPT2: Final[Mapping[str, Mapping[str, int]]] = {
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
}
#: Images of CIFAR.
IMAGE_SHAPE: Final = (3, 32, 32)
IMAGE_CLASSES: Final = 10


@dataclass(frozen=True)
class Candidate:
    """A model that may be trained, and what a microbatch of it is.

    Attributes:
        model: perhaps on the meta device.
        sample: a microbatch.
        loss: of the model's output for it, 0-d.
        task: in `mpcomp.plan.known_quality.TASKS`.
        described: in words.
    """

    model: nn.Module
    sample: Any
    loss: Callable[[Tensor], Tensor]
    task: str
    described: str


def candidate(name: str, *, rows: int, seq_len: int, config: Mapping[str, str]) -> Candidate:
    """The model of that name.

    Args:
        name: of an image model or an architecture of transformers, a folder that
            ``save_pretrained`` has written, or ``module:function`` (``file.py:function``), a
            function of the number of rows that gives a model and a microbatch.
        rows: of a microbatch.
        seq_len: tokens of a row of text.
        config: entries of a language model's configuration that are to differ, as text.

    Raises:
        ValueError: there is no such model, it is no causal language model, an entry does not fit
            it, or it has fewer positions.
    """
    generator = torch.Generator().manual_seed(0)
    if ":" in name:
        return _own(name, rows)
    if name in IMAGES:
        if config:
            raise ValueError(f"--config is for language models; {name} has none")
        images = torch.randn(rows, *IMAGE_SHAPE, generator=generator)
        labels = torch.randint(IMAGE_CLASSES, (rows,), generator=generator)
        loss = partial(_classes, labels=labels)
        return Candidate(IMAGES[name](), images, loss, "images", f"{name}, images of 3 x 32 x 32")
    model, task = _language_model(name, config)
    settings: Any = model.config
    positions = getattr(settings, "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise ValueError(
            f"--seq-len {seq_len}: {name} has {positions} positions; pass that, or less, or more "
            f"of them with --config max_position_embeddings={seq_len}"
        )
    tokens = torch.randint(settings.vocab_size, (rows, seq_len), generator=generator)
    loss = partial(CausalLMLoss(), labels=tokens)
    return Candidate(model, {"input_ids": tokens}, loss, task, f"{name}, {seq_len} tokens a row")


def _classes(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), labels)


def _language_model(name: str, config: Mapping[str, str]) -> tuple[nn.Module, str]:
    """The model and its task: with its weights from a folder, on the meta device from a name."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if Path(name).is_dir():
        if config:
            raise ValueError("--config is for models without weights; a folder's are what they are")
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            name, local_files_only=True, dtype=torch.float32
        )
        return model, "finetune"
    architecture = "gpt2" if name in GPT2 else name
    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if architecture not in known:
        raise ValueError(
            f"no model {name!r}{closest(name, [*IMAGES, *GPT2, *known])}: expected one of "
            f"{', '.join([*IMAGES, 'gpt2', *GPT2])}, an architecture of transformers (llama, "
            "qwen2, ...), a folder with a model, or module:function"
        )
    return model_of(architecture, GPT2.get(name, {}), config), "scratch"


def function_named(name: str) -> Callable[..., Any]:
    """The function ``module:function`` or ``file.py:function``.

    Raises:
        ValueError: there is none.
    """
    where, _, function = name.rpartition(":")
    if where.endswith(".py"):
        # A name that no module has: one that is imported already keeps its place.
        spec = importlib.util.spec_from_file_location(f"_mpcomp_plan.{Path(where).stem}", where)
        if not Path(where).is_file() or spec is None or spec.loader is None:
            raise ValueError(f"{name}: there is no file {where}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # as dataclasses in it need
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"{name}: {error}; pass module:function or file.py:function") from None
    make = getattr(module, function, None)
    if not callable(make):
        raise ValueError(f"{name}: {where} has no function {function}")
    return cast(Callable[..., Any], make)


def _own(name: str, rows: int) -> Candidate:
    """The model of a function ``module:function``."""
    made = function_named(name)(rows)
    if not (isinstance(made, Sequence) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(f"{name} gave a {type(made).__name__}: expected (model, microbatch)")
    model, sample = made
    return Candidate(model, sample, _mean_square, "scratch", name)


def _mean_square(output: Tensor) -> Tensor:
    """A loss of any output: its gradient is everywhere, and depends on the output."""
    return output.float().square().mean()
