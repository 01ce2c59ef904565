"""What is printed and drawn of the committed results, which must come out as it always has.

The expected texts lie in `committed/`. A change that is wanted: delete the file, run the test once
(it fails, and leaves the new text), look at the difference, commit it.
"""

import hashlib
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from recipes import (
    adaptive_study,
    cifar10_study,
    conef_study,
    gpt2_study,
    lm_inference,
    local_study,
    rate_quality,
    replica_study,
    sorting_study,
    wikitext_study,
)
from recipes.bench import (
    generation,
    link_report,
    replica_report,
    shard_report,
    show,
    time_to_loss,
)

EXPECTED = Path(__file__).parent / "committed"
RESULTS = Path(__file__).parents[2] / "docs" / "results"

# The first that a file's name begins with.
STUDIES = {
    "adaptive_study": adaptive_study.main,
    "cifar10_study": cifar10_study.main,
    "conef_rates": conef_study.main,
    "conef_study": conef_study.main,
    "local_study": local_study.main,
    "replica_study": replica_study.main,
    "sorting_study": sorting_study.main,
    "gpt2_study": gpt2_study.main,
    "wikitext_study": wikitext_study.main,
}
BENCHES = ("generation", "slow_link", "slow_replicas", "slow_shards", "time_to_95")


def check(name: str, text: str) -> None:
    path = EXPECTED / name
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{path} was not there; it now has what came out")
    assert text == path.read_text()


def studies():
    return [*sorted(RESULTS.glob("*_study*.jsonl")), RESULTS / "conef_rates.jsonl"]


@pytest.mark.parametrize("path", studies(), ids=lambda path: path.stem)
def test_tables_of_studies(path, capsys):
    (main,) = {main for name, main in STUDIES.items() if path.name.startswith(name)}
    main(["--table", "--out", str(path)])
    check(f"{path.stem}.txt", capsys.readouterr().out)


def test_tables_of_the_race(capsys):
    race, speed = RESULTS / "time_to_loss.jsonl", RESULTS / "time_to_loss_speed.json"
    time_to_loss.main(["--table", "--out", str(race), "--speed", str(speed)])
    check("time_to_loss.txt", capsys.readouterr().out)


def as_json(value):
    return json.loads(json.dumps(value))


def shown(name, result):
    """What the tables say, after checking that the figures follow from what was measured."""
    if name.startswith("slow_link"):
        cores = result["machine"]["cores"]
        chunks = result["settings"]["chunks"]
        figures = link_report.summarise(
            result["steps"],
            result["compute"],
            result.get("coding", {}),
            chunks=chunks,
            num_cores=cores,
            latency_ms=result["settings"]["latency_ms"],
            steps_before=result["settings"].get("before", 0),
        )
    elif name.startswith("slow_shards"):
        figures = shard_report.summarise(result["turns"])
        dense = replica_report.dense_figures(result["turns"], shard_report.REFERENCE)
        assert as_json(dense) == result["dense"]
    elif name.startswith("generation"):
        settings = result["settings"]
        figures = generation.summarise(
            result["runs"], num_stages=settings["stages"], new_tokens=settings["new_tokens"]
        )
    else:
        figures = replica_report.summarise(result["turns"])
        # Coding was timed on that machine: predictions are not in what was measured.
        for figure, kept in zip(figures, result["figures"], strict=True):
            figure |= {"predicted_s": kept["predicted_s"]} if "predicted_s" in kept else {}
        assert as_json(replica_report.dense_figures(result["turns"])) == result["dense"]
        trained = replica_report.summarise_trainings(result["trainings"])
        assert as_json(trained) == result["accuracy"]
    assert as_json(figures) == result["figures"]
    return show.tables_of(result) + "\n"


def measured():
    return [path for path in sorted(RESULTS.glob("*.json")) if path.name.startswith(BENCHES)]


@pytest.mark.parametrize("path", measured(), ids=lambda path: path.stem)
def test_tables_of_benches(path):
    check(f"{path.stem}.txt", shown(path.stem, json.loads(path.read_text())))


@pytest.mark.parametrize("name", ["conef_stability", "multi_level"])
def test_tables_of_other_benches(name, capsys):
    show.main([str(RESULTS / f"{name}.json")])
    check(f"{name}.txt", capsys.readouterr().out)


def test_a_file_that_no_bench_wrote_is_not_shown(tmp_path):
    other = tmp_path / "other.json"
    for text in ("{}", "[1]", "not JSON"):
        other.write_text(text)
        with pytest.raises(SystemExit, match="error: "):
            show.main([str(other)])


def test_tables_of_inference(capsys):
    lm_inference.main(["--table", "--out", str(RESULTS / "smollm2_inference.jsonl")])
    check("smollm2_inference.txt", capsys.readouterr().out)


def test_tables_of_fine_tuning(capsys):
    names = [str(RESULTS / f"{name}.jsonl") for name in ("smollm2_finetune", "smollm2_lora")]
    rate_quality.main(names)
    check("smollm2_finetune_rate.txt", capsys.readouterr().out)
    rate_quality.main([*names, "--epochs"])
    check("smollm2_finetune_epochs.txt", capsys.readouterr().out)


def drawn(figure: Figure) -> str:
    """The texts and the numbers of a figure, one line for each thing drawn."""
    said = []
    for axes in figure.axes:
        said.append(f"{axes.get_title()} | {axes.get_xlabel()} | {axes.get_ylabel()}")
        ticks = [text.get_text() for text in (*axes.get_xticklabels(), *axes.get_yticklabels())]
        said.append(f"{axes.get_xscale()} {axes.get_yscale()} {ticks}")
        for line in axes.get_lines():
            points = [[f"{float(value):.6g}" for value in point] for point in line.get_xydata()]
            said.append(f"{line.get_label()} {line.get_color()} {line.get_linestyle()} {points}")
        for bar in axes.patches:
            said.append(f"{bar.get_width():.6g} {bar.get_facecolor()}")
        for collection in axes.collections:
            paths = [
                [[f"{float(v):.6g}" for v in xy] for xy in path.vertices]
                for path in collection.get_paths()
            ]
            said.append(str(paths))
    for legend in figure.legends:
        said.append(str([text.get_text() for text in legend.get_texts()]))
    return "\n".join(said)


@pytest.mark.slow
def test_pictures_of_benches(tmp_path, monkeypatch):
    figures = []
    save = Figure.savefig

    def keep(figure, *args, **kwargs):
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    hashes = {}
    for path in measured():
        result, picture = json.loads(path.read_text()), tmp_path / f"{path.stem}.png"
        if path.stem.startswith("slow_link"):
            if all(figure["rate_mbps"] is None for figure in result["figures"]):
                continue
            link_report.plot_steps(result["figures"], picture)
        elif path.stem.startswith("slow_shards"):
            shard_report.plot(result, picture)
        elif path.stem.startswith("generation"):
            continue
        else:
            replica_report.plot(result, picture)
        assert picture.stat().st_size > 1000
        text = drawn(figures[-1])
        hashes[path.stem] = hashlib.sha256(text.encode()).hexdigest()[:16]
    check("pictures.json", json.dumps(hashes, indent=1) + "\n")
