"""The form of a plan: arithmetic as in `mpcomp plan`, current figures, and nothing is loaded."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from mpcomp.command import main
from mpcomp.links.auto import BEFORE_HEAD
from mpcomp.plan import Coding, CutCost, Messages
from mpcomp.plan.known_quality import KNOWN, methods_of
from recipes.lab import plan_form
from recipes.lab.plan_coding import CODING, kind_of

PAGE_TEXT = plan_form.PAGE.read_text(encoding="utf-8")
BROWSERS = ("chromium", "google-chrome")
#: Of models that are small enough for a microbatch of a thousand tokens.
MODELS = ("GPT-2", "GPT-2 large", "SmolLM2-135M", "Llama 1B", "ResNet-18", "ResNet-50", "by hand")
NUM_INPUTS = 24
#: The words of methods before a head: the form has one figure of a word, the mean of all cuts.
WORDS = {spec: word for word, own in BEFORE_HEAD.items() for spec in own.values()}


def part(name: str) -> str:
    """The text of a script of the page."""
    found = re.search(rf'<script id="{name}"[^>]*>(.*?)</script>', PAGE_TEXT, re.DOTALL)
    assert found is not None
    return found[1]


class Told(HTMLParser):
    """What a script has left at the root of a page."""

    data: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "html":
            self.data = dict(attrs).get("data-told")


def figures() -> dict[str, Any]:
    """What the committed page calculates with."""
    found: dict[str, Any] = json.loads(part("plan"))
    return found


def browser() -> str:
    """Chromium, which needs no driver to run a page once."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("needs a browser: chromium")
    return found


