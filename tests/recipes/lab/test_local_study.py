"""The study of local SGD: what is run, what is skipped, the table."""

import json

import pytest
from endings import end_of

import mpcomp
from recipes.lab import local_study
from recipes.lab.local_study import DDP, METHODS, SMALL_IN, configuration, render


def study(command):
    return [end_of(local_study.main, list(command))]


def options(*given):
    return local_study._parse(list(given))


def line(row, seed, perplexity, *, wire=1000, memory=0):
    sent = {"wire_bytes": wire, "dense_bytes": 120_000}
    sent |= {"traffic_bytes": wire, "dense_traffic_bytes": 120_000}
    return {
        **{"row": row, "seed": seed, "perplexity": perplexity, "steps": 10},
        **{"memory_bytes": memory, "replicas": sent, "wire_bytes": 2 * wire},
        "settings": {"batch_size": 2, "seq_len": 10},
    }


def test_runs_differ_in_what_the_row_says():
    chosen = options("--data", "python-docs", "--epochs", "2")
    configs = [configuration(chosen, row, 3, 4).to_json() for row in METHODS]
    for config, row in zip(configs, METHODS, strict=True):
        assert config.pop("dp_comp") == METHODS[row]
        assert config.pop("dp_small") == SMALL_IN.get(row, "none")
    assert all(config == configs[0] for config in configs)
    assert (configs[0]["seed"], configs[0]["replicas"], configs[0]["optimizer"]) == (3, 4, "adamw")
    assert configs[0]["eval_every"] == configs[0]["epochs"] == 2 and configs[0]["tie"] is None


def test_small_parameters_are_rounded_where_a_row_says_so():
    for row, dtype in SMALL_IN.items():
        text = render([line(DDP, 0, 50.0), line(row, 0, 51.0)])
        assert f"{METHODS[row]}, small ones in {dtype}" in text


def test_rows_are_the_papers():
    methods = {row: mpcomp.parse(spec) for row, spec in METHODS.items()}
    few = mpcomp.TopK(0.02, values=mpcomp.Quantize(2))
    assert methods["DiLoCo"] == mpcomp.LocalSGD(30)
    assert methods["DiLoCo, Top-2 %"] == mpcomp.LocalSGD(30, mpcomp.ErrorFeedback(few))
    faded = mpcomp.ErrorFeedback(few, decay=0.95)
    assert methods["SparseLoCo"] == mpcomp.LocalSGD(30, faded, lr=1.0, momentum=0.0)


def test_both_axes():
    """Cuts of all rows but DDP are compressed, as its replicas are not either."""
    chosen = options("--data", "python-docs", "--stages", "2", "--seeds", "1")
    both = local_study.runs(chosen, 4)
    dense, local = both[DDP, 0], both["DiLoCo, 4 bits", 0]
    assert (dense.split, dense.chunks, dense.replicas) == ("2", 2, 2)
    assert (dense.act, dense.grad, dense.tie) == (("none",), ("none",), "none")
    assert (local.act, local.grad, local.tie) == (("auto:scratch",), ("auto:scratch",), "quant:8")
    for processes in (2, 5):
        with pytest.raises(ValueError, match="two replicas or more"):
            local_study.runs(chosen, processes)


TINY = [
    *("--batch-size", "8", "--seq-len", "16", "--vocab-size", "270", "--eval-limit", "8"),
    *("--epochs", "3", "--device", "cpu", "--lr-warmup-steps", "2", "--seeds", "1"),
]


def test_the_study_skips_what_is_finished(ranks, tmp_path, sentences):
    out = tmp_path / "local.jsonl"
    command = [*TINY, "--data", sentences(80), "--out", str(out), "--rows"]
    for rows in ([DDP], [DDP, "DiLoCo", "DiLoCo, Top-2 %"]):
        ended = ranks(study, 2, [*command, *rows])
        assert [ends[0].code for ends in ended] == [0, 0], ended
    assert "1 of 3 runs are finished" in ended[0][0].out
    lines = {one["row"]: one for one in map(json.loads, out.read_text().splitlines())}
    plain, apart, few = (lines[row] for row in (DDP, "DiLoCo", "DiLoCo, Top-2 %"))
    assert plain["steps"] == apart["steps"] == few["steps"] >= 30
    exchanges = plain["steps"] // 30
    # What ranks agree on in each step comes on top.
    expected = plain["wire_bytes"] / plain["steps"] * exchanges
    assert apart["wire_bytes"] == pytest.approx(expected, rel=0.005)
    assert 0 < few["wire_bytes"] < apart["wire_bytes"] / 10
    assert few["memory_bytes"] > apart["memory_bytes"] > plain["memory_bytes"] == 0


def test_the_table_has_paired_differences():
    lines = [line(DDP, seed, 100.0 + seed, wire=120_000) for seed in range(2)]
    lines += [line("DiLoCo", seed, 98.0 + seed, wire=4000, memory=8_000_000) for seed in range(2)]
    lines += [line("SparseLoCo", 0, 99.0, wire=0)]  # shorter than a period
    rows = {one.split("  ")[0]: one for one in render(lines).splitlines()}
    assert list(rows)[2:5] == [DDP, "DiLoCo", "SparseLoCo"]
    assert "-2.00 +- 0.00" in rows["DiLoCo"]
    assert " 30.0 " in rows["DiLoCo"] and " 15.0 " in rows["DiLoCo"]  # below fp32, below bf16
    # 100 to 98 and 101 to 99: ln(98) is 0.4387 % below ln(100), ln(99) 0.4332 % below ln(101).
    assert "-0.44 +- 0.03" in rows["DiLoCo"]
    assert " 40.0 " in rows["DiLoCo"]  # bytes a token
    assert " 8.0 " in rows["DiLoCo"] and " inf " in rows["SparseLoCo"]
