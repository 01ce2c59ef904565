"""The race: counts of steps, the account of bytes, and a table that multiplies the right things."""

from __future__ import annotations

import pytest
import torch

from mpcomp.plan import Coding
from recipes.decoder import SIZES
from recipes.lab import time_to_loss
from recipes.lab.race import RaceConfig, steps_to
from recipes.lab.race_report import render
from recipes.lab.race_speed import Bits, Links, benchmark_step_s, measure, step_s
from recipes.run_folder import read_json_lines


def readings(*losses: float) -> list[dict[str, float]]:
    return [{"step": 10.0 * (i + 1), "on": loss, "off": loss + 1} for i, loss in enumerate(losses)]


def test_steps_are_those_at_which_the_mean_of_three_readings_crosses() -> None:
    falling = readings(6, 5, 4, 3, 2)  # means: 6, 5.5, 5, 4, 3
    assert steps_to(4.25, falling) == pytest.approx(37.5)
    assert steps_to(6.5, falling) == 10
    assert steps_to(2.9, falling) is None
    assert steps_to(2.9, []) is None


def test_the_better_of_on_and_off_counts() -> None:
    off = [{"step": 10.0, "on": 9.0, "off": 5.0}, {"step": 20.0, "on": 9.0, "off": 3.0}]
    assert steps_to(4.5, off) == pytest.approx(15)


@pytest.mark.parametrize(
    "row",
    [
        "bf16",
        "klt, step 0.2 / 1",
        "bf16, asynchronous",
        "bf16, tied",
        "bf16, tied, asynchronous",
        "subspace, rank 5/32, asynchronous",
        "subspace, rank 5/32",
    ],
)
def test_short_race(row: str, tmp_path, capsys) -> None:
    speed = tmp_path / "speed.json"
    steps = max(2, time_to_loss.ROWS[row].updates)
    arguments = ["--rows", row, "--seeds", "1", "--max-steps", str(steps), "--workers", "0"]
    arguments += ["--out", str(tmp_path / "race.jsonl"), "--speed", str(speed)]
    time_to_loss.main(arguments)
    out = capsys.readouterr().out
    assert row in out
    assert f"above {steps}" in out
    (line,) = read_json_lines(tmp_path / "race.jsonl")
    assert line["steps"] is None
    assert line["trained_steps"] == steps
    assert line["tied"] == (", tied" in row)
    dense = (16.0, 16.1)
    expected = {"bf16": dense, "bf16, tied": dense, "subspace, rank 5/32": (2.5, 2.5)}.get(
        row.partition(", asyn")[0], (1.0, 8.0)
    )
    for key in ("act_bits", "grad_bits"):
        assert expected[0] <= line[key] <= expected[1]
    assert ("off" in line["readings"][-1]) == (line["rival"] is None)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["auto:scratch", "subspace, rank 5/32", "learned basis, rank 1/4"])
def test_a_race_on_a_gpu(row: str, tmp_path) -> None:
    out = tmp_path / "race.jsonl"
    arguments = ["--rows", row, "--seeds", "1", "--max-steps", "2", "--workers", "0"]
    arguments += ["--device", "cuda", "--speed", "none", "--out", str(out)]
    time_to_loss.main(arguments)
    (line,) = read_json_lines(out)
    assert line["trained_steps"] == 2


def test_seconds_of_a_step() -> None:
    size = SIZES["small"]
    compute, bits = [(0.01, 0.02)] * 8, Bits(16, 16)
    dense = step_s(size, bits, Links(10, 20), compute, Coding())
    assert step_s(size, Bits(2, 2), Links(10, 20), compute, Coding()) < dense
    assert step_s(size, bits, Links(10, 20), compute, Coding(0.1, 0.1, 0.1, 0.1)) > dense
    assert benchmark_step_s(Bits(16, 16), Coding()) == pytest.approx(100.475, rel=0.01)


def test_measured_speed() -> None:
    size = SIZES["small"]._replace(batch=1, chunks=1, context=8)
    found = measure(size, {"bf16": ("bf16", "bf16")}, torch.device("cpu"))
    assert found["elements"] == 8 * size.width
    assert len(found["compute"]) == 8
    assert all(forward > 0 and backward > 0 for forward, backward in found["compute"])
    assert all(seconds > 0 for seconds in found["coding"]["bf16"])


def line(row: str, seed: int, steps: float | None, bits: float) -> dict[str, object]:
    counted = {"act_bits": bits, "grad_bits": bits, "trained_steps": 900, "readings": readings(4)}
    return {"row": row, "seed": seed, "steps": steps, "rival": None, **counted}


#: Of stages that compute nothing, and rows that code nothing.
FREE = {
    "elements": 1,
    "compute": [[0.0, 0.0]] * 8,
    "coding": dict.fromkeys(("bf16", "half", "never"), (0.0, 0.0, 0.0, 0.0)),
}


def test_table_multiplies_steps_and_seconds() -> None:
    lines = [line("bf16", seed, 100.0, 16) for seed in range(3)]
    lines += [line("half", seed, 200.0, 8) for seed in range(3)]
    lines += [line("never", seed, None, 1) for seed in range(3)]
    text = render(lines, FREE, order=["half", "bf16"])
    assert text.index("half") < text.index("bf16 ") < text.index("never")
    base = benchmark_step_s(Bits(16, 16), Coding())
    gain = 100 * base / (200 * benchmark_step_s(Bits(8, 8), Coding()))
    (half,) = [row for row in text.splitlines() if row.startswith("half") and "3/3" in row]
    assert f"{gain:.2f} ± 0.00" in half
    (never,) = [row for row in text.splitlines() if row.startswith("never") and "0/3" in row]
    assert "above 900" in never


