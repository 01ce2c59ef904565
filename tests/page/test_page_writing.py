"""Pages from their templates: one head for all, and data that cannot break out of their place."""

import json
from pathlib import Path

import pytest

from mpcomp.page import write_page

ROOMS = ("mpcomp.plan", "mpcomp.view")
DATA = {"name": "</script><!-- the head of all pages --> /* the parts of all pages */"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_page_is_whole(tmp_path, room):
    page = tmp_path / "page.html"
    write_page(page, room, DATA)
    text = page.read_text(encoding="utf-8")
    for once in ("<!doctype html>", "</head>", "<body>", "</html>", "<title>", "--paper: #14171b"):
        assert text.count(once) == 1, once
    start = text.index('type="application/json">') + len('type="application/json">')
    assert json.JSONDecoder().raw_decode(text[start:])[0] == DATA


def test_all_pages_begin_alike(tmp_path):
    heads = []
    for room in ROOMS:
        page = tmp_path / "page.html"
        write_page(page, room, DATA)
        heads.append(page.read_text(encoding="utf-8").partition("<title>")[0])
    first, second = heads
    assert first == second and "default-src 'none'" in first
    root = Path(__file__).parents[2] / "mpcomp"
    templates = [file.read_text() for file in root.glob("*/page.html")]
    assert len(templates) == len(ROOMS)
    assert not any("<meta" in template for template in templates)
