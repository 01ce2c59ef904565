"""The measurement of generation: its arithmetic by hand, and one short run of it."""

import json

import pytest

from recipes.bench import generation
from recipes.bench.generation_worker import TOLD_ALONE


def run(variant, rate, repeat, first_s, tokens_per_s, **rest):
    where = {"batch": 1, "rate_mbps": rate, "variant": variant, "repeat": repeat}
    measured = {"first_s": first_s, "tokens_per_s": tokens_per_s}
    sent = {"prompt_bytes": 600, "later_bytes": 120}
    counted = {"tx_bytes": 1000, "tx_packets": 2, "rx_bytes": 0, "rx_packets": 0}
    return {**where, **measured, **sent, "interfaces": [counted], **rest}


def test_compared_to_the_first_method_on_the_limited_link():
    runs = [
        run("none", 10.0, 0, 1.0, 10.0),
        run("bf16", 10.0, 0, 0.5, 30.0),
        run("none", None, 0, 0.25, 40.0),
        run("bf16", 10.0, 1, 0.5, 20.0),  # it came first in the second repetition
        run("none", 10.0, 1, 2.0, 20.0),
        run("none", None, 1, 0.25, 40.0),
        {
            **{"batch": 1, "rate_mbps": 10.0, "variant": TOLD_ALONE, "repeat": 0},
            **{"seconds": 0.5, "interfaces": []},
        },
    ]
    none, bf16, unlimited, told = generation.summarise(runs, num_stages=3, new_tokens=5)
    assert none["first_speedup"] == {"median": 1.0, "quartiles": (1.0, 1.0)}
    assert bf16["first_speedup"]["median"] == 3.0  # of 2 and 4
    assert bf16["later_speedup"]["median"] == 2.0  # of 3 and 1
    assert bf16["first_speedup"]["quartiles"] == (2.5, 3.5)
    assert unlimited["first_speedup"]["median"] == 6.0  # of 4 and 8
    assert unlimited["rate_mbps"] is None
    assert none["prompt_bytes"] == 300.0  # two cuts
    assert none["step_bytes"] == 15.0  # and four steps after the prompt
    # 1000 - 720 of messages - 2 packets of 66 - 10 messages of 48 with their headers, 5 steps
    assert none["control_bytes"] == (1000 - 720 - 132 - 480) / 5
    assert told["told_s"]["median"] == 0.1
    assert told["told_bytes"] is None
    shown = generation.tables([none, bf16, unlimited, told])
    assert "batch 1" in shown and "unlimited" in shown and "100.00 ms a step" in shown
    # Of medians: bf16's first token after 5 s, that of none after 15.
    (limited,) = (row for row in shown.splitlines() if row.startswith("none    10 "))
    assert " 0.33 " in limited


@pytest.mark.slow
def test_short_run(tmp_path, capsys):
    pytest.importorskip("transformers")
    out = tmp_path / "figures" / "generation.json"
    tiny = "--hidden 16 --heads 2 --blocks 2 --vocab 50 --prompt 6 --new-tokens 3 --repeats 1"
    few = "--methods none quant:8 --batches 2 --threads 1 --loopback"
    generation.main([*tiny.split(), *few.split(), "--out", str(out)])
    figures = json.loads(out.read_text())["figures"]
    assert [figure["variant"] for figure in figures] == ["none", "quant:8", TOLD_ALONE]
    none, quantised, _ = figures
    assert none["prompt_bytes"] > 2 * 6 * 16 * 4 > quantised["prompt_bytes"]
    assert none["step_bytes"] > 2 * 16 * 4 > quantised["step_bytes"]
    assert none["tokens_per_s"]["median"] > 0
    assert "quant:8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--repeats 0", "repeats is 0; pass at least 1"),
        ("--new-tokens 1", "new tokens are 1; pass at least 2"),
        ("--stages 1", "stages is 1; pass 2 to --blocks 8"),
        ("--batches 4 0", "batches has 0"),
        ("--hidden 12", "multiple of --heads 8"),
        ("--rate 0", "rate is 0"),
        ("--methods none nosuch", "unknown method 'nosuch'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(SystemExit, match=message):
        generation.main(options.split())
