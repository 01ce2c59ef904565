"""The fine-tuning study on a tiny model: its grid, its bytes, its verdicts."""

import math
import random
from pathlib import Path

import pytest
import torch

from mpcomp.core.account import Account
from mpcomp.core.sent import Sent
from recipes.lab import wikitext_study
from recipes.lab.account import account_of
from recipes.lab.cut_grid import order_of_runs
from recipes.lab.study_table import Results, render
from recipes.lab.wikitext_claims import TABLE
from recipes.run_folder import read_json_lines
from recipes.tokens import Blocks, tokenizer_of
from recipes.wikitext import TextData, load_data, run

WORDS = ["the", "a", "cut", "stage", "link", "model", "sends", "learns", "large", "small", "slow"]
HIDDEN, SEQ_LEN, BATCH = 16, 16, 4


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with a model of random weights, its tokenizer, and text."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("base")
    draw = random.Random(0)
    text = "".join(" ".join(draw.choices(WORDS, k=12)) + ".\n" for _ in range(90))
    (folder / "words.txt").write_text(text)
    tokenizer = tokenizer_of("bpe", [text], vocab_size=270)
    sizes = {"n_layer": 4, "n_embd": HIDDEN, "n_head": 2, "n_positions": SEQ_LEN}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, **sizes))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def command(base, tmp_path):
    """The options of a study of seconds, with more of them."""

    def options(*more: object) -> list[str]:
        few = {
            **{"--model": base / "model", "--data": base / "words.txt", "--seq-len": SEQ_LEN},
            **{"--batch-size": BATCH, "--chunks": 2, "--epochs": 2, "--train-blocks": 12},
            **{"--eval-blocks": 5, "--precision": "fp32", "--device": "cpu", "--workers": 0},
            **{"--out": tmp_path / "study.jsonl", "--lr": 0.01},
        }
        return [str(one) for pair in few.items() for one in pair] + [str(one) for one in more]

    return options


def test_every_row_trains_and_counts_its_bytes(command, tmp_path, capsys):
    wikitext_study.main(command("--seeds", 1))
    lines = {line["row"]: line for line in read_json_lines(tmp_path / "study.jsonl")}
    rows = wikitext_study.ROWS
    assert set(lines) == set(rows)
    assert not any("diverged" in line for line in lines.values())
    dense = 2 * 3 * BATCH * SEQ_LEN * HIDDEN * 4  # three cuts, both ways, fp32
    tie = 2 * 320 * HIDDEN * 4
    # The head sends all of its rows; the embedding those of the batch's tokens, with places.
    rows_sent = (0.5, 0.5 + 0.5 * (BATCH * SEQ_LEN + 1) / 320)
    for row, line in lines.items():
        assert line["cut_dense_bytes_per_step"] == dense and line["steps"] == 6
        also = rows[row].also
        assert line["tie_dense_bytes_per_step"] == (0 if "lora" in also else tie)
        sent = line["tie_bytes_per_step"] / tie
        if "lora" in also:  # the embedding is not trained
            assert sent == 0
        else:
            least, most = (0, 0.6) if "tie" in also else rows_sent  # of bf16, half of fp32
            assert least / 2 < sent < most / 2
        of_tie = line["tie_bytes_per_step"]
        if rows[row].warmup:  # one of two epochs went dense, in fp32
            both = [(of_tie + share * tie) / 2 for share in rows_sent]
            of_tie = line["wire_bytes"] / 6 - line["cut_bytes_per_step_overall"]
            assert both[0] < of_tie < both[1]
        overall = line["cut_bytes_per_step_overall"] + of_tie
        assert line["wire_bytes"] == pytest.approx(6 * overall, rel=1e-3)
        assert line["cut_ratio"] == pytest.approx(line["cut_bytes_per_step"] / dense)
        if rows[row].warmup:  # one of two epochs went dense, with headers
            each = (line["cut_ratio"] + 1) / 2
            assert line["cut_ratio_overall"] == pytest.approx(each, rel=0.01)
        else:
            assert line["cut_ratio_overall"] == line["cut_ratio"]
        assert line["loss_compressed"] == pytest.approx(math.log(line["perplexity_compressed"]))
        assert len(line["losses"]) == 2 and line["losses"][1] == line["loss"]
    for row in rows.keys() - {"bf16", "LoRA, bf16"}:
        assert lines[row]["cut_ratio"] < 0.6, row  # of fp32: Top-50 % sends places beside values
    assert lines["bf16"]["perplexity_uncompressed"] < lines["bf16"]["perplexity_before"]
    on, off = (lines["bf16"][f"perplexity_{word}"] for word in ("compressed", "uncompressed"))
    assert on == pytest.approx(off, rel=0.01)
    account = account_of(lines["bf16"])  # bytes and costs are of this run
    sent = lines["bf16"]["wire_bytes"] / 6  # rows that are left out count as numbers, too
    assert account.below_bf16 == pytest.approx((dense + tie) / 2 / sent, rel=0.05)
    # The memory of AQ-SGD is full after the warm-up: bytes are those without it.
    for bits in ("fw4-bw8", "fw2-bw8", "fw2 channels-bw8"):
        own, plain = (lines[f"{bits}, {word}"] for word in ("AQ-SGD", "after warm-up"))
        assert own["cut_bytes_per_step"] == plain["cut_bytes_per_step"]
        assert own["losses"][0] == plain["losses"][0]
        assert own["losses"][1] != plain["losses"][1]
    printed = capsys.readouterr().out
    assert "The gradients of the tied embedding are 0.041 MB of each step" in printed
    assert "Before fine-tuning the perplexity is " in printed


