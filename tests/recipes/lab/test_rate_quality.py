"""`recipes.lab.rate_quality`: rates, costs and the front of results files."""

import math

import pytest
from matplotlib.image import imread

from mpcomp.links.auto import AUTO
from recipes.lab import rate_quality
from recipes.lab.rate_quality import WITH_DEAD_ZONES, Point, family_of, front, points_of
from recipes.metric import OWN_TEXT, PERPLEXITY
from recipes.run_folder import append_json_line


def of_inference(method, ratio, times):
    row = {"method": method, "wire_ratio": ratio, "times_uncompressed": times}
    return {**row, "perplexity": 20 * times}


def of_study(row, seed, ratio, accuracy):
    return {"row": row, "seed": seed, "wire_ratio": ratio, "accuracy_compressed": accuracy}


def of_tuning(act, grad, seed, sent, perplexity, **also):
    row = {"act": act, "grad": grad, "seed": seed, PERPLEXITY.on: perplexity, **also}
    return {**row, "bf16_bytes_an_epoch": 1600, "cut_bytes_by_epoch": sent}


def test_rates_and_costs_of_inference():
    rows = [of_inference("none", 1.0, 1.0), of_inference("step:0.3", 3 / 32, 1.02)]
    metric, [point] = points_of(rows)
    assert metric.name == "perplexity"
    assert point == Point("step:0.3", "step", 3.0, pytest.approx(2.0), None, 1)


def test_the_interval_of_inference_is_over_batches_of_the_text():
    rows = [of_inference("none", 1.0, 1.0), of_inference("step:0.3", 3 / 32, 1.02)]
    for row in rows:
        row |= {"losses": [3.0, 3.1, 2.9, 3.2], "times_half_interval": 0.004}
    _, [point] = points_of(rows)
    assert point.half_width == pytest.approx(0.4)
    assert point.num_runs == 4


def test_divergence_is_a_cost_on_the_models_own_text():
    """exp(KL) times the perplexity, whatever the text's."""
    rows = [of_inference("none", 1.0, 1.0), of_inference("step:0.3", 3 / 32, 0.98)]
    for row, divergence in zip(rows, (0.0, 0.03), strict=True):
        row |= {"losses": [3.0, 3.1, 2.9], "times_half_interval": 0.004}
        row |= {"divergence": divergence, "divergence_half_interval": divergence / 10}
    metric, [point] = points_of(rows, divergence=True)
    assert metric == OWN_TEXT
    assert point.cost == pytest.approx(100 * (math.exp(0.03) - 1))
    assert point.half_width == pytest.approx(100 * math.exp(0.03) * 0.003)
    with pytest.raises(ValueError, match="--divergence is for results of lm_inference"):
        points_of([of_study("none", 0, 1.0, 0.5)], divergence=True)


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


def test_adapters_are_held_to_adapters_in_a_study_too():
    rows = [of_study("none", 0, 1.0, 0.8), of_study("LoRA, none", 0, 1.0, 0.5)]
    rows[1] |= {"lora": 8}
    rows += [{**of_study("LoRA, quant:4", 0, 0.125, 0.49), "lora": 8}]
    _, [point] = points_of(rows)
    assert (point.method, point.base) == ("LoRA, quant:4", "LoRA, none")
    assert point.cost == pytest.approx(1.0)


def test_bytes_of_a_tie_are_not_those_of_cuts():
    rows = [{**of_study(row, 0, 0.9, 0.5), "cut_ratio_overall": 0.25} for row in ("none", "quant")]
    _, [point] = points_of(rows)
    assert point.bits == 8.0


def test_the_front():
    """Nothing is on it that another method surpasses in both."""
    rates = [(4.0, 1.0), (2.0, 5.0), (3.0, 5.0), (8.0, 1.0), (8.0, 0.5), (1.0, 9.0)]
    points = [Point(str(i), "", *point, None, 1) for i, point in enumerate(rates)]
    other = Point("6", "", 5.0, 20.0, None, 1, base="of another model")
    assert [point.method for point in front([*points, other])] == ["5", "1", "0", "6", "4"]


def test_families():
    names = ("rotate+lloyd:3", "quant:4:scale=128", "klt, step 0.1 / 0.5")
    assert [family_of(name) for name in names] == ["rotate+lloyd", "quant", "klt"]


def test_fine_tuning_by_epochs_and_its_defaults_by_their_word():
    default = AUTO["auto:memory"]["act_comp"], AUTO["auto:memory"]["grad_comp"]
    rows = [of_tuning("none", "none", seed, [3200, 3200], 20.0) for seed in range(2)]
    rows += [of_tuning(*default, seed, [200, 100], 20.2) for seed in range(2)]
    rows += [of_tuning("quant:4", "quant:8", 0, [600, 600], 22.0)]
    rows += [of_tuning("none", "none", 0, [3200, 3200], 40.0, lora=8)]
    rows += [of_tuning("auto:memory", "auto:memory", 0, [160, 80], 40.2, lora=8)]
    _, [lora, memory, quant] = points_of(rows)
    names = [(point.method, point.family) for point in (lora, memory, quant)]
    assert names == [
        ("LoRA, auto:memory", "LoRA"),
        ("auto:memory", "aqsgd+step"),
        ("quant:4 / quant:8", "quant"),
    ]
    assert (lora.bits, memory.bits, quant.bits) == pytest.approx((1.2, 1.5, 6.0))
    assert memory.last_bits == pytest.approx(1.0)
    costs = [point.cost for point in (lora, memory, quant)]
    assert costs == pytest.approx([0.5, 1.0, 10.0])  # each below its own uncompressed one
    assert memory.num_runs == 2 and lora.base == "LoRA, none"


