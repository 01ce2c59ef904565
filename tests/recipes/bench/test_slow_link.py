"""The measurement of training over slow links: one short run of it, and mistakes."""

import json

import pytest

from recipes.bench import slow_link
from recipes.bench.link_worker import REFERENCE


@pytest.mark.slow
def test_short_run(tmp_path, capsys):
    out = tmp_path / "figures" / "link.json"
    tiny = "--stages 2 --blocks 2 --width 16 --context 8 --vocab 20 --chunks 2 --microbatch 1"
    few = "--repeats 1 --warmups 1 --threads 1 --loopback"
    variants = [REFERENCE, "mpcomp none", "mpcomp topk:0.1+fp16"]
    slow_link.main([*tiny.split(), *few.split(), "--variants", *variants, "--out", str(out)])
    result = json.loads(out.read_text())
    figures = {figure["variant"]: figure for figure in result["figures"]}
    assert list(figures) == variants and result["machine"]["mpcomp"]
    dense, none, topk = (figures[name] for name in variants)
    assert dense["metered_bytes"] == 2 * 2 * 8 * 16 * 4  # both ways, two microbatches, fp32
    assert dense["metered_bytes"] < none["metered_bytes"] < 1.1 * dense["metered_bytes"]
    assert topk["metered_bytes"] < dense["metered_bytes"] / 4
    assert none["losses"] == pytest.approx(dense["losses"], abs=1e-5)
    assert len(result["compute"]["2"]) == 2 and result["links"]["kind"] == "loopback"
    assert "mpcomp topk:0.1+fp16" in capsys.readouterr().out


def test_bad_options():
    for options, message in {
        "--repeats 0": "repeats is 0; pass at least 1",
        "--warmups 0": "warmups is 0; pass at least 1",
        "--stages 4 --chunks 2": "chunks is 2; torch's 1F1B needs",
        "--stages 3": "3 stages cannot share 4 blocks",
        "--rates unlimited --plot x.png": "a plot needs a limited rate",
    }.items():
        with pytest.raises(SystemExit, match=message):
            slow_link.main(options.split())
    with pytest.raises(SystemExit, match="the variants lack 'torch fp32'"):
        slow_link.main(["--variants", "mpcomp none"])
