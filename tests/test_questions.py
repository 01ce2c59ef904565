"""A newcomer's questions: from the README and the site's home two links lead to each answer."""

import re
from pathlib import Path

import pytest
from pages import ROOT, name_of

#: A question: the texts of the links to follow, a heading of the last page, and words below it.
PATHS = {
    "which setting for my BERT over 50 Mbit/s": (
        ["BERT, ViT, a classifier"],
        "Which setting",
        ['act_comp="auto", grad_comp="auto"', "`step:0.3:centre=true:spikes=16`", "50 Mbit/s"],
    ),
    "how do I resume after a crash": (
        ["How do I go on after a crash?"],
        "Processes: `mpcomp.heal`",
        ["again from the last checkpoint whenever a process is killed", "checkpoints.restore()"],
    ),
    "what crosses the wire, and is it private": (
        ["What crosses the network, and is it private?"],
        "What crosses the network",
        ["activations and their gradients, compressed", "It is not private."],
    ),
    "does it work with my nanoGPT script": (
        ["my nanoGPT script"],
        "nanoGPT",
        ["+model = mpcomp.pipeline(", "The model is cut as it is"],
    ),
    "how do I run over two machines": (
        ["How do I run it on two machines?"],
        "On several machines",
        ["torchrun --nnodes 2 --node-rank 1", "A is 192.168.1.10"],
    ),
    "which ports must be open": (
        ["How do I run it on two machines?", "Three machines"],
        "Firewall",
        ["Open both between the three machines"],
    ),
    "why is it slower than without": (
        ["Why is my run slower than without?"],
        "Why is my run slower than without?",
        ["the rate below which compression pays", "all stages are in one process"],
    ),
    "how do I evaluate without compression": (
        ["How do I evaluate without compression?"],
        "Evaluation",
        ["with pipe.uncompressed():"],
    ),
    "how do I combine it with data parallel replicas": (
        ["How do I combine it with replicas (data parallel)?"],
        "Two ways in",
        ["mpcomp.pipeline(model, chunks=4, replicas=2, dp_comp="],
    ),
    "what does auto choose": (
        ["Which setting for my model, and what does `auto` choose?"],
        "Let it choose",
        ["The first row that fits counts", "the cut lies behind a ReLU"],
    ),
    "how do I set by hand what auto chooses": (
        ["Which setting for my model, and what does `auto` choose?"],
        "Let it choose",
        ["names its methods", 'grad_comp="klt+step:0.7:rounding=dither"'],
    ),
    "how do I read a report": (
        ["What does it cost in quality?"],
        "How to read a report",
        ["1 is bf16, 0.5 is fp32", "times below bf16"],
    ),
    "what quality does it cost": (
        ["What does it cost in quality?"],
        "How to read a report",
        ["compression hurts training", "hurts inference"],
    ),
    "what network do I need": (
        ["What network do I need?"],
        "What network do I need?",
        ["Open the form"],
    ),
}


def _after(page: Path, text: str) -> Path:
    """The page to which the link with this text leads."""
    prose = " ".join(page.read_text().split())
    targets = {
        (page.parent / target).resolve()
        for target in re.findall(rf"\[{re.escape(text)}\]\(([^)#]*)[^)]*\)", prose)
    }
    assert len(targets) == 1, f"{name_of(page)} has {len(targets)} pages behind [{text}]"
    return targets.pop()


def _below(page: Path, heading: str) -> str:
    """What stands below a heading, up to the next one that is no comment of code."""
    found = re.search(
        rf"^#+ {re.escape(heading)}$(.*?)(?=^##+ |\Z)", page.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found, f"{name_of(page)} has no heading {heading!r}"
    return " ".join(found[1].split())


@pytest.mark.parametrize("home", ["README.md", "docs/index.md"])
@pytest.mark.parametrize(("links", "heading", "words"), PATHS.values(), ids=PATHS)
def test_a_question_is_answered_two_links_away(home, links, heading, words):
    assert len(links) <= 2
    page = ROOT / home
    for text in links:
        page = _after(page, text)
    below = _below(page, heading)
    assert not [phrase for phrase in words if phrase not in below], name_of(page)
