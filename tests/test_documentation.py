"""The pages: links lead somewhere, commands parse, the generated table is what the code says."""

import argparse
import json
import math
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from pages import GUIDES, PAGES, ROOT, commands_of, name_of
from torch import nn

import mpcomp
from mpcomp import hf

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
#: What mkdocstrings renders in this place; its anchor is the same path.
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text())
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", head.lower()).strip() for head in heads]
    anchors = {re.sub(r" ", "-", head) for head in plain} | {
        re.sub(r"[ -]+", "-", h) for h in plain
    }
    return anchors | set(DIRECTIVE.findall(text))


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
        for page in [*GUIDES, ROOT / "AGENTS.md"]
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


#: Prints the generated page, and of each registered method path, docstring and base classes.
REGISTRY = """
import inspect, json
from mpcomp.core.spec import SpecValue, registered
from recipes.bench import method_table
methods = {
    f"{cls.__module__}.{cls.__qualname__}": [
        inspect.getdoc(cls), [base.__name__ for base in cls.__mro__]
    ]
    for cls in registered(SpecValue)
}
print(json.dumps({"page": method_table.page(), "methods": methods}))
"""


@pytest.fixture(scope="module")
def registry():
    """The registry of a process of its own: other tests register methods of theirs."""
    made = subprocess.run(
        [sys.executable, "-c", REGISTRY], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return json.loads(made.stdout)


def test_the_table_of_methods_is_the_registrys(registry):
    page = ROOT / "docs" / "methods" / "registry.md"
    assert page.read_text() == registry["page"], "run python -m recipes.bench.method_table"


def _directives(*folders: str) -> Counter[str]:
    """How often the docstring of each name is rendered on the pages of these folders."""
    pages = [page for folder in folders for page in (ROOT / "docs" / folder).glob("*.md")]
    return Counter(name for page in pages for name in DIRECTIVE.findall(page.read_text()))


def test_every_method_has_its_section(registry):
    """On exactly one page, and there is none of what is no method."""
    assert _directives("methods") == Counter(registry["methods"].keys())


def test_every_method_says_source_state_and_theory(registry):
    """A source has a year, or is this project; a compressor has no state to tell of."""
    lacking = []
    for path, (doc, bases) in registry["methods"].items():
        said = {
            label: " ".join(text.split())
            for label, text in re.findall(
                r"^\* (Source|State|Theory): (.+?)(?=^\*|^$|\Z)", doc, re.MULTILINE | re.DOTALL
            )
        }
        if not re.search(r"\b(?:19|20)\d\d\b|this project's own", said.get("Source", "")):
            lacking.append(f"{path}: Source")
        labels = ["Theory"] if "Compressor" in bases else ["State", "Theory"]
        lacking += [f"{path}: {label}" for label in labels if label not in said]
    assert not lacking


def test_every_public_name_is_in_the_reference():
    """Each once, among the API and the methods."""
    public = [getattr(mpcomp, name) for name in mpcomp.__all__ if name != "__version__"]
    public += [hf.PipelineTrainer, hf.compress_pipeline, hf.CompressedPipelineStage]
    due = {f"{item.__module__}.{item.__qualname__}" for item in public}
    rendered = _directives("api", "methods")
    due |= {"mpcomp.version.__version__", "mpcomp.checkpoint"}  # no class, no function
    assert rendered == Counter(due)


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


def test_the_encoder_decoder_of_the_guide_trains():
    """The page's code, given a small BART, whose cut lies between its parts."""
    from encoder_decoders import encoder_decoder, pairs

    page = (ROOT / "docs" / "guide" / "encoder_decoders.md").read_text()
    _, code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    names = {"model": encoder_decoder("bart"), "loader": [pairs(8)] * 20}
    exec(compile(code.replace("5e-5", "1e-2"), "encoder_decoders.md", "exec"), names)
    pipe = names["pipe"]
    assert 0 < pipe.wire_bytes < pipe.dense_bytes
    assert names["loss"] < 0.8 * math.log(names["model"].config.vocab_size)


def test_the_asynchronous_steps_of_the_guide_train():
    """The page's code, given a small model, which is cut in two."""
    page = (ROOT / "docs" / "guide" / "asynchronous.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    names = {
        "model": nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))),
        "loader": [(x, x.argmax(dim=1))] * 12,
        "loss_fn": nn.functional.cross_entropy,
    }
    code = code.replace("2e-3", "1e-2").replace("split=8", "split=2")
    exec(compile(code, "asynchronous.md", "exec"), names)
    assert names["pipe"].num_steps == 12
    first = nn.functional.cross_entropy(torch.zeros(1, 8), torch.zeros(1, dtype=torch.long))
    assert names["loss"] < first
