"""The pages: links lead somewhere, commands parse, the generated table is what the code says."""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import GUIDES, PAGES, ROOT, commands_of, name_of
from torch import nn

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", head.lower()).strip() for head in heads]
    return {re.sub(r" ", "-", head) for head in plain} | {re.sub(r"[ -]+", "-", h) for h in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in _anchors(target), f"{name_of(page)} links to {link}"


class _Parsed(Exception):
    """The program's own parser has taken the arguments; what it would do then is another test's."""


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=f"{page.stem}: {line[:50]}")
        for page in GUIDES
        for line in commands_of(page)
    ],
)
def test_commands_parse(line, monkeypatch):
    words = shlex.split(line, comments=True)
    ours = [i for i, word in enumerate(words) if word == "mpcomp" or word.startswith("recipes.")]
    if not ours:
        return
    module, arguments = words[ours[0]], words[ours[0] + 1 :]
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(_Parsed):
        runpy.run_module(module, run_name="__main__", alter_sys=False)


def test_the_table_of_methods_is_the_registrys():
    """In a process of its own: other tests register methods of theirs."""
    page = ROOT / "docs" / "methods" / "registry.md"
    program = "from recipes.bench import method_table; print(method_table.page(), end='')"
    made = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert page.read_text() == made.stdout, "run python -m recipes.bench.method_table"


def test_the_gpt_of_ones_own_trains():
    """The page's code, given a small GPT whose head is its embedding."""
    page = (ROOT / "docs" / "guide" / "own_gpt.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embedding.weight
    text = torch.randint(0, 16, (8, 7), generator=torch.Generator().manual_seed(0))
    names = {
        "embedding": embedding,
        "blocks": [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2)],
        "head": head,
        "loader": [(text[:, :-1], text[:, 1:])] * 20,
    }
    exec(compile(code.replace("6e-4", "1e-2"), "own_gpt.md", "exec"), names)
    pipe = names["pipe"]
    assert 0 < pipe.wire_bytes < pipe.dense_bytes
    first = nn.functional.cross_entropy(torch.zeros(1, 16), torch.zeros(1, dtype=torch.long))
    assert names["loss"] < first
