"""`recipes.lab.old_weights`: plain models whose weights are as old as a pipeline's."""

import copy
import dataclasses
import random

import pytest
import torch

import mpcomp
from recipes.decoder import equal_stages, token_batch, token_loss
from recipes.lab import old_weights
from recipes.lab.old_weights import ROWS, Aged
from recipes.lab.race import RaceConfig, decoder_of
from recipes.run_folder import read_json_lines

STEPS = 7


def config(*, tied: bool) -> RaceConfig:
    toy = {"data": "none", "model": "tiny", "target": 0.0, "max_steps": STEPS, "clip": None}
    return RaceConfig(**toy, tied=tied, unit=tied)


def aged(row: str) -> Aged:
    return Aged(config(tied=ROWS[row].tied), ROWS[row], torch.device("cpu"))


def batches():
    return [token_batch(batch=2, context=5, vocab=512, seed=seed) for seed in range(STEPS)]


def updating(module: torch.nn.Module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


@pytest.mark.parametrize("row", ["tied, of 1", "tied, small", "untied, of 1", "untied, small"])
def test_weights_are_as_old_as_those_of_a_pipeline(row):
    """Seven updates, of which the first stage's lack more than that."""
    entrant = aged(row)
    pipe = mpcomp.pipeline(
        copy.deepcopy(entrant.module), STEPS, split=equal_stages(8, 8), loss_fn=token_loss
    )
    assert len(pipe.stages) == 8 + ROWS[row].tied
    entrant.train(batches(), updating(entrant.module))
    x, y = (torch.cat(each) for each in zip(*batches(), strict=True))
    pipe.forward_backward(x, y, update=updating(pipe), updates=STEPS)
    state = pipe.state_dict()
    for name, value in entrant.module.state_dict().items():
        torch.testing.assert_close(state[name], value)


def test_nothing_old_is_plain_training_and_all_else_is_not():
    ends = {}
    for row in ROWS:
        if ROWS[row].tied and not ROWS[row].unit:
            entrant = aged(row)
            plain = copy.deepcopy(entrant.module)
            entrant.train(batches(), updating(entrant.module))
            ends[row] = entrant.module.state_dict()
    update = updating(plain)
    for x, y in batches():
        token_loss(plain(x), y).backward()
        update()
    none = ends.pop("tied, small, nothing old")
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(none[name], value)
    weight = "0.token.weight"
    others = [none, *ends.values()]
    assert not any(
        torch.allclose(one[weight], other[weight], rtol=1e-4)
        for i, one in enumerate(others)
        for other in others[:i]
    )


def test_blocks_are_given_as_much_with_a_tie_as_without():
    tokens, _ = token_batch(batch=8, context=64, vocab=512)
    for unit, size in ((True, 1.0), (False, 0.03)):
        model = decoder_of(dataclasses.replace(config(tied=True), unit=unit))
        assert model[0](tokens).std().item() == pytest.approx(size, rel=0.1)
        assert model[-1].to_logits.weight is model[0].token.weight


@pytest.mark.slow
def test_a_study_of_seconds(tmp_path, capsys):
    draw = random.Random(0)
    text, out = tmp_path / "text.txt", tmp_path / "old.jsonl"
    text.write_text("\n".join("".join(draw.choices("abcde ", k=400)) for _ in range(400)))
    rows = ["tied, of 1", "tied, of 1, waiting"]
    command = ["--data", str(text), "--seeds", "1", "--max-steps", "25", "--out", str(out)]
    old_weights.main([*command, "--rows", *rows])
    assert [line["row"] for line in read_json_lines(out)] == rows
    printed = capsys.readouterr().out
    assert all(row in printed for row in rows)
