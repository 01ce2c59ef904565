"""The notebooks run from top to bottom, in a short mode."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Executes a notebook in a kernel of its own; what it printed."""

    def of(name: str, **environment: str) -> str:
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        # The kernel finds the checkout where the package is not installed either.
        path = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
        monkeypatch.setenv("PYTHONPATH", path)
        notebook = nbformat.read(FOLDER / name, as_version=4)
        NotebookClient(notebook, timeout=1200, kernel_name="python3").execute(cwd=str(FOLDER))
        return printed(notebook)

    return of


def printed(notebook) -> str:
    return "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    )


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_quickstart_runs(run) -> None:
    said = run("01_quickstart.ipynb", QUICKSTART_EPOCHS="1")
    # Both runs went over the link, and the compressed one sent a fraction of the other's bytes.
    assert "over simulated links of 5 Mbit/s each way" in said
    rows = re.findall(r"^(bf16|auto:relu) +[\d.]+ +[\d.]+ +([\d.]+) ", said, re.MULTILINE)
    sent = {name: float(megabytes) for name, megabytes in rows}
    assert 0 < sent["auto:relu"] < 0.2 * sent["bf16"]
    assert re.search(
        r"^auto:relu is [\d.]+ times (faster|slower) than bf16 here$", said, re.MULTILINE
    )
    assert re.search(r"^training sent .* below bf16$", said, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_what_compression_does_runs(run) -> None:
    said = run("02_what_compression_does.ipynb", NOTEBOOK_STEPS="60")
    first, last = re.search(r"loss ([\d.]+) at first, ([\d.]+) at the end", said).groups()
    assert float(last) < float(first) - 1
    errors = {
        match[1]: (float(match[2]), float(match[3]))
        for match in re.finditer(r"^(\S+) +([\d.]+) -> ([\d.]+)$", said, re.MULTILINE)
    }
    before, after = errors["quant:4"]  # the text says so of one scale, and of one a token
    assert after > 3 * before
    before, after = errors["quant:4:scale=token"]
    assert after == pytest.approx(before, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_choosing_runs(run) -> None:
    said = run("03_choosing.ipynb", NOTEBOOK_BLOCKS="4")
    assert "10 Mbit/s: quant:4 is 4.75 times as fast as bf16" in said
    assert re.search(r"^(\* )?auto:scratch +\d", said, re.MULTILINE)
    assert "split=[2,2]" in said


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_results_run_and_are_those_committed(run) -> None:
    committed = nbformat.read(FOLDER / "04_results.ipynb", as_version=4)
    assert run("04_results.ipynb") == printed(committed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_with_their_outputs(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert all(cell.execution_count is not None for cell in code)
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_notebooks_lead_somewhere(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (FOLDER / target).exists(), target
