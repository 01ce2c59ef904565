"""The overhead measurement: its arithmetic by hand, and one short run of it."""

import json

import pytest
import torch

from recipes.bench import local_overhead


def test_ratios_are_taken_round_by_round():
    figures = local_overhead.summarise({"torchgpipe": [1.0, 2.0, 4.0], "other": [2.0, 3.0, 4.0]})
    assert figures["other"]["median_ratio"] == 1.5  # of 2.0, 1.5 and 1.0
    assert figures["other"]["quartiles_ratio"] == (1.25, 1.75)
    assert figures["torchgpipe"]["median_ratio"] == 1.0
    assert figures["torchgpipe"]["median_s"] == 2.0


def test_variants_compute_the_same_step():
    made = local_overhead.variants(
        local_overhead.parse_args(["--width", "4", "--batch", "8", "--chunks", "2"])
    )
    assert list(made) == ["torchgpipe", "mpcomp none", "mpcomp topk:0.1"]
    losses = {name: step().detach() for name, (_, step) in made.items()}
    assert torch.allclose(losses["torchgpipe"], losses["mpcomp none"])
    assert not torch.allclose(losses["torchgpipe"], losses["mpcomp topk:0.1"])  # compressed
    plain, none = (
        [parameter.grad for parameter in made[name][0].parameters()]
        for name in ("torchgpipe", "mpcomp none")
    )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, none, strict=True))


def test_short_run(tmp_path, capsys):
    out = tmp_path / "figures" / "overhead.json"
    tiny = ["--width", "4", "--batch", "4", "--chunks", "2", "--repeats", "2", "--warmups", "0"]
    local_overhead.main([*tiny, "--out", str(out)])
    figures = json.loads(out.read_text())
    assert figures["settings"]["batch"] == 4
    assert figures["variants"]["mpcomp topk:0.1"]["median_s"] > 0
    assert "mpcomp none" in capsys.readouterr().out


def test_bad_options():
    with pytest.raises(SystemExit, match="repeats is 0; pass at least 1"):
        local_overhead.main(["--repeats", "0"])
    with pytest.raises(SystemExit, match="chunks is 8; pass at most --batch"):
        local_overhead.main(["--batch", "4", "--chunks", "8"])
