"""The measurement of two-level selection: its arithmetic by hand, and one short run of it."""

import json

import pytest
import torch

from mpcomp import RandomK, RedSyncTopK, SampledTopK, TopK
from recipes.lab import multi_level


def test_methods_are_at_the_gentle_factor_over_the_whole_tensor():
    methods = [multi_level.method_of(spec, 10) for spec in multi_level.METHODS]
    assert methods == [
        TopK(0.1, scope="tensor"),
        SampledTopK(0.1),
        RedSyncTopK(0.1, search="binary"),
        RandomK(0.1),
    ]


def test_both_ways_keep_as_many():
    flat = torch.randn(5000)
    for spec in multi_level.METHODS:
        method = multi_level.method_of(spec, 10)
        for way in (multi_level.direct, multi_level.multi_level):
            gentle, strict = way(method, 1000, flat, 3)
            assert (gentle.numel(), strict.numel()) == (500, 5)


def test_spread():
    assert multi_level.spread([3.0]) == {"median": 3, "low": 3, "high": 3}
    assert multi_level.spread([4.0, 1, 2, 3, 5]) == {"median": 3, "low": 2, "high": 4}
    assert multi_level.shown({"median": 0.5, "low": 0.25, "high": 1}, 1e3, 0) == "500 (250-1000)"


def test_short_run(tmp_path, capsys):
    out = tmp_path / "figures" / "multi_level.json"
    multi_level.main(["--n", "20000", "--repeats", "2", "--warmups", "0", "--json", str(out)])
    figures = json.loads(out.read_text())
    assert figures["settings"]["n"] == 20_000 and list(figures["methods"]) == [*multi_level.METHODS]
    for spec, figure in figures["methods"].items():
        assert figure["kept"] == [2000, 20] and figure["ratio"]["median"] > 0
        assert figure["same_choice"] == (spec != "randomk")  # exact, or another draw
    printed = capsys.readouterr().out
    assert "1.83, 1.49, 1.59" in printed and "cf 10 and 1000, 2 repeats" in printed


def test_bad_options():
    with pytest.raises(SystemExit, match="repeats is 0; pass at least 1"):
        multi_level.main(["--repeats", "0"])
    with pytest.raises(SystemExit, match="cf is 1000 10; pass two factors"):
        multi_level.main(["--cf", "1000", "10"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="of which there is none here"):
            multi_level.main(["--device", "cuda"])
