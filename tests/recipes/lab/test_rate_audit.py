"""`recipes.lab.rate_audit`: structure, rate, harm and the budget of a small model's cuts."""

import json
import random

import pytest
import torch
from matplotlib.image import imread

from mpcomp import ECSQ
from recipes.lab import rate_audit
from recipes.lab.rate_audit import best_steps, bits_again, bits_of, distance, structure


@pytest.fixture
def text(tmp_path):
    draw = random.Random(0)
    words = ["cut", "stage", "byte", "link", "error", "step", "token", "model"]
    file = tmp_path / "words.txt"
    file.write_text("".join(" ".join(draw.choices(words, k=12)) + ".\n" for _ in range(400)))
    return file


def test_an_audit(text, tmp_path, capsys):
    out, picture = tmp_path / "audit.json", tmp_path / "audit.png"
    options = ["--model", "tiny", "--data", text, "--split", "2", "--seq-len", "32"]
    options += ["--batch-size", "2", "--batches", "2", "--train-limit", "4", "--eval-limit", "4"]
    options += ["--lr", "1e-5", "--steps", "0.05", "0.3", "2", "--gradient-steps", "0.1", "2"]
    options += ["--budget", "0.05", "--threads", "1", "--out", out, "--plot", picture]
    rate_audit.main([str(option) for option in options])
    said = capsys.readouterr().out
    figures = json.loads(out.read_text())
    cut, before_head = figures["cuts"]  # embedding and head are one weight, on the first rank
    fine, middle, coarse = cut["activation_steps"]
    assert fine["bits"] > middle["bits"] > coarse["bits"] > 0
    assert abs(fine["loss"]) < 0.01 and fine["loss"] < 0.5 * abs(coarse["loss"])
    assert 0 < middle["bits_again"] < middle["bits"]
    mild, rough = cut["gradient_steps"]
    assert mild["error"] < 0.05 < rough["error"] and mild["bits"] > rough["bits"]
    assert 0 < cut["change of activations"]["energy"] < cut["change of gradients"]["energy"] < 1
    assert all(row["bits_again"] > 0 for row in cut["gradient_steps"])
    assert figures["budget"]["each"]["bits"] <= figures["budget"]["same"]["bits"]
    for each in (cut, before_head):
        assert f"{each['cut']} ({each['after']})" in said
    assert "within 0.05 nats" in said
    assert imread(picture).std() > 0.05


def test_structure_of_what_is_known():
    """Rows along two directions and a mean; one token has nearly all energy."""
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(400, 16)
    x[:, :2] = torch.randn(400, 2, generator=generator)
    x[:, 5] = 3.0
    x[7] *= 1000
    found = structure([x[:200], x[200:]])
    assert found["strong_tokens"] > 0.99
    assert 0.7 < found["means"] < 0.95
    assert found["directions_90"] <= 3 and found["channels"] == 16
    assert structure([torch.zeros(4, 8)])["means"] == 0.0


def test_rates():
    """A sample that has not changed costs next to nothing the second time."""
    x = [torch.randn(64, 128, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    coded = ECSQ(0.3, centre=True)
    assert 3 < bits_of(coded, x) < 5
    assert bits_again(coded, x, x) < 0.4
    assert bits_again(coded, x, x[::-1]) > bits_of(coded, x) - 0.2


def test_distance():
    assert distance([torch.ones(3), torch.ones(1)], [torch.ones(3), torch.zeros(1)]) == 0.25


def cut_with(*rows):
    return {"activation_steps": [dict(zip(("step", "bits", "loss"), r, strict=True)) for r in rows]}


def test_the_budget_goes_where_it_buys_most():
    tough = cut_with((0.1, 4, 0.001), (0.3, 3, 0.004), (1.0, 1, 0.009))
    tender = cut_with((0.1, 4, -0.001), (0.3, 3, 0.009), (1.0, 1, 0.5))
    found = best_steps([tough, tender], 0.01)
    assert found["each"] == {"steps": [1.0, 0.1], "bits": 2.5, "loss": pytest.approx(0.008)}
    assert found["same"]["steps"] == [0.1, 0.1]
    none = best_steps([tender, tender], 1e-9)
    assert none["each"]["steps"] == [0.1, 0.1]  # better than uncompressed
    assert best_steps([cut_with((1.0, 1, 0.5))], 0.1)["each"] is None


def test_a_mistake_ends_with_one_line(capsys):
    with pytest.raises(SystemExit, match="error: there is no file or folder ./nothing"):
        rate_audit.main(["--model", "tiny", "--data", "./nothing", "--seq-len", "32"])
