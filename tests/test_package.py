"""The package as installed: the wheel is whole, and an image model loads nothing for text."""

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from test_rooms import in_new_process

ROOT = Path(__file__).parents[1]


def test_an_image_model_loads_neither_transformers_nor_datasets():
    """Nor what only recipes, logs and plots need."""
    code = """
import sys, torch, mpcomp, stages
pipe = mpcomp.pipeline(stages.resnet18(), chunks=2, split=2, act_comp="topk:0.1",
                       loss_fn=torch.nn.functional.cross_entropy)
pipe.forward_backward(torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long))
assert pipe.wire_bytes > 0
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    loaded = set(in_new_process(code)[-1].split())
    assert {"torch", "mpcomp", "stages"} <= loaded
    others = {"transformers", "datasets", "accelerate", "peft", "tensorboard", "sklearn", "scipy"}
    assert not loaded & {*others, "matplotlib", "PIL", "recipes"}


@pytest.mark.slow
def test_the_wheel_is_whole(tmp_path):
    pytest.importorskip("build", reason="build comes with mpcomp[test]")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert list(tmp_path.glob("*.tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (path,) = (name for name in names if name.endswith("METADATA"))
        metadata = Parser().parsestr(archive.read(path).decode())
    for package in ("mpcomp", "stages"):
        assert f"{package}/py.typed" in names
        modules = {str(file.relative_to(ROOT)) for file in (ROOT / package).rglob("*.py")}
        assert modules <= names
    assert "mpcomp/__init__.pyi" in names
    pages = [file for end in ("html", "css", "js") for file in ROOT.glob(f"mpcomp/*/*.{end}")]
    assert pages and {str(file.relative_to(ROOT)) for file in pages} <= names
    assert not any(name.startswith(("recipes/", "tests/")) for name in names)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Keywords"]
    required = metadata.get_all("Requires-Dist")
    assert not [line for line in required if line.startswith("datasets") and "extra" not in line]