def test_what_the_word_stood_for_is_called_by_it_in_results_of_that_time_alone():
    rows = [of_tuning("none", "none", 0, [3200, 3200], 20.0)]
    rows += [of_tuning(*WITH_DEAD_ZONES, 0, [200, 100], 20.2)]
    _, [point] = points_of(rows)
    assert point.method == "auto:memory"
    rows[1]["memories"] = {}
    rows += [{**of_tuning("auto:memory", "auto:memory", 0, [200, 100], 20.1), "memories": {}}]
    _, points = points_of(rows)
    assert {point.method for point in points} == {"auto:memory", " / ".join(WITH_DEAD_ZONES)}


def test_fine_tuning_epoch_by_epoch(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"

    def add(act, grad, seed, sent, loss, on, off):
        losses = {"losses": [9.0, loss], PERPLEXITY.off: off}
        append_json_line(path, of_tuning(act, grad, seed, sent, on, **losses))

    for seed in range(3):
        add("none", "none", seed, [3200, 3200], 4.0, 20.0, 20.0)
        add("quant:4", "quant:8", seed, [400, 160], 4.0 + 0.04 * seed, 22.0, 21.0)
    rate_quality.main([str(path), "--epochs"])
    plain, quant, _, note = capsys.readouterr().out.splitlines()[2:]
    assert note.startswith("Costs are against `none`")
    assert [cell.strip() for cell in plain.split("|")[1:-1]] == [
        *("none", "", "0.5", "0.5", "4.000", "20.00", "20.00", "3")
    ]
    # Of 0, 1 and 2 % the deviation is 1, t of two degrees of freedom 4.303.
    assert [cell.strip() for cell in quant.split("|")[1:-1]] == [
        *("quant:4 / quant:8", "", "4.0", "10.0"),
        *("+1.0 ± 2.5 %", "+10.0 ± 0.0 %", "+5.0 ± 0.0 %", "3"),
    ]
    add("quant:4", "quant:8", 7, [400, 160], 4.0, 22.0, 21.0)
    with pytest.raises(SystemExit, match="seed 7, of which there is no row none"):
        rate_quality.main([str(path), "--epochs"])


def test_epochs_are_of_fine_tuning(tmp_path):
    append_json_line(tmp_path / "rows.jsonl", of_inference("none", 1.0, 1.0))
    with pytest.raises(SystemExit, match="results of fine-tuning"):
        rate_quality.main([str(tmp_path / "rows.jsonl"), "--epochs"])


@pytest.mark.parametrize("log", [[], ["--log"]], ids=["linear", "logarithmic"])
def test_table_and_picture(tmp_path, capsys, log):
    rows = [of_inference("none", 1.0, 1.0), of_inference("bf16", 0.5, 0.9999)]
    rows += [of_inference("step:0.3", 3 / 32, 1.02), of_inference("step:0.5", 2 / 32, 1.07)]
    for row in rows:
        append_json_line(tmp_path / "rows.jsonl", row)
    picture = tmp_path / "picture.png"
    path = str(tmp_path / "rows.jsonl")
    rate_quality.main([path, "--plot", str(picture), "--mark", "step:0.3", "--most", "8", *log])
    said = capsys.readouterr().out
    assert "| step:0.5 | 2.00   | 8.0" in said
    assert said.count("yes") == 3
    assert imread(picture).std() > 0.05


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no run that ended"),
        ([{"loss": 1.0}], "these are not results"),
        ([of_study("sign", 0, 0.1, 0.5)], "no row bf16"),
        ([of_study("none", 0, 1.0, 0.5)] * 2, "two lines are of none, seed 0"),
        ([of_study("none", 1, 1.0, 0.5), of_inference("none", 1.0, 1.0)], "accuracy and perpl"),
    ],
    ids=["empty", "of something else", "nothing to compare with", "twice", "two metrics"],
)
def test_files_that_cannot_be(rows, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.touch()
    for row in rows:
        append_json_line(path, row)
    with pytest.raises(SystemExit, match=message):
        rate_quality.main([str(path)])


def test_methods_to_mark_are_there(tmp_path):
    append_json_line(tmp_path / "rows.jsonl", of_inference("none", 1.0, 1.0))
    with pytest.raises(SystemExit, match="no method to mark is called step:0.3"):
        rate_quality.main([str(tmp_path / "rows.jsonl"), "--mark", "step:0.3"])


def test_no_file(tmp_path):
    with pytest.raises(SystemExit, match="error: "):
        rate_quality.main([str(tmp_path / "none.jsonl")])
