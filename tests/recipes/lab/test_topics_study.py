"""`recipes.lab.topics_study`: its paragraphs, its runs and its table, at a toy size."""

import random
import statistics

import pytest
import torch

pytest.importorskip("transformers")

from encoders import encoder

from recipes.lab import topics_study
from recipes.lab.study_table import interval
from recipes.lab.topics_study import LOSS_OFF, LOSS_ON, TopicsConfig, load, paragraphs_of
from recipes.run_folder import read_json_lines

WORDS = [f"word{i}" for i in range(30)]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder with an encoder and its tokenizer, and a file of articles with their own words."""
    from transformers import BertTokenizerFast

    folder = tmp_path_factory.mktemp("topics")
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder / "model")
    encoder("bert", "SequenceClassification").bert.save_pretrained(folder / "model")
    draw, lines = random.Random(0), []
    for article in range(4):  # of which the last is held out, and one is too short
        lines += ["", f" = Article {article} = ", ""]
        own = WORDS[10 * article : 10 * article + 10] or WORDS
        lines += [" ".join(draw.choices(own, k=41)) for _ in range(9 - article)]
        lines += [" = = Section = = ", "a line too short to tell", ""]
    (folder / "text.txt").write_text("\n".join(lines))
    return {"model": str(folder / "model"), "data": str(folder / "text.txt")}


SMALL = {"topics": 2, "paragraphs": 6, "held_out": 2, "seq_len": 12}


def test_paragraphs_are_long_lines():
    long = " ".join(["word"] * 40)
    assert paragraphs_of(f" = A heading = \n\n {long} \nshort\n{long}\n") == [long, long]


def test_runs_begin_with_the_same_model_and_paragraphs(places):
    one, other = (load(TopicsConfig(**places, **SMALL, split="2,2", seed=i)) for i in (0, 1))
    assert one.train["labels"].tolist() == [0] * 6 + [1] * 6
    assert one.unseen["labels"].tolist() == [0] * 2 + [1] * 2
    assert one.train["input_ids"].shape == (12, 12)
    for name in one.train:
        assert torch.equal(one.train[name], other.train[name])
    weights = other.model.state_dict()
    assert all(torch.equal(w, weights[name]) for name, w in one.model.state_dict().items())
    rows = {tuple(row) for row in one.train["input_ids"].tolist()}
    assert len(rows) == 12 and not rows & {tuple(r) for r in one.unseen["input_ids"].tolist()}


def test_too_few_articles_are_refused(places):
    with pytest.raises(ValueError, match=r"has \d articles of 8 paragraphs or more, 9 are needed"):
        load(TopicsConfig(**places, **{**SMALL, "topics": 9}))


def test_a_study_of_seconds(places, tmp_path, capsys):
    out = tmp_path / "topics.jsonl"
    few = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | places).items()]
    options = [*few, "--split", "2,2", "--epochs", "2", "--lr", "0.01", "--out", str(out)]
    topics_study.main([*options, "--seeds", "2"])
    said = capsys.readouterr().out
    lines = read_json_lines(out)
    rows = {row: [one for one in lines if one["row"] == row] for row in ("bf16", "auto")}
    assert [len(runs) for runs in rows.values()] == [2, 2]
    for line in lines:
        assert line["steps"] == 6 and line["losses"][1] < line["losses"][0]
    for line in rows["auto"]:
        assert line["wire_bytes"] < line["dense_bytes"] / 3
        assert line[LOSS_ON] != line[LOSS_OFF]
    shown = next(line for line in said.splitlines() if line.startswith("| auto"))
    pairs = list(zip(rows["auto"], rows["bf16"], strict=True))
    for key in (LOSS_ON, LOSS_OFF):
        assert interval([a[key] - b[key] for a, b in pairs], digits=3) in shown
    accuracy = statistics.mean(100 * line["accuracy_compressed"] for line in rows["auto"])
    assert f"{accuracy:.2f}" in shown

    topics_study.main([*options, "--seeds", "2"])  # nothing is missing
    assert "4 of 4 runs are finished" in capsys.readouterr().out


def test_what_a_study_needs(capsys):
    for options, said in (
        (["--rows", "auto"], "--rows without bf16"),
        ([], "--model is missing"),
    ):
        with pytest.raises(SystemExit):
            topics_study.parse_args(options)
        assert said in capsys.readouterr().err
