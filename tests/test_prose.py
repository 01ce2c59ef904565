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
#: Pages that are over a limit, with the figures that they may not exceed either.
CEILINGS = {
    "docs/results/adaptive.md": Figures(19.7, 39, 152, 0),
    "docs/results/cifar10.md": Figures(23.0, 39, 195, 0),
    "docs/results/conef.md": Figures(16.7, 34, 162, 0),
    "docs/results/engine.md": Figures(18.3, 33, 86, 5),
    "docs/results/faults.md": Figures(16.0, 32, 131, 4),
    "docs/results/gpt2_scratch.md": Figures(26.2, 50, 144, 3),
    "docs/results/gpu.md": Figures(15.9, 24, 139, 0),
    "docs/results/index.md": Figures(21.9, 34, 113, 8),
    "docs/results/replicas.md": Figures(20.5, 38, 131, 8),
    "docs/results/replicas_slow_links.md": Figures(36.0, 61, 143, 0),
    "docs/results/sharded.md": Figures(29.9, 51, 132, 7),
    "docs/results/slow_link.md": Figures(15.5, 38, 249, 7),
    "docs/results/smollm2_finetune.md": Figures(23.9, 45, 186, 6),
    "docs/results/smollm2_inference.md": Figures(26.2, 44, 166, 3),
    "docs/results/sorting.md": Figures(18.2, 29, 100, 0),
    "docs/results/time_to_loss.md": Figures(27.8, 51, 251, 0),
    "docs/results/wikitext.md": Figures(20.8, 36, 195, 0),
}

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
    for part in re.split(r"\n\s*\n", NOT_PROSE.sub("", text)):
        lines = [s for s in part.splitlines() if not s.lstrip().startswith(("|", "#", ":::", "!["))]
        items = re.split(rf"^(?={ITEM.pattern})", "\n".join(lines), flags=re.MULTILINE)
        found += [" ".join(ITEM.sub("", item, count=1).split()) for item in items]
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


def _over(figures: Figures, most: Figures) -> list[str]:
    pairs = zip(Figures._fields, figures, most, strict=True)
    return [f"{name} {is_:.4g} > {may}" for name, is_, may in pairs if is_ > may]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_in_plain_words(page):
    most = CEILINGS.get(name_of(page), LIMITS)
    assert not _over(figures_of(page.read_text()), most), "shorten sentences, split paragraphs"


@pytest.mark.parametrize("page", [p for p in PAGES if name_of(p) not in CEILINGS], ids=name_of)
def test_a_page_names_what_it_means(page):
    paragraphs = _paragraphs(page.read_text())
    assert not [p for p in paragraphs if VAGUE.search(p)]


def test_a_page_within_the_limits_has_no_ceiling():
    """Pages of results may stay in the list while they are rewritten."""
    pages = [page for page in PAGES if name_of(page) in CEILINGS and page.parent.name != "results"]
    assert all(_over(figures_of(page.read_text()), LIMITS) for page in pages)


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
