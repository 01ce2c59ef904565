"""Sources of a pretrained model: on the hub, in a folder, or in a GGUF file."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from recipes.hub import looks_like_path

GGUF: Final = ".gguf"
#: What transformers needs to read one.
GGUF_PACKAGES: Final = ("gguf", "accelerate")


def source_of(name: str, fix: str, *, weights: bool = False) -> tuple[str, Mapping[str, Any]]:
    """The source and keywords that `from_pretrained` of transformers' Auto classes takes.

    Args:
        name: hub name, folder as `save_pretrained` writes it, GGUF file, or folder with one. A
            GGUF file holds the tokenizer too.
        fix: what else to pass, for messages.
        weights: whether weights are to be loaded; those of a GGUF file come out as plain ones.

    Raises:
        ValueError: there is no such file or folder, a folder has several GGUF files, or what reads
            them is not installed.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != GGUF:
            raise ValueError(f"{name} is a file, but not a GGUF file ({GGUF}); {fix}")
        return _gguf(path, weights)
    if path.is_dir():
        # What save_pretrained has written goes first, whatever else lies beside it.
        if any((path / file).exists() for file in ("config.json", "tokenizer_config.json")):
            return str(path), {}
        files = sorted(path.glob(f"*{GGUF}"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(f"the folder {name} has several GGUF files ({names}); pass one")
        return _gguf(files[0], weights) if files else (str(path), {})
    if looks_like_path(name) or path.suffix == GGUF:
        what = "file" if path.suffix == GGUF else "folder"
        raise ValueError(f"there is no {what} {name}; {fix}")
    return name, {}


def _gguf(file: Path, weights: bool) -> tuple[str, Mapping[str, Any]]:
    if missing := [one for one in GGUF_PACKAGES if importlib.util.find_spec(one) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"{file} is a GGUF file, but {' and '.join(missing)} {verb} not installed: "
            f"pip install {' '.join(GGUF_PACKAGES)}"
        )
    options: dict[str, Any] = {"gguf_file": file.name}
    if weights:
        import transformers

        # Since version 5 weights may else stay in the file's blocks, and such a model neither
        # trains nor saves; before, there was no choice, and no name for it.
        if hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return str(file.parent), options
