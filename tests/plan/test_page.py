"""The page of a plan: one file, whatever is in its data, that says what the plan does."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mpcomp.command import main
from mpcomp.page import write_page
from mpcomp.plan import Messages, Network, StageTimes, timeline
from mpcomp.plan.curve import RATES

#: A planned rate between two of `RATES`.
MBPS = 30.0
COMPUTE = (StageTimes(0.02, 0.04),) * 3
CHUNKS = 4
#: Activations' method, bytes of a message, loss.
METHODS = (
    ("none", 1_000_000, 0.0),
    ("bf16", 500_000, 0.0),
    ("auto:scratch", 60_000, 1.5),
    ("topk:0.1", 20_000, 1200.0),
    ("quant:2", 40_000, None),
)


def simulated(num_bytes: float, mbps: float) -> Any:
    network = Network.alike(len(COMPUTE), mbps, 0.01)
    messages = [Messages(num_bytes, num_bytes)] * (len(COMPUTE) - 1)
    return timeline(COMPUTE, messages, network, chunks=CHUNKS)


def plan_data(mbps: float = MBPS) -> dict[str, Any]:
    """The figures of a plan as `Outcome.to_dict` names them."""
    lines = [simulated(num_bytes, mbps) for _, num_bytes, _ in METHODS]
    tie_s = exchange_s = 0.05
    steps = [
        {
            "act": name,
            "grad": name,
            "split": [1, 1, 1],
            "step_s": line.step_s + tie_s + exchange_s,
            "exchange_s": exchange_s,
            "bubble": line.bubble,
            "wire_bytes": 16.0 * num_bytes,
            "tie_comp": "quant:8",
            "tie_bytes": 1000.0,
            "tie_s": tie_s,
            "dense_bytes": 1.6e7,
            "step_bytes": 16.0 * num_bytes + 1000.0,
            "below_bf16": 8e6 / (16.0 * num_bytes + 1000.0),
            "cuts_below_bf16": 5e5 / num_bytes,
            "times_faster_than_bf16": lines[1].step_s / line.step_s,
            "coding_s": [0.0, 0.0],
            "state_bytes": None if loss is None else 4096,
            "break_even_mbps": None if name == "topk:0.1" else 200.0,
            "gains_at_any_rate": name == "topk:0.1",
            "loss": loss,
            "loss_half_width": loss and 0.4,
            "known_from": None,
            "step_s_at_rates": [
                simulated(num_bytes, rate).step_s + tie_s + exchange_s for rate in RATES
            ],
        }
        for (name, num_bytes, loss), line in zip(METHODS, lines, strict=True)
    ]
    return {
        "about": "a model; three stages",
        "mbps": [mbps],
        "recommended": {
            "act": "auto:scratch",
            "grad": "auto:scratch",
            "split": [1, 1, 1],
            "compress": True,
            "ties": None,
            "says": ["start with act_comp='auto:scratch'", "split=[1,1,1]"],
        },
        "task": "scratch",
        "floor": 2.0,
        "unit": "% of perplexity",
        "least_gain": 1.05,
        "steps": steps,
        "rates_mbps": list(RATES),
        "timelines": [[list(span) for span in line.spans] for line in lines],
        "replicas": [
            {
                "method": "powersgd:4",
                "wire_bytes": 1e4,
                "dense_bytes": 1e6,
                "below_bf16": 50.0,
                "coding_s": 0.01,
                "link_s": 0.04,
            }
        ],
    }


class Parsed(HTMLParser):
    """A page as a browser reads it: its tags with their attributes, and the data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._json = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][1].get("type") == "application/json":
            self._json += data

    @property
    def data(self) -> Any:
        # The element's text alone, and not the line after it.
        return json.JSONDecoder().raw_decode(self._json.strip())[0]


