"""The page of runs in a real browser: no errors, switches that change curves, both themes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows

import mpcomp
from mpcomp.view.report import write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")

#: CI installs the browser while the everyday suite runs.
pytestmark = pytest.mark.slow

STEPS, CHUNKS = 100, 2
#: Its first message is larger than others, so curves over bytes are not those over steps.
METHOD = "ef21+topk:0.1"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, without a window."""
    from selenium.webdriver.chrome.service import Service

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs a browser: chromium and chromedriver (Debian: chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two runs, one of them with a trace, in a folder with a name of tags."""
    folder = tmp_path_factory.mktemp("runs")
    names = {METHOD: folder / "a&b <i>", "none": folder / "plain"}
    for method, place in names.items():
        torch.manual_seed(0)
        pipe = mpcomp.pipeline(
            mlp(),
            chunks=CHUNKS,
            split=MLP_SPLIT,
            act_comp=method,
            grad_comp=method,
            loss_fn=F.cross_entropy,
        )
        log = mpcomp.RunLog(pipe, place, total_steps=STEPS, samples="rows")
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

        def steps(count: int, pipe: Any = pipe, log: Any = log, optimizer: Any = optimizer) -> None:
            for seed in range(count):
                log.step(pipe.forward_backward(*rows(6, seed)), num_samples=6)
                optimizer.step()
                optimizer.zero_grad()

        if method == "none":
            steps(STEPS)
        else:
            with pipe.trace(place / "trace.json"):
                steps(STEPS)
        log.close()
    path = folder / "report.html"
    write_report(list(names.values()), path)
    return path


class Shown:
    """The page as somebody sees it."""

    def __init__(
        self, browser: Any, page: Path, *, theme: str = "light", width: int = 1200
    ) -> None:
        self._browser = browser
        emulate = browser.execute_cdp_cmd
        emulate(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": theme}]},
        )
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        emulate("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.as_uri())
        self.waits_for("return document.querySelectorAll('#spans rect').length")

    def ask(self, script: str) -> Any:
        return self._browser.execute_script(script)

    def waits_for(self, script: str) -> None:
        """Drawings come with the next frame."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self._browser, 30).until(lambda _: self.ask(script))

    def click(self, name: str) -> None:
        self._browser.find_element("id", name).click()

    def curves(self, chart: str) -> list[str]:
        return list(
            self.ask(
                f"return [...document.querySelectorAll('#{chart} polyline')]"
                ".map((line) => line.getAttribute('points'))"
            )
        )

    def text(self, name: str) -> str:
        return str(self.ask(f"return document.getElementById('{name}').textContent"))

    def errors(self) -> list[Any]:
        return [entry for entry in self._browser.get_log("browser") if entry["level"] != "INFO"]


@pytest.mark.parametrize(("theme", "dark"), [("light", False), ("dark", True)])
def test_themes(browser: Any, page: Path, theme: str, dark: bool) -> None:
    shown = Shown(browser, page, theme=theme)
    colours = shown.ask(
        "const own = getComputedStyle(document.body); return [own.backgroundColor, own.color]"
    )
    ground, ink = (sum(map(int, c[c.index("(") + 1 : -1].split(",")[:3])) / 3 for c in colours)
    assert (ground < ink) == dark
    assert abs(ground - ink) > 150
    assert not shown.errors()


def test_an_axis_switch_changes_the_curves(browser: Any, page: Path) -> None:
    shown = Shown(browser, page)
    seen = {chart: [shown.curves(chart)] for chart in ("loss", "fidelity")}
    for name in ("axis-bytes", "axis-time", "axis-step"):
        shown.click(name)
        for chart, found in seen.items():
            found.append(shown.curves(chart))
    for over_steps, over_bytes, over_time, again in seen.values():
        assert over_steps == again
        assert len({tuple(over_steps), tuple(over_bytes), tuple(over_time)}) == 3
        assert all(over_steps) and len(over_steps) == len(over_bytes) == len(over_time)
    # Both runs, each with its steps and with the means of neighbours.
    assert len(seen["loss"][0]) == 4
    assert not shown.errors()


def test_a_switch_of_what_is_shown_of_links(browser: Any, page: Path) -> None:
    shown = Shown(browser, page)
    error = shown.curves("fidelity")
    assert len(error) == 2 * len(MLP_SPLIT)
    shown.click("what-below_bf16")
    assert shown.curves("fidelity") != error
    assert "higher is better" in shown.text("fidelity-note")
    assert not shown.errors()


def test_a_step_can_be_looked_at(browser: Any, page: Path) -> None:
    shown = Shown(browser, page)
    lanes = "return [...document.querySelectorAll('#labels text')].map((text) => text.textContent)"
    assert shown.ask(lanes) == [f"stage {i}" for i in range(len(MLP_SPLIT) + 1)] + ["step"]
    spans = "return [...document.querySelectorAll('#spans rect')].map((rect) => rect.words)"
    words = shown.ask(spans)
    for kind in ("forward", "backward", "encode", "decode"):
        of_kind = [one for one in words if f", {kind} of microbatch" in one]
        assert len(of_kind) >= CHUNKS * len(MLP_SPLIT)
    lines = "return document.querySelectorAll('#spans line.message').length"
    assert shown.ask(lines) == 2 * CHUNKS * len(MLP_SPLIT)
    shown.click("messages")
    assert shown.ask(lines) == 0
    wide = "return document.querySelector('#spans svg').clientWidth"
    before = shown.ask(wide)
    shown.click("closer")
    assert shown.ask(wide) == 2 * before
    assert not shown.errors()


def test_another_run_is_chosen(browser: Any, page: Path) -> None:
    shown = Shown(browser, page)
    assert METHOD in shown.text("links")
    shown.ask(
        "const choice = document.getElementById('run'); choice.value = '1';"
        "choice.dispatchEvent(new Event('change'))"
    )
    assert METHOD not in shown.text("links")
    assert shown.ask("return document.getElementById('no-trace').hidden") is False
    assert shown.ask("return document.getElementById('step').hidden") is True
    assert not shown.errors()


def test_names_that_look_like_tags_are_shown(browser: Any, page: Path) -> None:
    shown = Shown(browser, page)
    assert shown.ask("return document.querySelectorAll('#runs i').length") == 0
    data = "return JSON.parse(document.getElementById('data').textContent)"
    assert shown.ask(data)["runs"][0]["folder"].endswith("a&b <i>")


def test_a_small_screen_has_no_sideways_scroll(browser: Any, page: Path) -> None:
    shown = Shown(browser, page, width=390)
    widths = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    wide, room = shown.ask(widths)
    assert wide <= room
    assert not shown.errors()


def test_nothing_is_loaded(browser: Any, page: Path) -> None:
    shown = Shown(browser, page)
    assert shown.ask("return performance.getEntriesByType('resource').length") == 0
