"""Data sets and tokenizers from a folder or from the Hugging Face hub, with errors that help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Form:
    """The columns and splits of a data set, and what a recipe suggests where it is not there."""

    columns: tuple[str, ...]
    splits: tuple[str, ...]
    example: str  # a hub name of this form
    local: str  # the value of --data that needs no download


def load_splits(data: str, form: Form, *, configuration: str | None = None) -> Mapping[str, Any]:
    """The splits of a folder of parquet files, or of a data set on the hub.

    Raises:
        ValueError: there is no such data, or it has other splits or columns.
    """
    import datasets

    noun = "column" if len(form.columns) == 1 else "columns"
    source = f"a folder of parquet files with the {noun} {_listed(form.columns)}"
    if looks_like_path(data) and not Path(data).is_dir():
        raise ValueError(
            f"there is no folder {data}; pass --data {source}, a hub name as in {form.example}, or "
            f"{form.local}"
        )
    try:
        with cache_only_if_unreachable(data, "dataset"):
            splits: Mapping[str, Any] = datasets.load_dataset(data, configuration)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot load the data set {data} ({first_line(error)}); pass --data {form.local}, "
            f"which needs no download, or --data {source}"
        ) from error
    for name in form.splits:
        if name not in splits:
            files = [f"{split}-*.parquet" for split in form.splits]
            raise ValueError(
                f"{data} has the splits {sorted(splits)}; expected {_listed(form.splits)}: name "
                f"the parquet files {_listed(files)}"
            )
        found = splits[name].column_names
        if missing := [column for column in form.columns if column not in found]:
            raise ValueError(
                f"{data} has the columns {found}, without {missing}; expected "
                f"{list(form.columns)}: rename them, or pass another --data"
            )
    return splits


def looks_like_path(name: str) -> bool:
    """Whether a name can only be meant as a file or folder: hub names have at most one slash."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


@contextmanager
def cache_only_if_unreachable(name: str, kind: str) -> Iterator[None]:
    """Within this context the hub's client looks only into its cache, if the hub does not answer.

    Without a network it would try for half a minute first. A folder needs no hub.

    Args:
        name: of a repository on the hub, or a folder.
        kind: "dataset" or "model".
    """
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    if not Path(name).is_dir():
        constants.HF_HUB_OFFLINE = offline or not _answers(name, kind)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


def _answers(name: str, kind: str) -> bool:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=10)
    except HfHubHTTPError:
        return True  # it answered, if only to say no: let the loader report that
    except Exception:  # which connection errors there are depends on the client's HTTP library
        return False
    return True


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _listed(names: tuple[str, ...] | list[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
