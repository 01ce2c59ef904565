"""`recipes.rate_quality`: rates, costs and the front of results files."""

import pytest
from matplotlib.image import imread

from recipes import rate_quality
from recipes.rate_quality import Point, front, points_of
from recipes.run_folder import append_json_line


def of_inference(method, ratio, times):
    row = {"method": method, "wire_ratio": ratio, "times_uncompressed": times}
    return {**row, "perplexity": 20 * times}


def of_study(row, seed, ratio, accuracy):
    return {"row": row, "seed": seed, "wire_ratio": ratio, "accuracy_compressed": accuracy}


def test_rates_and_costs_of_inference():
    rows = [of_inference("none", 1.0, 1.0), of_inference("step:0.3", 3 / 32, 1.02)]
    metric, [point] = points_of(rows)
    assert metric.name == "perplexity"
    assert point == Point("step:0.3", 3.0, pytest.approx(2.0), None, 1)


def test_costs_of_a_study_are_taken_seed_by_seed():
    rows = [of_study("none", seed, 1.0, 0.5 + seed / 10) for seed in range(3)]
    rows += [of_study("top 10 %", seed, 0.125, 0.48 + seed / 10) for seed in (2, 1, 0)]
    rows += [of_study("sign", 7, 0.1, 0.1)]  # no uncompressed run of its seed
    rows += [{"row": "gone", "seed": 0, "diverged": True}]
    metric, [point] = points_of(rows, dense_bits=16)
    assert metric.name == "accuracy"
    assert point.num_runs == 3
    assert point.bits == 2.0
    assert point.cost == pytest.approx(2.0)
    assert point.half_width == pytest.approx(0.0, abs=1e-9)
    assert point.family == "top"


def test_bytes_of_a_tie_are_not_those_of_cuts():
    rows = [{**of_study(row, 0, 0.9, 0.5), "cut_ratio_overall": 0.25} for row in ("none", "quant")]
    _, [point] = points_of(rows)
    assert point.bits == 8.0


def test_the_front():
    """Nothing is on it that another method surpasses in both."""
    rates = [(4.0, 1.0), (2.0, 5.0), (3.0, 5.0), (8.0, 1.0), (8.0, 0.5), (1.0, 9.0)]
    points = [Point(str(i), *point, None, 1) for i, point in enumerate(rates)]
    assert [point.method for point in front(points)] == ["5", "1", "0", "4"]


def test_families():
    names = [Point(m, 1.0, 1.0, None, 1).family for m in ("rotate+lloyd:3", "quant:4:scale=128")]
    assert names == ["rotate+lloyd", "quant"]


def test_table_and_picture(tmp_path, capsys):
    rows = [of_inference("none", 1.0, 1.0), of_inference("bf16", 0.5, 0.9999)]
    rows += [of_inference("step:0.3", 3 / 32, 1.02), of_inference("step:0.5", 2 / 32, 1.07)]
    for row in rows:
        append_json_line(tmp_path / "rows.jsonl", row)
    picture = tmp_path / "picture.png"
    rate_quality.main(
        [str(tmp_path / "rows.jsonl"), "--plot", str(picture), "--mark", "step:0.3", "--most", "8"]
    )
    said = capsys.readouterr().out
    assert "| step:0.5 | 2.00   | 8.0" in said
    assert said.count("yes") == 3
    assert imread(picture).std() > 0.05


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "these are not results"),
        ([{"loss": 1.0}], "these are not results"),
        ([of_study("sign", 0, 0.1, 0.5)], "no row none"),
    ],
    ids=["empty", "of something else", "nothing to compare with"],
)
def test_files_that_cannot_be(rows, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.touch()
    for row in rows:
        append_json_line(path, row)
    with pytest.raises(SystemExit, match=message):
        rate_quality.main([str(path)])


def test_no_file(tmp_path):
    with pytest.raises(SystemExit, match="error: "):
        rate_quality.main([str(tmp_path / "none.jsonl")])