def test_uncompressed_row_is_a_plain_run(command, tmp_path):
    """What the study adds (a perplexity before, counts of bytes) changes nothing."""
    options = command("--rows", "bf16", "--seeds", 2)
    wikitext_study.main(options)
    for seed, line in enumerate(read_json_lines(tmp_path / "study.jsonl")):
        config = wikitext_study.configuration(wikitext_study.parse_args(options), "bf16", seed)
        text = wikitext_study.some_blocks(load_data(config), 12)
        assert len(text.train) == 12
        assert run(config, text=text, progress=False).on == line["perplexity_compressed"]


def test_finished_runs_are_skipped_and_first_rows_come_first(command, tmp_path):
    rows = ["--epochs", "1", "--rows", "top 50 %", "bf16"]
    wikitext_study.main(command(*rows, "--seeds", 1))
    out = tmp_path / "study.jsonl"
    before = read_json_lines(out)
    wikitext_study.main(command(*rows, "--seeds", 2))
    after = read_json_lines(out)
    assert after[:2] == before
    order = [(line["row"], line["seed"]) for line in after]
    assert order == [("bf16", 0), ("top 50 %", 0), ("bf16", 1), ("top 50 %", 1)]
    assert order_of_runs(["a", "b", "c"], ["c", "x"], 2) == [
        *[("c", 0), ("c", 1), ("a", 0), ("b", 0), ("a", 1), ("b", 1)],
    ]
    assert set(wikitext_study.FIRST) < set(wikitext_study.ROWS)


def test_another_model_or_fewer_blocks_are_other_settings(command, tmp_path, base):
    from transformers import GPT2LMHeadModel

    one = ["--rows", "bf16", "--seeds", 1]
    wikitext_study.main(command(*one))
    with pytest.raises(SystemExit, match="other settings: {'train_blocks': 12}"):
        wikitext_study.main(command(*one, "--train-blocks", 8))
    moved = tmp_path / "moved"
    moved.symlink_to(base / "model")
    wikitext_study.main(command(*one, "--model", moved))  # the same weights elsewhere
    model = GPT2LMHeadModel.from_pretrained(base / "model")
    model.transformer.h[0].ln_1.bias.data += 1
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit, match="other settings: {'model': 'weights "):
        wikitext_study.main(command(*one, "--model", tmp_path / "other"))
    assert len(read_json_lines(tmp_path / "study.jsonl")) == 1


def test_blocks_are_spread_over_the_text():
    ids = torch.arange(10)[:, None].expand(-1, 2)
    text = TextData(train=Blocks(ids, ids), held_out=Blocks(ids, ids), tokenizer=None, name="")
    for limit, expected in ((1, [0]), (4, [0, 2, 5, 7]), (10, list(range(10)))):
        chosen = wikitext_study.some_blocks(text, limit)
        assert chosen.train.input_ids[:, 0].tolist() == expected
        assert chosen.train.labels[:, 1].tolist() == expected
        assert len(chosen.held_out) == 10


def test_more_blocks_than_there_are(command, tmp_path):
    with pytest.raises(SystemExit, match="train_blocks is 5000, but words has .* pass --train-bl"):
        wikitext_study.main(command("--rows", "bf16", "--train-blocks", 5000))
    assert not (tmp_path / "study.jsonl").exists()


def test_divergence_is_a_result(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wikitext_study.TextTrainer, "judge", lambda self: math.inf)
    wikitext_study.main(command("--rows", "bf16", "--seeds", 1))
    (line,) = read_json_lines(tmp_path / "study.jsonl")
    assert line["diverged"] == "the perplexity, on, is inf"
    assert "| bf16 (1 diverged) | | | 0 | | | | |" in capsys.readouterr().out


