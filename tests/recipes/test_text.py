"""Articles of every kind of source, and what is said where there are none."""

from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from recipes import hub
from recipes.text import HELD_OUT_TOPICS, NUM_PIECES, WIKITEXT, load_text

WIKITEXT_2 = Path(__file__).parents[3] / "shared" / "data" / "wikitext-2-v1"
LINES = ["", " = One = \n", "", " First . \n", " = = Part = = \n", "", " More . \n"]
LINES += ["", " = Two = \n", "", " A table : \n", " = Ties , L = \n", " Losses \n"]


@pytest.fixture
def write_splits(tmp_path: Path) -> Callable[..., Path]:
    """Writes parquet files with the rows of each split and gives the folder."""

    def write(*, column: str = "text", **splits: list) -> Path:
        folder = tmp_path / "wiki"
        folder.mkdir()
        for split, rows in splits.items():
            table = datasets.Dataset.from_dict({column: rows})
            table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
        return folder

    return write


def write_files(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    return folder


# -- python-docs ------------------------------------------------------------------------------


def test_python_docs_hold_out_a_tenth_that_is_not_repeated_in_training():
    text = load_text("python-docs")
    assert text.name == "python-docs"
    assert text.validation == text.test
    assert len(text.test) == len(HELD_OUT_TOPICS)
    num_train, num_test = (sum(map(len, articles)) for articles in (text.train, text.test))
    assert 0.08 < num_test / (num_train + num_test) < 0.12
    seen = {paragraph for article in text.train for paragraph in article.split("\n\n")}
    repeated = [p for article in text.test for p in article.split("\n\n") if p in seen]
    assert sum(map(len, repeated)) < 0.01 * num_test
    assert text == load_text("python-docs")


def test_parts_are_disjoint_equal_and_in_order():
    whole = load_text("python-docs").train
    parts = [load_text("python-docs", part=(k, 3)).train for k in (1, 2, 3)]
    assert [article for part in parts for article in part] == whole
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert load_text("python-docs", part=(2, 3)).test == load_text("python-docs").test


def test_train_limit_counts_in_the_part():
    half = load_text("python-docs", part=(2, 2)).train
    assert load_text("python-docs", part=(2, 2), train_limit=5).train == half[:5]
    assert load_text("python-docs", train_limit=10**6) == load_text("python-docs")


@pytest.mark.parametrize("part", [(0, 2), (3, 2), (1, 0)])
def test_parts_that_there_cannot_be(part):
    with pytest.raises(ValueError, match=f"part is {part[0]} of {part[1]}; pass k of n"):
        load_text("python-docs", part=part)


def test_more_parts_than_articles():
    with pytest.raises(ValueError, match="training articles, fewer than the 1000 parts asked for"):
        load_text("python-docs", part=(1, 1000))


def test_train_limit_of_nothing():
    with pytest.raises(ValueError, match="train_limit is 0; pass at least 1"):
        load_text("python-docs", train_limit=0)


# -- data sets --------------------------------------------------------------------------------


def test_articles_begin_at_top_level_headings(write_splits):
    folder = write_splits(train=LINES, validation=LINES[:7], test=LINES[7:])
    text = load_text(str(folder))
    assert text.name == "wiki"
    assert text.train == ["".join(LINES[:8]), "".join(LINES[8:])]
    assert text.validation == ["".join(LINES[:7])]
    assert text.test == ["".join(LINES[7:])]


def test_text_before_the_first_heading_is_an_article(write_splits):
    folder = write_splits(train=["Preamble\n", *LINES], validation=LINES, test=LINES)
    text = load_text(str(folder))
    assert len(text.train) == 3
    assert "".join(text.train) == "Preamble\n" + "".join(LINES)


def test_rows_without_headings_are_articles(write_splits):
    folder = write_splits(train=["a b", "", "c\nd"], validation=["e"], test=["f"])
    assert load_text(str(folder)).train == ["a b", "c\nd"]


@pytest.mark.skipif(not WIKITEXT_2.is_dir(), reason="WikiText-2 does not lie beside the checkout")
def test_real_wikitext():
    text = load_text(str(WIKITEXT_2))
    assert [len(text.train), len(text.validation), len(text.test)] == [600, 60, 60]
    rows = datasets.load_dataset(str(WIKITEXT_2))["test"]["text"][:]
    assert "".join(text.test) == "".join(rows)
    assert all(article.lstrip("\n").startswith(" = ") for article in text.train)


@pytest.mark.parametrize(
    "data, name, configuration",
    [
        ("Salesforce/wikitext", "Salesforce/wikitext", "wikitext-2-v1"),
        ("Salesforce/wikitext:wikitext-103-v1", "Salesforce/wikitext", "wikitext-103-v1"),
        ("someone/stories", "someone/stories", None),
    ],
)
def test_hub_name_with_configuration(monkeypatch, data, name, configuration):
    asked = []

    def load_dataset(*names):
        asked.append(names)
        return datasets.DatasetDict(
            {
                s: datasets.Dataset.from_dict({"text": LINES})
                for s in ("train", "validation", "test")
            }
        )

    monkeypatch.setattr(hub, "_answers", lambda name, kind: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_text(data).name == (configuration or "stories")
    assert asked == [(name, configuration)]


def test_hub_name_without_network_says_what_to_pass(monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda name, kind: False)
    with pytest.raises(ValueError) as caught:
        load_text("nobody/there-is-no-such-text")
    assert "\n" not in str(caught.value)
    assert "cannot load the data set nobody/there-is-no-such-text" in str(caught.value)
    assert "--data python-docs, which needs no download" in str(caught.value)
    assert "a folder of parquet files with the column text" in str(caught.value)


def test_missing_column_is_named(write_splits):
    folder = write_splits(column="article", train=["a"], validation=["b"], test=["c"])
    with pytest.raises(ValueError, match=r"columns \['article'\], without \['text'\]; expected"):
        load_text(str(folder))


def test_missing_split_is_named(write_splits):
    folder = write_splits(train=["a"], validation=["b"])
    expected = r"splits \['train', 'validation'\]; expected train, validation and test: name the"
    with pytest.raises(ValueError, match=expected):
        load_text(str(folder))


def test_a_split_without_text(write_splits):
    folder = write_splits(train=["a"], validation=["", " \n"], test=["c"])
    with pytest.raises(ValueError, match="has no text in its validation split; pass another"):
        load_text(str(folder))


def test_a_column_of_numbers(write_splits):
    folder = write_splits(train=[1, 2], validation=[3], test=[4])
    with pytest.raises(ValueError, match="column text of .* holds int; expected strings"):
        load_text(str(folder))


# -- text files -------------------------------------------------------------------------------


def test_files_are_articles_and_the_last_tenth_is_held_out(tmp_path):
    texts = {f"{i:02}.txt": f"text {i}\r\n" for i in range(20)}
    text = load_text(str(write_files(tmp_path / "some", texts)))
    assert text.name == "some"
    assert text.train == [f"text {i}\r\n" for i in range(18)]  # bytes kept, in order
    assert text.validation == text.test == ["text 18\r\n", "text 19\r\n"]


def test_which_files_of_a_folder(tmp_path):
    texts = {"b/c.md": "md", "a.py": "py", "d.txt": "txt", "empty.txt": "\n"}
    write_files(tmp_path, {**texts, "no.json": "{}", ".git/x.txt": "hidden", "b/.y.md": "hidden"})
    text = load_text(str(tmp_path))
    assert text.train + text.test == ["py", "md", "txt"]


def test_glob(tmp_path):
    write_files(tmp_path, {"a.log": "one", "b/c.log": "two", "d.txt": "not this"})
    text = load_text(str(tmp_path / "**" / "*.log"))
    assert (text.train, text.test) == (["one"], ["two"])


def test_a_lone_file_is_cut_at_line_ends(tmp_path):
    lines = [f"line {i} of this text\n" for i in range(1000)]
    write_files(tmp_path, {"play.txt": "".join(lines)})
    text = load_text(str(tmp_path / "play.txt"))
    assert text.name == "play"
    assert (len(text.train), len(text.test)) == (NUM_PIECES - 2, 2)
    assert "".join(text.train + text.test) == "".join(lines)
    sizes = [len(piece) for piece in text.train + text.test]
    assert max(sizes) - min(sizes) < 3 * len(lines[0])
    assert all(piece.endswith("\n") for piece in text.train)


def test_a_file_with_headings_is_cut_there(tmp_path):
    lines = [line or " \n" for line in LINES]
    write_files(tmp_path, {"wiki.txt": "".join(lines)})
    text = load_text(str(tmp_path / "wiki.txt"))
    assert (text.train, text.test) == (["".join(lines[:8])], ["".join(lines[8:])])


@pytest.mark.parametrize(
    "data", ["./nowhere", "/no/such/folder", "nothing.txt", "~/no-such-text", ""]
)
def test_missing_file_or_folder(data):
    with pytest.raises(ValueError, match=f"no file or folder {data}; pass --data.*{WIKITEXT}"):
        load_text(data)


def test_a_folder_without_text(tmp_path):
    write_files(tmp_path, {"a.json": "{}"})
    with pytest.raises(ValueError, match="neither parquet files nor text files .*python-docs"):
        load_text(str(tmp_path))


def test_a_glob_without_files(tmp_path):
    with pytest.raises(ValueError, match="no text files match"):
        load_text(str(tmp_path / "*.txt"))


@pytest.mark.parametrize("text", ["", "\n \n", "a single line\n"])
def test_too_little_text(tmp_path, text):
    write_files(tmp_path, {"a.txt": text})
    for data in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(ValueError, match="at least 2 are needed, to hold one out"):
            load_text(str(data))


def test_a_file_in_another_encoding(tmp_path):
    (tmp_path / "a.txt").write_bytes("Zürich".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.txt is not text in UTF-8 \(.* at byte 1\)"):
        load_text(str(tmp_path / "a.txt"))
