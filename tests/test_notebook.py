"""The quickstart runs from top to bottom, in a short mode."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "01_quickstart.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_quickstart_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICKSTART_EPOCHS", "1")
    # The kernel finds the checkout where the package is not installed either.
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=1200, kernel_name="python3")
    client.execute(cwd=str(NOTEBOOK.parent))
    printed = "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    )
    # It trained, and what it sent compressed is a fraction of what it sent uncompressed.
    sent = {
        line.split(":")[0]: float(line.split(", ")[1].split(" MB")[0])
        for line in printed.splitlines()
        if line.endswith("MB sent")
    }
    assert sent["Top-10 %"] < 0.13 * sent["uncompressed"]


def test_the_quickstart_is_committed_with_its_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert all(cell.execution_count is not None for cell in code)
    assert any("image/png" in o.get("data", {}) for cell in code for o in cell.outputs)
    assert NOTEBOOK.stat().st_size < 400_000
