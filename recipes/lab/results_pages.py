"""Tables of the pages in ``docs/results``, made from the results that lie beside them.

    python -m recipes.lab.results_pages              # fills the pages
    python -m recipes.lab.results_pages --check      # says which pages are not what it would make
    python -m recipes.lab.results_pages --figures    # draws the pictures as well

A page says by which command a table is made, and the study or bench prints it; here it is only put
into the page, as Markdown or, with ``text``, as it was printed:

    <!-- table: recipes.lab.conef_study --table --out docs/results/conef_study_adam.jsonl -->
    <!-- end -->

    <!-- text: recipes.lab.show docs/results/generation.json -->
    <!-- end -->

    <!-- figure: recipes.lab.rate_quality docs/results/some.jsonl --plot docs/results/some.png -->
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = ROOT / "docs" / "results"

# Files in a command are named from here, from wherever it is given.
RESULTS: Final = "docs/results/"
END: Final = "<!-- end -->"
BLOCK: Final = re.compile(
    r"^(?P<mark><!-- (?P<kind>table|text): (?P<command>.+?) -->)\n(?P<inside>.*?)^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
OPENED: Final = re.compile(r"^<!-- (?:table|text): ", re.MULTILINE)
FIGURE: Final = re.compile(r"^<!-- figure: (?P<command>.+?) -->$", re.MULTILINE)

# The line below the titles of a table that tabulate has printed.
RULER: Final = re.compile(r"-+(?:  -+)+")
BORDER: Final = re.compile(r":?-+:?")


def main(argv: Sequence[str] | None = None) -> None:
    """Fills the pages, or says which are not as they would be."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.results_pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pages", type=Path, nargs="*", metavar="PAGE", help="some pages only (.md)")
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    parser.add_argument("--figures", action="store_true", help="draw the pictures, too")
    options = parser.parse_args(argv)
    if options.check and options.figures:
        parser.error("--check compares tables: give --figures without it")
    changed = []
    try:
        for path in options.pages or sorted(PAGES.glob("*.md")):
            before = path.read_text()
            after = filled(before)
            if options.figures:
                for command in FIGURE.findall(before):
                    printed(command)
            if after != before:
                changed.append(path.name)
                if not options.check:
                    path.write_text(after)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    if options.check and changed:
        sys.exit(
            f"not what python -m recipes.lab.results_pages makes: {', '.join(changed)}; run it, "
            "look at what differs, and commit it"
        )
    print(f"filled: {', '.join(changed) or 'nothing differed'}")


def filled(page: str) -> str:
    """The page with what its commands print now.

    Args:
        page: Markdown.

    Raises:
        ValueError: a block has no end, or its command is none of the recipes', or fails.
    """
    if len(OPENED.findall(page)) != len(BLOCK.findall(page)):
        raise ValueError(f"each block of a page begins with <!-- ... --> and ends with {END}")

    def fill(block: re.Match[str]) -> str:
        shown = KINDS[block["kind"]](printed(block["command"]))
        return f"{block['mark']}\n\n{shown}\n\n{END}"

    return BLOCK.sub(fill, page)


def printed(command: str) -> str:
    """The output of a recipe's command, which runs in this process.

    Args:
        command: module and arguments; files in ``docs/results/`` are those of this checkout.

    Raises:
        ValueError: it is none of the recipes', or fails.
    """
    module, *words = shlex.split(command)
    if not module.startswith("recipes."):
        raise ValueError(f"{module}: a page is filled by a command of the recipes, recipes.NAME")
    arguments = [str(ROOT / word) if word.startswith(RESULTS) else word for word in words]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            importlib.import_module(module).main(arguments)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ValueError(f"{module}: there is no such recipe") from error
    except SystemExit as error:
        if error.code:
            raise ValueError(f"python -m {command}: {error.code}") from error
    return said.getvalue()


def as_markdown(text: str) -> str:
    """Printed tables as tables of Markdown, with the lines before and between them.

    Args:
        text: with tables in tabulate's plain format, or in Markdown, which only loses its padding.
    """
    parts: list[tuple[bool, list[str]]] = []  # (whether it is a table, its lines)

    def add(is_table: bool, lines: Iterable[str]) -> None:
        if parts and parts[-1][0] == is_table:
            parts[-1][1].extend(lines)
        else:
            parts.append((is_table, list(lines)))

    lines = [line.rstrip() for line in text.splitlines()]
    at = 0
    while at < len(lines):
        line = lines[at]
        if at + 1 < len(lines) and RULER.fullmatch(lines[at + 1]):
            starts = [column.start() for column in re.finditer("-+", lines[at + 1])]
            end = at + 2
            while end < len(lines) and _is_row(lines[end], starts):
                end += 1
            titles, *rows = (_cut(one, starts) for one in (line, *lines[at + 2 : end]))
            add(True, map(_row, (titles, ["---"] * len(titles), *rows)))
            at = end
            continue
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            add(True, [_row(["---" if BORDER.fullmatch(cell) else cell for cell in cells])])
        else:
            add(False, [line])
        at += 1
    shown = ("\n".join(own) if is_table else _paragraphs(own) for is_table, own in parts)
    return "\n\n".join(part for part in shown if part)


def as_text(text: str) -> str:
    """Output as it was printed, in a fence."""
    return f"```text\n{text.strip()}\n```"


KINDS: Final[Mapping[str, Callable[[str], str]]] = {"table": as_markdown, "text": as_text}


def _is_row(line: str, starts: Sequence[int]) -> bool:
    """Whether a line has nothing between the columns that begin at `starts`."""
    return bool(line) and not any(line[start - 2 : start].strip() for start in starts[1:])


def _cut(line: str, starts: Sequence[int]) -> list[str]:
    ends = [*starts[1:], None]
    return [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("+-", "±")


def _paragraphs(lines: Sequence[str]) -> str:
    """Paragraphs whose lines stay apart, but for those that are indented to go on."""
    text = "\n".join(lines).strip("\n").replace("+-", "±")
    return re.sub(r"(?<!\n)\n(?!\n| )", "<br>\n", text)


if __name__ == "__main__":
    main()
