"""Pages of results: their tables are what the studies and benches print, their links exist."""

import json
import re
from pathlib import Path

import pytest

from recipes.lab import results_pages, show

PAGES = sorted(results_pages.PAGES.glob("*.md"))
FILES = {path.name for path in results_pages.PAGES.iterdir() if path.suffix in (".json", ".jsonl")}

# No command prints a table of it: its page has one, which is held to it below.
BY_HAND = "replica_lm.jsonl"
# The form of a plan shows it (`recipes.lab.plan_form`).
OF_THE_FORM = "plan_coding.json"
COMMANDS = (results_pages.BLOCK, results_pages.FIGURE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_as_its_commands_print_it(page):
    text = page.read_text()
    assert results_pages.filled(text) == text, "run python -m recipes.lab.results_pages"


def test_every_file_of_results_is_on_a_page():
    commands = [
        match["command"]
        for page in PAGES
        for pattern in COMMANDS
        for match in pattern.finditer(page.read_text())
    ]
    shown = {Path(word).name for command in commands for word in command.split()}
    assert FILES - shown == {BY_HAND, OF_THE_FORM}


def test_the_table_by_hand_is_that_of_its_file():
    page = (results_pages.PAGES / "replicas.md").read_text()
    lines = (results_pages.PAGES / BY_HAND).read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    dense = runs[0]["replicas"]
    for run in runs:
        own = run["replicas"]
        times = run["dense_bytes"] / run["wire_bytes"]
        ratios = (
            *(times, times / 2, dense["floats"] / own["floats"]),
            own["dense_traffic_bytes"] / own["traffic_bytes"],
        )
        cells = (f"`{run['dp_comp']}`", f"{run['perplexity']:.1f}", *(f"{x:.1f}" for x in ratios))
        assert f"| {' | '.join(cells)} |" in page


def test_every_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            name, _, heading = target.partition("#")
            file = page if not name else page.parent / name
            assert file.exists(), f"{page.name}: {target}"
            if heading:
                titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
                assert heading in map(slug, titles), f"{page.name}: {target}"


def slug(title):
    """The anchor of a heading, as forges and mkdocs make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def test_numbers_of_the_index_are_those_of_the_pages():
    index = (results_pages.PAGES / "index.md").read_text()
    page, checked = "", 0
    for line in index.splitlines():
        if not line.startswith("| ") or line.startswith("| task"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if link := re.search(r"\]\((\w+\.md)\)", cells[0]):
            page = (results_pages.PAGES / link[1]).read_text()
        said = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", "", " ".join(cells[2:]))
        for number in re.findall(r"\d+(?:\.\d+)?", said):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", page), (line, number)
            checked += 1
    assert checked > 50


def test_a_change_of_the_results_would_be_seen():
    page = (results_pages.PAGES / "sorting.md").read_text()
    assert "98.63" in page
    assert results_pages.filled(page.replace("98.63 ± 0.20 |", "99.63 ± 0.20 |")) == page


def test_tables_in_plain_text_become_markdown():
    text = (
        "a title\n"
        "row          n  of what\n"
        "---------  ---  ---------\n"
        "one, two     3  1 +- 2\n"
        "three       10\n"
        "Differences are paired.\n"
        "They go\n"
        "  on here\n"
    )
    assert results_pages.as_markdown(text) == (
        "a title\n"
        "\n"
        "| row | n | of what |\n"
        "| --- | --- | --- |\n"
        "| one, two | 3 | 1 ± 2 |\n"
        "| three | 10 |  |\n"
        "\n"
        "Differences are paired.<br>\n"
        "They go\n"
        "  on here"
    )


def test_tables_in_markdown_lose_their_padding():
    text = "| a   | b   |\n|:----|----:|\n| 1   |     |\n\na note\n"
    assert results_pages.as_markdown(text) == "| a | b |\n| --- | --- |\n| 1 |  |\n\na note"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: recipes.lab.sorting_study --table -->\n", "ends with <!-- end -->"),
        ("<!-- table: os.path x -->\n<!-- end -->\n", "command of the recipes"),
        ("<!-- table: recipes.nothing x -->\n<!-- end -->\n", "no such recipe"),
        (
            "<!-- text: recipes.lab.show docs/results/no.json -->\n<!-- end -->\n",
            "No such file",
        ),
    ],
)
def test_a_page_with_a_mistake(page, message):
    with pytest.raises(ValueError, match=message):
        results_pages.filled(page)


def test_check_names_the_pages_that_differ(tmp_path, capsys):
    page = tmp_path / "page.md"
    command = "recipes.lab.show docs/results/multi_level.json"
    page.write_text(f"<!-- text: {command} -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match=r"page\.md"):
        results_pages.main(["--check", str(page)])
    assert "RedSync" not in page.read_text()
    results_pages.main([str(page)])
    assert "RedSync" in page.read_text()
    results_pages.main(["--check", str(page)])
    assert "nothing differed" in capsys.readouterr().out


def test_figures_are_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    command = "recipes.lab.show docs/results/slow_link_auto.json --plot drawn.png"
    page.write_text(f"<!-- figure: {command} -->\n")
    results_pages.main(["--figures", str(page)])
    assert (tmp_path / "drawn.png").stat().st_size > 1000


def test_options_of_show_for_other_files(capsys):
    results = results_pages.PAGES
    with pytest.raises(SystemExit, match="--by-rate is for"):
        show.main([str(results / "multi_level.json"), "--by-rate"])
    with pytest.raises(SystemExit, match="--plot is for"):
        show.main([str(results / "multi_level.json"), "--plot", "x.png"])
    with pytest.raises(SystemExit):
        show.main([str(results / "slow_link.json")] * 2 + ["--plot", "x.png"])
    assert "give one" in capsys.readouterr().err
