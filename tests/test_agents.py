"""What is there for agents: one screen of rules, skills, and Markdown twins of the site's pages."""

import re
import runpy

import pytest
import yaml
from pages import PAGES, ROOT, SKILLS, commands_of, name_of

import mpcomp

HOOK = ROOT / "docs" / "hooks" / "llms.py"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
LINES_OF_A_SCREEN = 60


def test_the_rules_are_one_screen():
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= LINES_OF_A_SCREEN


@pytest.mark.parametrize("skill", SKILLS, ids=name_of)
def test_a_skill_says_its_name_and_when_to_use_it(skill):
    _, front, body = skill.read_text().split("---\n", 2)
    about = yaml.safe_load(front)
    assert about.keys() == {"name", "description"} and about["name"] == skill.parent.name
    assert "Use it when" in about["description"] and len(about["description"]) <= 1024
    assert body.strip().startswith("# ")
    assert any("mpcomp" in line for line in commands_of(skill))


def test_the_skills_that_the_rules_name_are_there():
    named = re.findall(r"\((\.agents/\S+?)\)", (ROOT / "AGENTS.md").read_text())
    assert sorted(ROOT / path for path in named) == SKILLS and len(SKILLS) >= 2


def test_a_report_has_the_keys_that_the_skill_names():
    (skill,) = (path for path in SKILLS if path.parent.name == "read-a-report")
    cells = re.findall(r"^\| [^|]+\? \| ([^|]+) \|", skill.read_text(), re.MULTILINE)
    named = {key.partition(".")[0] for cell in cells for key in re.findall(r"`([\w.]+)`", cell)}
    page = (ROOT / "docs" / "guide" / "command_line.md").read_text()
    (row,) = re.findall(r"^\| a run \| (.*) \|$", page, re.MULTILINE)
    assert len(named) > 10 and named <= set(re.findall(r"`(\w+)`", row))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site's folder, with what the hook writes."""
    folder = tmp_path_factory.mktemp("site")
    hook = runpy.run_path(str(HOOK))
    assert CONFIG["hooks"] == [name_of(HOOK)] and CONFIG["exclude_docs"] == "hooks/"
    hook["on_post_build"]({**CONFIG, "docs_dir": ROOT / "docs", "site_dir": folder})
    return folder


def test_each_page_has_a_twin_and_a_line(site):
    listed = re.findall(r"^- \[(.+?)\]\((\S+)\): (.+)$", (site / "llms.txt").read_text(), re.M)
    sources = {str(p.relative_to(ROOT / "docs")) for p in PAGES if (ROOT / "docs") in p.parents}
    assert {path for _, path, _ in listed} == sources
    assert len(listed) == len(sources)
    for title, path, first in listed:
        text = (site / path).read_text()
        assert f"# {title}\n" in text and len(first) > 10, path
        if "\n::: " not in (ROOT / "docs" / path).read_text():
            assert text == (ROOT / "docs" / path).read_text()


def test_the_list_begins_as_such_lists_do(site):
    head = (site / "llms.txt").read_text().split("\n\n")
    assert head[0] == "# mpcomp" and head[1] == f"> {CONFIG['site_description']}"
    assert [line for line in head if line.startswith("## ")][:3] == [
        "## Home",
        "## Start",
        "## Guide",
    ]


def test_what_mkdocstrings_renders_is_in_the_twins(site):
    text = "".join(path.read_text() for path in (site / "api").glob("*.md"))
    assert "\n::: " not in text and "options:" not in text
    for name in ("pipeline", "TensorMeta", "RunLog"):
        doc = (getattr(mpcomp, name).__doc__ or "").splitlines()[0]
        assert f"`{name}(" in text and doc in text
