"""English for the recipes: articles from where they lie, held-out ones apart from the others."""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes.hub import Form, load_splits, looks_like_path

PYTHON_DOCS: Final = "python-docs"
WIKITEXT: Final = "Salesforce/wikitext"
WIKITEXT_CONFIGURATION: Final = "wikitext-2-v1"
FORM: Final = Form(
    columns=("text",),
    splits=("train", "validation", "test"),
    example=WIKITEXT,
    local=PYTHON_DOCS,
)
SUFFIXES: Final = (".txt", ".md", ".py")
# About a tenth. Topics repeat one another: half of, say, every tenth topic is also in others, which
# would make a held-out text of it look easy. Of these, next to nothing is.
HELD_OUT_TOPICS: Final = (
    "binary", "calls", "import", "lambda", "raise", "slicings", "strings", "truth", "typesmapping",
)  # fmt: skip
HELD_OUT_ONE_IN: Final = 10  # articles of text files
NUM_PIECES: Final = 20  # that a lone text file is cut into
_HEADING: Final = re.compile(r" = (?!= ).* = \r?\n")


@dataclass(frozen=True)
class Text:
    """The articles of three splits, and what the text is called in tables."""

    train: list[str]
    validation: list[str]
    test: list[str]
    name: str


def load_text(
    data: str, *, part: tuple[int, int] | None = None, train_limit: int | None = None
) -> Text:
    """Articles, byte for byte as they lie.

    Where the lines of a split have WikiText's headings (` = Title = ` between empty lines), an
    article reaches from one to the next; elsewhere every row, or every text file, is an article.

    Args:
        data: one of

            * a hub name, with the configuration behind a colon (`Salesforce/wikitext` needs none:
              it is that of WikiText-2), or a folder of parquet files of that form;
            * a text file (UTF-8; cut at line ends into 20 pieces of about the same length, unless
              it has headings), a folder with .txt, .md and .py files, or a glob of text files; the
              last tenth of the articles, but at least one, is held out;
            * `python-docs`: the language reference in every CPython; nine topics, a tenth of the
              text, are held out.

            What is held out serves as validation and as test.
        part: (k, n) keeps the k-th (from 1) of n equal parts of the training articles, in their
            order: for pretraining on one and fine-tuning on another.
        train_limit: keeps the first training articles, of the part if there is one.

    Raises:
        ValueError: there is no such text, a split or column is missing, a split is empty, or the
            part does not exist.
    """
    if part is not None and not 1 <= part[0] <= part[1]:
        raise ValueError(f"part is {part[0]} of {part[1]}; pass k of n with k from 1 to n")
    if train_limit is not None and train_limit < 1:
        raise ValueError(f"train_limit is {train_limit}; pass at least 1")
    text = _load(data)
    for split in FORM.splits:
        if not getattr(text, split):
            raise ValueError(
                f"{data} has no text in its {split} split; pass another --data, or "
                f"--data {PYTHON_DOCS}, which needs no download"
            )
    train = text.train
    if part is not None:
        k, n = part
        if len(train) < n:
            raise ValueError(
                f"{data} has {len(train)} training articles, fewer than the {n} parts asked for; "
                "pass fewer parts or more text"
            )
        train = train[len(train) * (k - 1) // n : len(train) * k // n]
    return dataclasses.replace(text, train=train[:train_limit])


def _load(data: str) -> Text:
    if data == PYTHON_DOCS:
        return _python_docs()
    path = Path(data).expanduser()
    if path.is_file():
        return _of_files([path], data, name=path.stem)
    if data and path.is_dir():
        if any(path.rglob("*.parquet")):
            return _of_splits(load_splits(str(path), FORM), data, name=path.resolve().name)
        files = (f for f in path.rglob("*") if f.suffix in SUFFIXES and not _hidden(f, path))
        return _of_files(files, data, name=path.resolve().name)
    if glob.has_magic(data):
        found = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no root
        if not found:
            raise ValueError(
                f"no text files match {data}; pass another --data, or --data {PYTHON_DOCS}, which "
                "needs no download"
            )
        return _of_files(map(Path, found), data, name=data)
    if not data or looks_like_path(data) or path.suffix in SUFFIXES:
        raise ValueError(
            f"there is no file or folder {data}; pass --data a text file, a folder of text or "
            f"parquet files, a hub name as in {WIKITEXT}, or {PYTHON_DOCS}"
        )
    repository, _, configuration = data.partition(":")
    if repository == WIKITEXT:
        configuration = configuration or WIKITEXT_CONFIGURATION
    splits = load_splits(repository, FORM, configuration=configuration or None)
    return _of_splits(splits, data, name=configuration or repository.rpartition("/")[2])


def _python_docs() -> Text:
    from pydoc_data.topics import topics

    held_out = [topics[name] for name in HELD_OUT_TOPICS]
    train = [topics[name] for name in sorted(topics) if name not in HELD_OUT_TOPICS]
    return Text(train, held_out, held_out, PYTHON_DOCS)


def _of_splits(splits: Any, data: str, *, name: str) -> Text:
    def articles(split: str) -> list[str]:
        rows = splits[split]["text"][:]
        if wrong := [row for row in rows if not isinstance(row, str)]:
            raise ValueError(
                f"the column text of {data} holds {type(wrong[0]).__name__}; expected strings"
            )
        return _at_headings(rows) or [row for row in rows if row.strip()]

    return Text(articles("train"), articles("validation"), articles("test"), name)


def _of_files(files: Iterable[Path], data: str, *, name: str) -> Text:
    files = sorted(file for file in files if file.is_file())
    if not files:
        raise ValueError(
            f"{data} has neither parquet files nor text files ({', '.join(SUFFIXES)}); pass "
            f"another --data, or --data {PYTHON_DOCS}, which needs no download"
        )
    articles: list[str] = []
    for file in files:
        text = _read(file)
        lines = text.splitlines(keepends=True)
        whole = [text] if text.strip() else []
        articles += _at_headings(lines) or (_pieces(lines) if len(files) == 1 else whole)
    if len(articles) < 2:
        raise ValueError(
            f"{data} has {len(articles)} articles or pieces of text; at least 2 are needed, to "
            f"hold one out: pass more text, or --data {PYTHON_DOCS}, which needs no download"
        )
    num_held_out = max(1, len(articles) // HELD_OUT_ONE_IN)
    held_out = articles[-num_held_out:]
    return Text(articles[:-num_held_out], held_out, held_out, name)


def _at_headings(lines: Sequence[str]) -> list[str]:
    """The articles of lines with WikiText's top-level headings; none where there is no heading.

    A heading stands between empty lines: ` = Ties , L = ` in a table is none.
    """
    starts = [
        i
        for i, line in enumerate(lines)
        if _HEADING.fullmatch(line)
        and (i == 0 or not lines[i - 1].strip())
        and (i + 1 == len(lines) or not lines[i + 1].strip())
    ]
    if not starts:
        return []
    if any(line.strip() for line in lines[: starts[0]]):
        starts = [0, *starts]  # text before the first heading
    starts[0] = 0  # empty lines before it
    ends = [*starts[1:], len(lines)]
    return ["".join(lines[start:end]) for start, end in zip(starts, ends, strict=True)]


def _pieces(lines: Sequence[str]) -> list[str]:
    """The lines in up to `NUM_PIECES` pieces of about the same length, none without text."""
    size = sum(map(len, lines))
    pieces, begin = [""] * NUM_PIECES, 0
    for line in lines:
        pieces[begin * NUM_PIECES // size] += line
        begin += len(line)
    return [piece for piece in pieces if piece.strip()]


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode()  # read_text would change the line ends
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not text in UTF-8 ({error.reason} at byte {error.start}); convert it, or "
            "pass the folder, if it is a parquet file"
        ) from error


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)