def test_table_without_seconds_has_the_loss_in_the_end() -> None:
    lines = [{**line("half", 0, None, 8), "readings": readings(9, 6, 5, 4)}]
    (row,) = [each for each in render(lines, None).splitlines() if each.startswith("half")]
    assert row.split()[-1] == "5.000"  # of the last three


def test_table_has_a_column_for_coding_at_the_own_shape() -> None:
    lines = [
        line(row, seed, 100.0, bits) for row, bits in (("bf16", 16), ("half", 8)) for seed in (0, 1)
    ]
    elements, coding = 1000, Coding(1e-4, 1e-4, 1e-4, 1e-4)
    own_shape = {"elements": elements, "coding": {"half": coding}, "machine": {"device": "a GPU"}}
    text = render(lines, FREE, own_shape)
    assert "coded on a GPU and a core" in text and "coded on a GPU" not in render(lines, FREE)
    base = benchmark_step_s(Bits(16, 16), Coding())
    gain = base / benchmark_step_s(Bits(8, 8), coding.times(1 / elements))
    (half,) = [row for row in text.splitlines() if row.startswith("half") and "2/2" in row]
    assert half.split()[-3:] == [f"{gain:.2f}", "±", "0.00"]


def test_coding_that_was_not_measured_is_not_free() -> None:
    """But for what changes the model, and codes nothing."""
    lines = [line(row, 0, 100.0, 4) for row in ("bf16", "new")]
    lines.append({**line("changed", 0, 100.0, 4), "rival": "subspace:20"})
    at_shape, *_ = render(lines, FREE, {**FREE, "machine": {"device": "a GPU"}}).split(
        "Mbit/s / ms"
    )
    (new,) = [row.split() for row in at_shape.splitlines() if row.startswith("new")]
    (changed,) = [row.split() for row in at_shape.splitlines() if row.startswith("changed")]
    assert new.count("–") == 6 and new[-2:] == ["–", "–"] and "–" not in changed


def test_rows_that_do_not_drain_between_steps() -> None:
    """Their seconds are a share of a call, their coding that of the row that they are of."""
    lines = [line("bf16", 0, 100.0, 16), line("half", 0, 100.0, 8)]
    lines.append({**line("half, asynchronous", 0, 100.0, 8), "updates": 25})
    text = render(lines, FREE)
    half, asynchronous = (
        [row.split() for row in text.splitlines() if row.startswith(name)]
        for name in ("half ", "half, asynchronous")
    )
    compute = FREE["compute"]
    for found, updates in ((half[0][2:], 1), (asynchronous[0][3:], 25)):
        for cell, links in ((found[4], Links(200, 50)), (found[6], Links(10, 20))):
            seconds = step_s(SIZES["small"], Bits(8, 8), links, compute, Coding(), updates)
            assert cell == f"{seconds:.3f}"
    # What such steps cost at the benchmark's own shape was not counted.
    assert asynchronous[0][-3:] == ["–"] * 3 and "–" not in half[0]


def test_a_tied_row_has_steps_and_no_seconds() -> None:
    """What a stage more takes was not measured."""
    lines = [line("bf16", 0, 100.0, 16), {**line("bf16, tied", 0, 120.0, 16), "tied": True}]
    tables = render(lines, FREE).split("\n\n")
    tied = [row.split() for row in "\n".join(tables).splitlines() if row.startswith("bf16, tied")]
    assert tied[0][2:6] == ["1/1", "120", "16.00", "/"] and tied[0][-7:] == ["–"] * 7
    assert set(tied[1][2:]) == set(tied[2][2:]) == {"–"}


def test_a_pipeline_that_does_not_drain_takes_less_time_the_longer_its_calls_are() -> None:
    compute = [(0.01, 0.02)] * 8
    times = [
        step_s(SIZES["small"], Bits(16, 16), Links(10, 20), compute, Coding(), updates)
        for updates in (1, 5, 25, 125)
    ]
    assert times == sorted(times, reverse=True)
    # In the end the busiest wire is all that is waited for: two cuts of a host, each way.
    assert times[-1] == pytest.approx(2 * 2 * 65_536 * 2 * 8 / 10e6 * 1514 / 1448, rel=0.1)


def test_calls_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="pass multiples of updates"):
        RaceConfig(data="python-docs", target=4.0, max_steps=50, updates=20)


def test_table_of_runs_that_diverged_or_have_no_reference() -> None:
    gone = {"row": "gone", "seed": 0, "diverged": "NaN"}
    text = render([line("half", 0, 200.0, 8), gone], FREE)
    assert "half" in text
    assert text.endswith("gone (1 diverged)")


def test_bad_options(capsys) -> None:
    with pytest.raises(ValueError, match="model is 'none'"):
        RaceConfig(data="python-docs", model="none", target=4.0, max_steps=1)
    with pytest.raises(SystemExit):
        time_to_loss.main(["--rows", "nothing"])
    assert "nothing" in capsys.readouterr().err
