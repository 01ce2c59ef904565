"""The study of ratios that adapt: rows of as many bytes, what is skipped, the table."""

import json

import pytest
from endings import end_of

import mpcomp
from recipes.image_config import ImageConfig
from recipes.lab import adaptive_study
from recipes.lab.adaptive_study import GROUPS, render, rows_of, topk_of

SAME_BYTES = (
    *("uniform", "more for activations", "more for gradients"),
    *("more for early cuts", "more for late cuts"),
)


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.2])
def test_a_ratio_is_met(ratio):
    meta = mpcomp.TensorMeta((8, 8192))
    assert mpcomp.parse(topk_of(ratio)).wire_ratio(meta) == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize("name", GROUPS)
def test_fixed_rows_send_as_many_bytes(name):
    group = GROUPS[name]
    sent = {}
    for row in SAME_BYTES:
        total = dense = 0.0
        for specs in rows_of(group, 0.05)[row]:
            for spec, weight in zip(specs, group.weights, strict=True):
                meta = mpcomp.TensorMeta((8, int(65536 * weight)))
                total += mpcomp.parse(spec).wire_bytes(meta)
                dense += meta.dense_bytes
        sent[row] = total / dense
    ratio = sent["uniform"] if group.bits else 0.05
    assert sent == pytest.approx(dict.fromkeys(SAME_BYTES, ratio), rel=0.04)
    budget = mpcomp.parse(rows_of(group, 0.05)["adaptive budget, energy"][0][0]).budget
    assert budget == pytest.approx(ratio, rel=0.01)


def test_rows_are_methods_at_cuts():
    for group in GROUPS.values():
        for act, grad in rows_of(group, 0.05).values():
            assert len(act) in (1, 3) and len(grad) in (1, 3)
            for spec in (*act, *grad):
                mpcomp.parse(spec)


def test_a_short_run_and_its_continuation(tmp_path):
    out = tmp_path / "study.jsonl"
    command = ["--groups", "images", "--images", "digits", "--train-limit", "256", "--epochs", "1"]
    command += ["--test-limit", "64", "--out", str(out), "--rows", "uniform"]
    command += ["adaptive budget, energy", "--budget", "0.2", "--seeds", "1"]
    end = end_of(adaptive_study.main, command)
    assert end.code == 0 and "less uniform" in end.out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["row"] for line in lines] == ["images: uniform", "images: adaptive budget, energy"]
    for line in lines:
        assert 0.16 < line["wire_ratio"] < 0.21
    assert lines[1]["adaptive"] and len(lines[1]["links"]) == 6
    assert end_of(adaptive_study.main, command).code == 0
    assert len(out.read_text().splitlines()) == 2


def test_the_table_shows_divergence_and_pairs():
    common = {"off": 0.5, "wire_ratio": 0.05}
    lines = [
        {"row": "images: uniform", "seed": 0, "accuracy": 0.5, **common},
        {"row": "images: uniform", "seed": 1, "accuracy": 0.6, **common},
        {"row": "images: GraVAC, energy", "seed": 0, "accuracy": 0.6, **common},
        {"row": "images: GraVAC, energy", "seed": 1, "accuracy": 0.7, **common},
        {"row": "images: dense", "seed": 0, "diverged": "NaN"},
    ]
    table = render(lines)
    assert "+10.00" in table and "dense" in table


def test_bad_input():
    chosen = adaptive_study._parse(["--images", "digits"])
    config = adaptive_study.configuration(chosen, "images", "uniform", 0)
    assert isinstance(config, ImageConfig) and config.replicas == 1
    end = end_of(adaptive_study.main, ["--seeds", "0"])
    assert "seeds is 0" in str(end.code)
