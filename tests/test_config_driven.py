"""The page's scripts in the shapes of axolotl and torchtune train as those they were made of."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import preload

preload("mpcomp.hf", "transformers.models.llama.modeling_llama")
PAGE = Path(__file__).parent.parent / "docs" / "guide" / "trainer_and_friends.md"


def scripts_of(heading: str) -> tuple[str, str, tuple[int, int]]:
    """A section's script before and after, and the numbers of new and of old lines."""
    diff = PAGE.read_text().split(f"## {heading}\n")[1].split("```diff\n")[1].split("```")[0]
    old, new = (re.sub(rf"^[{sign} ]|^[-+].*\n", "", diff, flags=re.MULTILINE) for sign in "-+")
    return old, new, (diff.count("\n+"), diff.count("\n-"))


def trained(script: str, folder: str, dtype: torch.dtype) -> Any:
    """Runs a script; gives the model's weights, the losses, and bytes of messages."""
    os.chdir(folder)
    torch.set_default_dtype(dtype)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, str(PAGE), "exec"), names)
    model = names["model"]
    merged = model.merge() if hasattr(model, "merge") else model
    meters = [link.meter.train for link in getattr(model, "links", ())]
    sent = [(meter.wire_bytes, meter.dense_bytes) for meter in meters if meter.dense_bytes]
    return merged.state_dict(), names["losses"], sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heading", "lines"),
    [("axolotl-like scripts", (5, 3)), ("torchtune-like scripts", (5, 12))],
)
def test_a_turned_script_trains_as_the_one_before(ranks, tmp_path, monkeypatch, heading, lines):
    monkeypatch.chdir(tmp_path)
    old, new, counted = scripts_of(heading)
    assert counted == lines, "the page counts them"
    # in float64, as AdamW makes whole steps of small gradients, with their rounding; the causal
    # language model's loss takes its logits to float32, which the bound of the weights allows
    [(weights, losses, _)] = ranks(trained, 1, old, str(tmp_path), torch.float64)
    uncompressed = new.replace('"auto"', '"none"').replace(": auto", ": none")
    for script, same in (uncompressed, True), (new, False):
        dtype = torch.float64 if same else torch.float32
        for ours, told, sent in ranks(trained, 2, script, str(tmp_path), dtype):
            assert len(told) == len(losses) == 4
            assert told == pytest.approx(losses, rel=1e-7 if same else 0.05)
            if same:
                torch.testing.assert_close(ours, weights, rtol=1e-6, atol=1e-5)
            else:
                assert all(0 < wire < dense for wire, dense in sent) and sent
