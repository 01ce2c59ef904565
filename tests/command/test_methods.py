"""`mpcomp methods`: all are listed, figures are those of real messages, mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import mpcomp
from mpcomp.command import main
from mpcomp.core.spec import SpecValue, parse, registered
from mpcomp.core.wire import Form

#: What coding takes is asserted nowhere here.
pytestmark = pytest.mark.usefixtures("_no_walk_through_memory")

SMALL = ["--shape", "4,16,64", "--repeats", "1"]


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["methods", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_method_of_the_registry_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    rows = figures(capsys, *SMALL)["methods"]
    classes = {type(parse(row["spec"])) for row in rows}
    library = {cls for cls in registered(SpecValue) if cls.__module__.startswith("mpcomp.")}
    assert library <= classes
    for row in rows:
        method = parse(row["spec"])
        assert row["summary"] and not row["refused"]
        assert (row["kind"] == "replicas") == (not method.at_cuts)
        assert (row["figures"] is None) == (row["kind"] in ("replicas", "adaptive"))


def test_figures_are_of_the_message_and_what_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    specs = ["none", "quant:4", "ef21+quant:4", "aqsgd+topk:0.1", "same", "topk:0.1"]
    found = figures(capsys, *SMALL, "--dtype", "fp32", "--only", *specs)
    rows = {row["spec"]: row["figures"] for row in found["methods"]}
    assert list(rows) == specs and found["dtype"] == "fp32" and found["shape"] == [4, 16, 64]

    x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(0))
    meta = mpcomp.TensorMeta.of(x)
    dense = Form((meta,)).num_bytes
    quantized = mpcomp.Quantize(4)
    arrived = quantized.decompress(quantized.compress(x), meta)
    assert rows["none"]["relative_error"] == 0
    assert rows["none"]["below_own"] == 1 and rows["none"]["wire_bytes"] == dense
    assert rows["quant:4"]["relative_error"] == pytest.approx(
        float((x - arrived).norm() / x.norm()), rel=1e-4
    )
    sent = Form(quantized.layout(meta)).num_bytes
    assert rows["quant:4"]["wire_bytes"] == sent
    assert rows["quant:4"]["below_own"] == dense / sent
    assert rows["quant:4"]["below_bf16"] == pytest.approx(dense / sent / 2, rel=0.01)
    # A memory is told of changes alone, each time of others: near, and never exact.
    for spec in ("ef21+quant:4", "aqsgd+topk:0.1"):
        assert 1e-3 < rows[spec]["relative_error"] < 0.15
    # No indices, and the error of the selection that is reused.
    assert rows["same"]["wire_bytes"] < rows["topk:0.1"]["wire_bytes"]
    assert rows["same"]["relative_error"] == pytest.approx(rows["topk:0.1"]["relative_error"])
    for row in rows.values():
        assert row["encode_melems_s"] > 0 and row["decode_melems_s"] > 0


def test_tables_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    main(["methods", *SMALL, "--dtype", "fp16"])
    printed = capsys.readouterr()
    assert max(len(line) for line in printed.out.splitlines()) <= 120
    words = printed.out.split()
    for spec in ("quant:4", "ef21+topk:0.1", "powersgd:2", "adaptive+topk:0.1"):
        assert spec in words
    assert "Real activations differ" in printed.out
    assert "methods" not in printed.out.split("\n")[0] and "method" in printed.err  # the bar


@pytest.mark.parametrize("suffix", ["pt", "safetensors", "npy"])
def test_a_saved_activation(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.linspace(-1, 2, 600).reshape(3, 200)
    path = tmp_path / f"x.{suffix}"
    if suffix == "pt":
        torch.save(x, path)
    elif suffix == "safetensors":
        save_file({"a": x[:2].clone(), "b": x}, path)
    else:
        np.save(path, x.numpy())
    key = ["--key", "b"] if suffix == "safetensors" else []
    found = figures(capsys, "--tensor", str(path), *key, "--only", "topk:0.5", "--repeats", "1")
    assert found["shape"] == [3, 200] and found["dtype"] == "fp32"
    (row,) = found["methods"]
    kept = torch.cat([part.abs().sort(descending=True).values[100:] for part in x])
    error = float(kept.square().sum().sqrt() / x.norm())
    assert row["figures"]["relative_error"] == pytest.approx(error, rel=1e-3)


class Custom:
    """An object, which no file of weights may hold."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save(torch.ones(2, 3, dtype=torch.int64), "whole.pt")
    torch.save(torch.tensor([[1.0, float("nan")]]), "nan.pt")
    torch.save(torch.zeros(0, 3), "empty.pt")
    torch.save({"x": torch.ones(2), "y": torch.ones(3)}, "two.pt")
    torch.save([1, 2], "list.pt")
    torch.save(Custom(), "object.pt")
    for name in ("text.pt", "text.safetensors", "text.npy", "x.csv"):
        Path(name).write_text("no tensor\n")
    np.save("words.npy", np.array(["a", "b"]))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "quart:4"], "did you mean 'quant'"),
        (["--only", "topk:2"], r"keep=2"),
        (["--shape", "8,x"], "--shape 8,x: expected sizes"),
        (["--shape", "8,0"], "from 1 up"),
        (["--shape", "100000,100000"], "at most"),
        (["--repeats", "0"], "--repeats 0: pass at least 1"),
        (["--key", "x"], "pass --tensor"),
        (["--tensor", "none.pt"], "there is no such file"),
        (["--tensor", "x.csv"], "ends in .pt, .safetensors, .npy"),
        (["--tensor", "text.pt"], "cannot be read as .pt"),
        (["--tensor", "object.pt"], "cannot be read as .pt"),
        (["--tensor", "text.safetensors"], "cannot be read as .safetensors"),
        (["--tensor", "text.npy"], "cannot be read as .npy"),
        (["--tensor", "words.npy"], "cannot be read as .npy"),
        (["--tensor", "list.pt"], "holds a list"),
        (["--tensor", "two.pt"], "has x, y: pass --key"),
        (["--tensor", "two.pt", "--key", "z"], "no 'z'"),
        (["--tensor", "nan.pt", "--key", "z"], "leave --key out"),
        (["--tensor", "nan.pt"], "NaN or Inf"),
        (["--tensor", "whole.pt"], "is torch.int64"),
        (["--tensor", "empty.pt"], "not empty"),
        (["--tensor", "nan.pt", "--shape", "2,2"], "leave it out with --tensor"),
    ],
)
def test_mistakes_end_with_one_line(folder: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message) as error:
        main(["methods", *arguments])
    assert str(error.value).startswith("error: ") and "\n" not in str(error.value)