def written(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "plan.html"
    write_page(path, "mpcomp.plan", data)
    return path


def shown(path: Path, commands: str) -> list[Any]:
    """Answers of commands about a page that has drawn itself."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js, which runs the page's script, is not installed")
    done = subprocess.run(
        [node, str(Path(__file__).with_name("page_document.js")), str(path)],
        input=f"const at = (id) => document.getElementById(id);\n{commands}",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


#: Commands that tell what is said with the slider at a position.
MOVE = """
const move = (position) => {
  at("rate").value = position;
  at("rate").fire("input");
  tell([at("rate-text").textContent, at("sentence").textContent]);
};
"""


def test_a_page_holds_its_data(tmp_path: Path) -> None:
    data = plan_data()
    assert Parsed(written(tmp_path, data)).data == data


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, plan_data())
    text = path.read_text(encoding="utf-8")
    for loader in ("http://", "https://", "url(", "@import", "import(", "fetch("):
        assert loader not in text
    for tag, attributes in Parsed(path).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "action"} & attributes.keys()


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "<!--<script>", "&lt;'\"é"])
def test_names_that_look_like_tags(tmp_path: Path, name: str) -> None:
    data = plan_data()
    data["about"] = name
    data["steps"][-1]["act"] = name
    path = written(tmp_path, data)
    page = Parsed(path)
    assert page.data == data
    (tmp_path / "harmless").mkdir()
    assert page.tags == Parsed(written(tmp_path / "harmless", plan_data())).tags
    about, bars = shown(path, 'tell(at("about").textContent); tell(at("bars").textContent)')
    assert about == name
    assert name in bars


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    data = plan_data()
    data["steps"][0]["step_s"] = math.inf
    with pytest.raises(ValueError, match="JSON"):
        written(tmp_path, data)


def test_the_slider_begins_at_the_planned_rate(tmp_path: Path) -> None:
    data = plan_data()
    best, base = data["steps"][2]["step_s"], data["steps"][1]["step_s"]
    data["steps"][3]["loss_half_width"] = None
    commands = 'for (const id of ["rate-text", "sentence", "bars"]) tell(at(id).textContent)'
    rate, sentence, bars = shown(written(tmp_path, data), commands)
    assert rate == "30 Mbit/s"
    # As simulated for that rate, and not from its neighbours.
    assert f"auto:scratch: {base / best:.2f} times faster than bf16" in sentence
    assert f"{1e3 * best:.1f} ms a step instead of {base:.2f} s" in sentence
    assert "cost 1.5 ± 0.4" in sentence
    assert "1200" in bars and "1200 ±" not in bars  # of one run


def test_the_slider_changes_the_sentence(tmp_path: Path) -> None:
    path = written(tmp_path, plan_data())
    (slowest, slow), (fastest, fast) = shown(path, MOVE + 'move(0); move(at("rate").max);')
    assert (slowest, fastest) == ("1 Mbit/s", "10 Gbit/s")
    # The methods beyond the floor, or of an unknown cost, are faster, and not what to use.
    assert "auto:scratch: " in slow
    assert "do not compress" in fast


def test_the_slider_agrees_with_the_simulation(tmp_path: Path) -> None:
    data = plan_data()
    commands = MOVE + 'for (let i = 0; i <= at("rate").max; i++) move(i);'
    said = dict(shown(written(tmp_path, data), commands))
    for rate in (2.0, 5.0, 40.0):
        best, base = (simulated(num_bytes, rate).step_s + 0.1 for num_bytes in (60_000, 500_000))
        words = said[f"{rate:g} Mbit/s"].partition("auto:scratch: ")[2]
        assert float(words.split()[0]) == pytest.approx(base / best, rel=0.02)


def test_a_click_on_the_chart_moves_the_slider(tmp_path: Path) -> None:
    commands = """
    const [svg] = at("chart").all("svg");
    svg.fire("pointerdown", { clientX: 1e4, clientY: 100, buttons: 1 });
    tell(at("rate-text").textContent);
    tell(svg.all("polyline").length);
    """
    assert shown(written(tmp_path, plan_data()), commands) == ["10 Gbit/s", len(METHODS)]


@pytest.mark.parametrize("mbps", [0.4, 25_000.0])
def test_planned_rates_beyond_the_curve(tmp_path: Path, mbps: float) -> None:
    path = written(tmp_path, plan_data(mbps))
    (rate,) = shown(path, 'tell(at("rate-text").textContent)')
    assert rate == ("0.4 Mbit/s" if mbps < 1 else "25 Gbit/s")


@pytest.mark.parametrize(
    ("mbps", "first"), [([200.0, 50.0], "50 Mbit/s"), ([None, 70.0], "70 Mbit/s"), ([None], "10 G")]
)
def test_links_that_differ_or_have_no_limit(
    tmp_path: Path, mbps: list[float | None], first: str
) -> None:
    data = plan_data()
    data["mbps"] = mbps
    rate, text = shown(
        written(tmp_path, data), 'tell(at("rate-text").textContent); tell(at("alike").textContent)'
    )
    assert rate.startswith(first)
    assert ("The plan is for links of" in text) == (len(mbps) > 1)


def test_a_step_that_was_not_simulated_for_every_rate(tmp_path: Path) -> None:
    data = plan_data()
    for step in data["steps"]:
        step |= {"step_s_at_rates": None, "break_even_mbps": None, "gains_at_any_rate": None}
    data["timelines"] = [None] * len(data["steps"])
    hidden, sentence = shown(
        written(tmp_path, data),
        'tell(["slider", "curves", "no-rates", "step", "no-spans"].map((id) => at(id).hidden));'
        'tell(at("sentence").textContent)',
    )
    assert hidden == [True, True, False, True, False]
    assert "auto:scratch: " in sentence


def test_a_step_is_drawn_beside_that_with_bf16(tmp_path: Path) -> None:
    commands = """
    const passes = () => at("spans").all("rect").map((rect) => rect.words);
    tell(at("labels").textContent);
    tell(passes().filter((words) => words.startsWith("stage")).length);
    tell(passes().filter((words) => !words.startsWith("stage")));
    at("method").value = 1;
    at("method").fire("change");
    tell(passes().filter((words) => words.startsWith("stage")).length);
    """
    labels, both, tails, one = shown(written(tmp_path, plan_data()), commands)
    assert "auto:scratch" in labels
    assert "bf16" in labels
    assert both == 2 * one == 2 * 2 * len(COMPUTE) * CHUNKS
    assert tails == 2 * ["tied weights’ gradients: 50.0 ms", "exchange between replicas: 50.0 ms"]


def test_a_last_stage_beside_the_first_is_said(tmp_path: Path) -> None:
    data = plan_data()
    commands = 'tell(at("spans-note").textContent);'
    for ties, said in ((None, False), ("apart", False), ("together", True)):
        data["recommended"]["ties"] = ties
        (note,) = shown(written(tmp_path, data), commands)
        assert ("The last stage is on the first machine" in note) == said


MODEL = """
import torch
from torch import nn

def make(rows):
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(rows, 64)
"""


@pytest.mark.usefixtures("_no_walk_through_memory")
def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(MODEL)
    path = tmp_path / "plan.html"
    command = ["plan", f"{tmp_path / 'own.py'}:make", "--stages", "2", "--mbps", "7.5"]
    command += ["--method", "quant:4", "--task", "images", "--precision", "fp32"]
    command += ["--html", str(path)]
    main(command)
    assert f"page: {path}" in capsys.readouterr().out
    first = Parsed(path).data
    assert first["mbps"] == [7.5]
    assert first["unit"] == "points of accuracy"
    main([*command, "--json"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["about"] in path.read_text(encoding="utf-8")
    assert f"page: {path}" in printed.err
    (rate,) = shown(path, 'tell(at("rate-text").textContent)')
    assert rate == "7.5 Mbit/s"


def test_a_page_in_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no folder"):
        main(["plan", "resnet18", "--stages", "2", "--html", str(tmp_path / "none" / "plan.html")])