def test_bytes_after_the_warm_up():
    history = [
        {"account": Account(Sent(*cuts), Sent(*ties)).to_dict()["parts"]}
        for cuts, ties in (
            ((100, 100, 25), (8, 8, 2)),
            ((110, 200, 50), (16, 16, 4)),
            ((120, 300, 75), (24, 24, 6)),
        )
    ]
    found = wikitext_study.traffic_of(history, 1, steps_per_epoch=2)
    assert found == {
        "cut_bytes_per_step": 5.0,
        "cut_dense_bytes_per_step": 50.0,
        "cut_elements_per_step": 12.5,
        "tie_bytes_per_step": 4.0,
        "tie_dense_bytes_per_step": 4.0,
        "tie_elements_per_step": 1.0,
        "cut_bytes_per_step_overall": 20.0,
        "cut_ratio": 0.1,
        "cut_ratio_overall": 0.4,
    }
    for warmup in (0, 3):
        assert wikitext_study.traffic_of(history, warmup, 2)["cut_ratio"] == 0.4


def line(row: str, seed: int, on: float, off: float, loss: float = 4.0) -> dict[str, object]:
    return {
        **{"row": row, "seed": seed, "loss": loss},
        **{"perplexity_compressed": on, "perplexity_uncompressed": off},
        **{"cut_bytes_per_step": 1e6, "cut_dense_bytes_per_step": 4e6, "cut_ratio": 0.25},
        **{"tie_bytes_per_step": 4e6, "tie_dense_bytes_per_step": 4e6},
    }


def test_table_and_verdicts_by_hand():
    harm = ((0, 0.349), (1, 0.35), (2, 0.351))  # of the seeds, off at inference
    lines = [
        *(line("none", seed, on=100.0, off=100.0) for seed in range(3)),
        *(line("top 10 %", n, on=100 * math.exp(0.2), off=100 * math.exp(x)) for n, x in harm),
        *(line("fw2-bw8, AQ-SGD", seed, on=900.0, off=101.0, loss=4.01) for seed in range(3)),
        *(line("fw2-bw8, after warm-up", seed, on=140.0, off=99.0, loss=4.2) for seed in range(3)),
    ]
    text = render(Results.of(lines, order=list(wikitext_study.ROWS)), TABLE)
    shown = text.splitlines()
    assert shown[0] == (
        "| compression | perplexity, on | perplexity, off | n | loss, last epoch | MB/step | "
        "below bf16 | MB/step, cuts alone | below bf16, cuts |"
    )
    assert (
        shown[2]
        == "| none | 100.00 ± 0.00 | 100.00 ± 0.00 | 3 | 4.000 | 5.000 | 0.8 | 1.000 | 2.0 |"
    )
    verdicts = {tuple(row.split(" | ")[1:3]): row.split(" | ")[3:] for row in shown}
    expected = {
        ("top 10 %: no severe harm", "(top 10 %) − (none) < 10"): (20.0, "not confirmed"),
        (
            "top 10 %: needs compression at inference",
            "(top 10 %, off at inference) − (top 10 %) > 2",
        ): (15.0, "confirmed"),
        (
            "fw2-bw8: no loss of quality (one scale)",
            "(fw2-bw8, AQ-SGD, off at inference) − (none, off at inference) < 2",
        ): (1.0, "confirmed"),
        (
            "fw2-bw8: worse without AQ-SGD (one scale)",
            "(fw2-bw8, after warm-up, off at inference) − (fw2-bw8, AQ-SGD, off at inference) > 0",
        ): (-2.0, "not confirmed"),
        (
            "fw2-bw8: worse without AQ-SGD (one scale)",
            "(fw2-bw8, after warm-up, in training) − (fw2-bw8, AQ-SGD, in training) > 0",
        ): (19.0, "confirmed"),
    }
    for claim, (effect, found) in expected.items():
        measured, said = verdicts[claim]
        assert float(measured.split(" ± ")[0]) == pytest.approx(effect, abs=0.01)
        assert said == f"{found} |"
    assert "EF21" not in text  # nothing is claimed about rows that did not run
    assert "One scale" in text and "Before fine-tuning" not in text


@pytest.mark.parametrize(("after", "learned"), [(100.5, False), (90.0, True)])
def test_no_loss_means_little_where_nothing_is_learned(after, learned):
    plain = {**line("none", 0, on=after, off=after), "losses": [5.5, 5.25]}
    text = render(Results.of([{**plain, "perplexity_before": 100.0}]), TABLE)
    assert (
        f"Before fine-tuning the perplexity is 100.00, after it, uncompressed, {after:.2f}" in text
    )
    assert ("nothing is learned" in text) is not learned
    assert ("from 5.50 in the first epoch to 5.25 in the last" in text) is not learned
