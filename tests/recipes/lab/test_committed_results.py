"""Figures and pictures of the committed results, which must come out as they always have.

The tables stand in the pages beside the results (test_results_pages.py). What is expected of
pictures lies in `committed/`. A change that is wanted: delete the file, run the test once (it
fails, and leaves the new one), look at the pictures, commit it.
"""

import hashlib
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from recipes.bench import generation, link_report, replica_report, shard_report
from recipes.lab import show

EXPECTED = Path(__file__).parent / "committed" / "pictures.json"
RESULTS = Path(__file__).parents[3] / "docs" / "results"

BENCHES = ("generation", "slow_link", "slow_replicas", "slow_shards", "time_to_95")


def as_json(value):
    return json.loads(json.dumps(value))


def rounded(value):
    """With floats of nine digits: Python 3.12 sums them up more exactly than those before it."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.9g}"))


def check_figures(name, result):
    if name.startswith("slow_link"):
        cores = link_report.cores_shared(result["settings"], result["machine"]["cores"])
        chunks = result["settings"]["chunks"]
        figures = link_report.summarise(
            result["steps"],
            result["compute"],
            result.get("coding", {}),
            chunks=chunks,
            num_cores=cores,
            latency_ms=result["settings"]["latency_ms"],
            steps_before=result["settings"].get("before", 0),
            tie_coding=result.get("tie_coding", {}),
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
    assert rounded(figures) == rounded(result["figures"])


def measured():
    return [path for path in sorted(RESULTS.glob("*.json")) if path.name.startswith(BENCHES)]


@pytest.mark.parametrize("path", measured(), ids=lambda path: path.stem)
def test_figures_follow_from_what_was_measured(path):
    check_figures(path.stem, json.loads(path.read_text()))


def test_a_file_that_no_bench_wrote_is_not_shown(tmp_path):
    other = tmp_path / "other.json"
    for text in ("{}", "[1]", "not JSON"):
        other.write_text(text)
        with pytest.raises(SystemExit, match="error: "):
            show.main([str(other)])


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
        of_links = path.stem.startswith("slow_link")
        if of_links and all(figure["rate_mbps"] is None for figure in result["figures"]):
            continue
        if path.stem.startswith("generation"):
            continue
        show.plot(result, picture)
        assert picture.stat().st_size > 1000
        hashes[path.stem] = hashlib.sha256(drawn(figures[-1]).encode()).hexdigest()[:16]
    text = json.dumps(hashes, indent=1) + "\n"
    if not EXPECTED.exists():
        EXPECTED.write_text(text)
        pytest.fail(f"{EXPECTED} was not there; it now has what came out")
    assert text == EXPECTED.read_text()
