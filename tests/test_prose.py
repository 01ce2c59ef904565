"""Pages in plain words: short sentences and paragraphs, tables that fit the page."""

import re
from typing import NamedTuple

import pytest
from pages import PAGES, name_of


class Figures(NamedTuple):
    """Words of a sentence, mean and 90 % quantile, and of the longest paragraph; columns."""

    mean: float
    quantile: int
    paragraph: int
    columns: int


LIMITS = Figures(20.0, 32, 90, 7)
#: What a command prints into a page; and code, comments and tags, which are not prose.
GENERATED = re.compile(r"<!-- (?:table|text): .*?<!-- end -->", re.DOTALL)
NOT_PROSE = re.compile(r"^```.*?^```|<!--.*?-->|<[^>]+>", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"\s*(?:[*-]|\d+\.)\s")
#: What a sentence ends with, and another begins after.
END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z*(\d])")
#: Words for which the noun itself is better.
VAGUE = re.compile(r"\b(?:that of|those of|of which|whereof)\b", re.IGNORECASE)


def _paragraphs(text: str) -> list[str]:
    """Paragraphs and items of lists; headings, rows of tables, figures and directives are none."""
    found: list[str] = []
    for part in re.split(r"\n\s*\n", NOT_PROSE.sub("", GENERATED.sub("", text))):
        lines = [s for s in part.splitlines() if not s.lstrip().startswith(("|", "#", ":::", "!["))]
        items = re.split(rf"^(?={ITEM.pattern})", "\n".join(lines), flags=re.MULTILINE)
        found += [" ".join(re.sub(rf"\A{ITEM.pattern}", "", item).split()) for item in items]
    return [paragraph for paragraph in found if paragraph]


def _sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph, where code is one word, and a link what it says."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "Code", paragraph))
    return END.split(re.sub(r"(\d)\.(\d)", r"\1,\2", plain))


def figures_of(text: str) -> Figures:
    paragraphs = _paragraphs(text)
    words = sorted(len(s.split()) for p in paragraphs for s in _sentences(p)) or [0]
    rules = re.findall(r"^\|[-|: ]+\|$", GENERATED.sub("", text), re.MULTILINE)
    return Figures(
        mean=sum(words) / len(words),
        quantile=words[int(0.9 * (len(words) - 1))],
        paragraph=max((len(p.split()) for p in paragraphs), default=0),
        columns=max((rule.count("|") - 1 for rule in rules), default=0),
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_in_plain_words(page):
    figures = figures_of(page.read_text())
    over = {
        name: (is_, may)
        for name, is_, may in zip(Figures._fields, figures, LIMITS, strict=True)
        if is_ > may
    }
    assert not over, "shorten sentences, split paragraphs"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_names_what_it_means(page):
    assert not [p for p in _paragraphs(page.read_text()) if VAGUE.search(p)]


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        (
            "# A head of a page\n\nOne two three. Four `five six`\nseven: Eight 9.5.",
            (8 / 3, 3, 9, 0),
        ),
        ("* One.\n* Two [three four](five.md).\n\n1. Six\n   seven.", (2, 2, 3, 0)),
        (
            "```bash\nnone of this.\n```\n<!-- nor this -->\n| a | b |\n|---|---|\n| c | d |\n",
            (0, 0, 0, 2),
        ),
        ("<!-- table: x -->\n| a | b |\n|---|---|\n<!-- end -->\n|---|\n", (0, 0, 0, 1)),
    ],
)
def test_the_figures(text, figures):
    assert figures_of(text) == pytest.approx(figures)