def in_browser(folder: Path, page: str, script: str, *options: str, width: int = 1280) -> Any:
    """What a script gives that runs behind those of a page, in a frame of so many pixels.

    A browser's own window has a least width.
    """
    tail = (
        "<script>(async () => {"
        f"const found = await (async () => {{ {script} }})();"
        "parent.postMessage(JSON.stringify(found), '*');"
        "})();</script>"
    )
    (folder / "page.html").write_text(page.replace("</body>", f"{tail}</body>"), encoding="utf-8")
    frame = folder / "frame.html"
    listen = "onmessage = (event) => { document.documentElement.dataset.told = event.data; }"
    style = f"width:{width}px;height:900px;border:0"
    frame.write_text(
        f"<html><script>{listen}</script><iframe src=page.html style='{style}'></iframe></html>"
    )
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", *options]
    done = subprocess.run(
        [*command, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=120
    )
    told = Told()
    told.feed(done.stdout)
    assert told.data is not None, done.stderr
    return json.loads(told.data)


def calculated(folder: Path, expression: str) -> Any:
    """An expression of `planner` of the committed figures: by Node.js, else in a browser."""
    script = f"{part('figures')};const form = planner({part('plan')});"
    if node := shutil.which("node"):
        done = subprocess.run(
            [node, "-"],
            input=f"{script}console.log(JSON.stringify({expression}))",
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    return in_browser(folder, "<body></body>", f"{script}return {expression};")


def some_inputs() -> list[dict[str, Any]]:
    """Settings of the form, drawn at random."""
    draw = random.Random(0)
    found = []
    for i in range(NUM_INPUTS):
        chunks = draw.choice([1, 2, 3, 4, 7, 8, 12])
        found.append(
            {
                "model": MODELS[i % len(MODELS)],
                "task": draw.choice(["scratch", "finetune"]),
                "stages": draw.choice([2, 2, 3, 4, 5, 6]),
                "chunks": chunks,
                "batch": chunks + draw.choice([0, 0, chunks - 1]),
                "tokens": draw.choice([128, 512, 1024]),
                "mbps": 10 ** draw.uniform(0, 4),
                "latency_ms": draw.choice([0, 0.3, 5, 20, 50]),
                "tflops": 10 ** draw.uniform(-1.5, 2),
                "floor": draw.choice([0, 2, 10]),
                "cores": draw.choice([1, 1, 4]),
                "hidden": draw.choice([64, 256, 1000]),
                "layers": draw.choice([6, 7, 12]),
                "vocabulary": draw.choice([100, 5000, 50257]),
                "tied": draw.random() < 0.5,
            }
        )
    return found


def task_of(given: Mapping[str, Any]) -> str:
    """The task whose studies the form looks at."""
    return "images" if given["model"] in plan_form.IMAGES else given.get("task", "scratch")


def command_of(given: Mapping[str, Any], **others: Any) -> list[str]:
    """The command that asks what the form is asked."""
    known = {**plan_form.TEXT, **plan_form.IMAGES}
    by_hand = (
        f"gpt2 --config n_embd={given['hidden']} n_layer={given['layers']} n_head=4 "
        f"vocab_size={given['vocabulary']} tie_word_embeddings={str(given['tied']).lower()}"
    )
    options = {
        "task": task_of(given),
        "stages": given["stages"],
        "chunks": given["chunks"],
        "batch": given["batch"],
        "seq-len": given["tokens"],
        "mbps": given["mbps"],
        "latency-ms": given["latency_ms"],
        "tflops": given["tflops"],
        "floor": given["floor"],
        **others,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return ["plan", *known.get(given["model"], by_hand).split(), *words, "--json"]


class Planned:
    """`mpcomp plan` with the form's figures of coding and messages in place of measured ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._task, self._cores, self._free = "", 1.0, False
        monkeypatch.setattr("mpcomp.plan.planner.measure_coding", self._cost)

    def _cost(self, act: str, grad: str, activation: torch.Tensor, *_: Any, **__: Any) -> CutCost:
        if self._free:
            return CutCost(Coding(), Messages(0.0, 0.0))
        pair = WORDS.get(act, act), WORDS.get(grad, grad)
        coding, messages = plan_form.cost_of(self._task, pair, activation.numel())
        return CutCost(coding.times(1 / self._cores), messages)

    def __call__(self, given: Mapping[str, Any], *, free: bool = False, **others: Any) -> Any:
        self._free = free
        return self.answer(command_of(given, **others), task_of(given), given["cores"])

    def answer(self, command: list[str], task: str, cores: float) -> Any:
        self._task, self._cores = task, cores
        main(command)
        return json.loads(self._capsys.readouterr().out)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Planned:
    monkeypatch.setattr("mpcomp.plan.outcome.LONGEST", 0)  # no curves, which nobody reads here
    return Planned(monkeypatch, capsys)


ANSWER = """((input) => {
  const found = form.plan(input);
  const row = (own) => ({
    act: own.setting.act, grad: own.setting.grad, step_s: own.step_s, split: own.counts,
    step_bytes: own.bytes, below_bf16: own.below_bf16, cuts_below_bf16: own.cuts_below_bf16,
    needs: form.needed(own, found.alone_s),
  });
  return {
    wrong: form.wrongWith(input), compress: found.compresses, best: row(found.best),
    alone_s: found.alone_s, steps: found.rows.map(row),
  };
})"""


def test_the_arithmetic_is_that_of_the_command(tmp_path: Path, planned: Planned) -> None:
    inputs = some_inputs()
    answers = calculated(tmp_path, f"{json.dumps(inputs)}.map({ANSWER})")
    verdicts = set()
    for given, answer in zip(inputs, answers, strict=True):
        assert answer["wrong"] is None
        expected = planned(given)
        for own, row in zip(answer["steps"], expected["steps"], strict=True):
            assert (own["act"], own["grad"]) == (row["act"], row["grad"]), given
            for name in ("step_s", "step_bytes", "below_bf16", "cuts_below_bf16"):
                assert own[name] == pytest.approx(row[name], rel=1e-6), (name, given)
        recommended = expected["recommended"]
        assert answer["compress"] == recommended["compress"], given
        best = answer["best"]
        assert [best["act"], best["grad"]] == [recommended["act"], recommended["grad"]], given
        assert best["split"] == recommended["split"], given
        verdicts.add((answer["compress"], best["act"]))
    assert len(verdicts) > 4  # among them "do not compress", and several settings


def test_the_rate_that_is_needed_is_the_least(tmp_path: Path, planned: Planned) -> None:
    inputs = [{**given, "tflops": 0.02, "latency_ms": 1} for given in some_inputs()[:6]]
    answers = calculated(tmp_path, f"{json.dumps(inputs)}.map({ANSWER})")
    num_found = 0
    for given, answer in zip(inputs, answers, strict=True):
        unlimited = {"mbps": 1e9, "latency-ms": 0}
        alone_s = planned(given, free=True, **unlimited)["steps"][0]["step_s"]
        assert answer["alone_s"] == pytest.approx(alone_s, rel=0.01)
        for i, own in enumerate(answer["steps"][:3]):
            if own["needs"] is None:  # JSON knows no infinity
                assert planned(given, mbps=1e9)["steps"][i]["step_s"] > 1.1 * alone_s
                continue
            num_found += 1
            split = ",".join(map(str, own["split"]))
            step_s = planned(given, mbps=own["needs"], split=split)["steps"][i]["step_s"]
            assert step_s == pytest.approx(1.1 * alone_s, rel=0.01)
    assert num_found > 10


WRONG = {
    "stages": [0, 1, 2.5, 13, None],
    "chunks": [0, 9, None],
    "batch": [0, 7],
    "mbps": [0, -1, None],
    "latency_ms": [-1, None],
    "tflops": [0],
    "floor": [-1],
    "cores": [0],
    "tokens": [0, 1.5, 1025],
}


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    right = {**some_inputs()[0], "model": "GPT-2", "stages": 4, "chunks": 8, "batch": 8}
    inputs = [{**right, name: value} for name, values in WRONG.items() for value in values]
    said = calculated(tmp_path, f"{json.dumps([right, *inputs])}.map(form.wrongWith)")
    assert said[0] is None
    for given, words in zip(inputs, said[1:], strict=True):
        assert words, given
    assert "2 to 12" in said[4]


def test_the_page_is_current() -> None:
    plan_form.main(["--check"])


def test_a_page_that_is_not_current_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old.html"
    old.write_text(PAGE_TEXT.replace("2 ×", "3 ×"))
    monkeypatch.setattr(plan_form, "PAGE", old)
    monkeypatch.setattr(plan_form, "data", figures)
    with pytest.raises(SystemExit, match="run it"):
        plan_form.main(["--check"])


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: f"{known.task} {known.row}")
def test_a_setting_has_the_figures_of_its_study(known: Any) -> None:
    (own,) = (
        setting
        for setting in figures()["settings"][known.task]
        if (setting["act"], setting["grad"]) == (known.act, known.grad)
    )
    assert (own["loss"], own["half_width"], own["n"]) == (known.loss, known.half_width, known.n)
    assert own["study"] == known.study
    # What the README and the pages say of these: times below bf16, at the cuts alone.
    said = {
        ("scratch", "auto:scratch"): 5.0,
        ("finetune", "auto:memory"): 3 / (1 / 7.9 + 1 / 13.6 + 1 / 19.5),
        ("images", "auto:relu"): 10.7,
        ("scratch", "quant:4"): 2.7,
        ("images", "quant:4"): 2.7,
        ("images", "topk:0.5"): 1.8,
    }
    if factor := said.get((known.task, known.act)):
        assert 32 / sum(own["bits"]) == pytest.approx(factor, rel=0.02)


def test_every_setting_was_measured_for_its_kind() -> None:
    rows = json.loads(CODING.read_text())["rows"]
    measured = {(row["kind"], row["act"], row["grad"]) for row in rows}
    tasks = figures()["settings"]
    assert measured == {(kind_of(task), *pair) for task in tasks for pair in methods_of(task)}
    for row in rows:
        assert len(row["coding_ns"]) == 4 and all(0.1 < ns < 200 for ns in row["coding_ns"])
        assert all(0.5 < bits < 33 for bits in row["bits"])


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    for loader in (
        "http://",
        "https://",
        "url(",
        "@import",
        "import(",
        "fetch(",
        "XMLHttp",
        "src=",
    ):
        assert loader not in PAGE_TEXT, loader
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b", PAGE_TEXT)
    assert "default-src 'none'" in PAGE_TEXT
    script = "return performance.getEntriesByType('resource').length;"
    assert in_browser(tmp_path, PAGE_TEXT, script) == 0


#: In a page: sets fields, waits until it has answered, and tells texts.
FILL = """
  const at = (id) => document.getElementById(id);
  const errors = [];
  addEventListener("error", (event) => errors.push(event.message));
  const fill = async (fields) => {
    for (const [id, value] of Object.entries(fields))
      if (typeof value === "boolean") at(id).checked = value; else at(id).value = value;
    at("form").dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise((done) => setTimeout(done, 200));
  };
  const names = ["lead", "rest", "cards", "code", "command", "wrong", "settings"];
  const shown = (id) => (at(id).offsetParent === null ? "" : at(id).innerText);
  const texts = () => Object.fromEntries(names.map((id) => [id, shown(id)]));
"""


def test_the_form_answers_at_once(tmp_path: Path) -> None:
    script = f"""{FILL}
      const said = [texts()];
      await fill({{ mbps: 10000, latency: 0 }});
      said.push(texts());
      await fill({{ model: "ResNet-50", mbps: 20, tflops: 1, price: 2, steps: 3600 }});
      said.push(texts());
      await fill({{ model: "by hand", hidden: 256, layers: 6, tied: false, price: "" }});
      said.push(texts());
      await fill({{ stages: 7 }});
      said.push(texts());
      return {{ said, errors, lines: document.querySelectorAll("#chart polyline").length }};
    """
    found = in_browser(tmp_path, PAGE_TEXT, script)
    first, fast, images, by_hand, wrong = found["said"]
    assert found["errors"] == [] and found["lines"] >= 6
    assert first["lead"].startswith("Compress with auto:scratch")
    assert 'act_comp="auto:scratch"' in first["code"] and "chunks=8" in first["code"]
    assert first["command"].startswith("mpcomp plan gpt2 --stages 4 --mbps 100 --latency-ms 20")
    assert fast["lead"].startswith("Do not compress") and 'act_comp="bf16"' in fast["code"]
    assert "points of accuracy" in images["settings"] and "loss_fn" in images["code"]
    step_s, cost = (
        re.search(r, images["cards"]) for r in (r"A step\s+([\d.]+) (m?s)", r"cost\s+([\d.,]+)")
    )
    assert step_s is not None and cost is not None
    seconds = float(step_s[1]) / (1000 if step_s[2] == "ms" else 1)
    # 3,600 steps of 4 machines at 2 an hour.
    assert float(cost[1].replace(",", "")) == pytest.approx(8 * seconds, rel=0.01)
    assert "n_embd=256" in by_hand["command"] and "steps cost" not in by_hand["cards"]
    assert "2 to 6" in wrong["wrong"] and not wrong["code"]


FIELDS: tuple[dict[str, Any], ...] = (
    {"model": "SmolLM2-135M", "task": "finetune"},
    {"model": "by hand", "hidden": 100, "layers": 7, "tokens": 1500, "tied": True, "batch": 9},
    {"model": "by hand", "hidden": 64, "vocabulary": 99, "tied": False, "stages": 3, "floor": 0},
    {"model": "ResNet-34", "tflops": 0.5, "mbps": 12.5, "chunks": 4, "stages": 5},
)


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: fields["model"])
def test_the_command_on_the_page_is_one(
    tmp_path: Path, planned: Planned, fields: dict[str, Any]
) -> None:
    script = f"""{FILL}
      await fill({json.dumps(fields)});
      return texts();
    """
    texts = in_browser(tmp_path, PAGE_TEXT, script)
    program, *words = texts["command"].split()
    assert program == "mpcomp"
    answer = planned.answer([*words, "--json"], task_of(fields), cores=1.0)["recommended"]
    lead = f"Compress with {answer['act']}" if answer["compress"] else "Do not compress"
    assert texts["lead"].startswith(lead)
    assert f"split={answer['split']}" in texts["code"]
    assert f'act_comp="{answer["act"]}", grad_comp="{answer["grad"]}"' in texts["code"]


@pytest.mark.parametrize(("dark", "theme"), [(False, 1), (True, 0)])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits(tmp_path: Path, width: int, dark: bool, theme: int) -> None:
    script = f"""{FILL}
      await fill({{ price: 3 }});
      const own = getComputedStyle(document.body);
      const root = document.documentElement;
      return [root.scrollWidth, root.clientWidth, own.backgroundColor, own.color];
    """
    setting = f"--blink-settings=preferredColorScheme={theme}"
    wide, room, *colours = in_browser(tmp_path, PAGE_TEXT, script, setting, width=width)
    assert wide <= room <= width
    ground, ink = (sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in colours)
    assert (ground < ink) == dark and abs(ground - ink) > 150
