"""The page's script for Lightning, on two ranks, trains as the script that it was made of."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is no dependency: pip install lightning")

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "trainer_and_friends.md"
DIFF = PAGE.read_text().split("## Lightning\n")[1].split("```diff\n")[1].split("```")[0]
OLD, NEW = (re.sub(rf"^[{sign} ]|^[-+].*\n", "", DIFF, flags=re.MULTILINE) for sign in "-+")


def trained(script: str, folder: str) -> Any:
    """Runs a script; gives the model's weights, what was logged, and a pipeline's bytes."""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, str(PAGE), "exec"), names)
    model, trainer = names["model"], names["trainer"]
    merged = model.merge() if hasattr(model, "merge") else model
    sent = [
        (link.meter.train.wire_bytes, link.meter.train.dense_bytes)
        for link in getattr(model, "links", ())
    ]
    return merged.state_dict(), {k: v.item() for k, v in trainer.callback_metrics.items()}, sent


@pytest.mark.slow
def test_the_pages_script_trains_as_the_one_before(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (DIFF.count("\n+"), DIFF.count("\n-")) == (12, 7), "the page counts them"
    weights, logged, _ = trained(OLD, str(tmp_path))
    plain = NEW.replace('"auto"', '"none"')
    for script, same in (plain, True), (NEW, False):
        for ours, told, sent in ranks(trained, 2, script, str(tmp_path)):
            assert told.keys() == logged.keys() == {"loss", "val"}
            if same:
                torch.testing.assert_close(ours, weights)
                assert told == pytest.approx(logged, rel=1e-5)
            else:
                assert told["val"] == pytest.approx(logged["val"], rel=0.1)
                (counted,) = [pair for pair in sent if pair[1]]  # where this rank sends
                assert 0 < counted[0] < counted[1]
