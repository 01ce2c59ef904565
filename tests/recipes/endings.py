"""How a recipe ends in each of several processes, and what it leaves."""

import contextlib
import io
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file


class End(NamedTuple):
    """How a recipe ended in one process."""

    code: object
    out: str
    err: str


def end_of(main: Callable[[list[str]], None], command: list[str]) -> End:
    """In each process: runs a recipe with these options."""
    code: object = 0
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(command)
        except SystemExit as error:
            code = error.code
    return End(code, out.getvalue(), err.getvalue())


def check_error(ends: Sequence[End], message: str) -> None:
    """The first process says it in one line; the others end without a word."""
    assert [end.code for end in ends] == [1] * len(ends), ends
    first, *others = ends
    assert first.err.startswith("error: ") and first.err.count("\n") == 1, first.err
    assert message in first.err
    assert [(end.out, end.err) for end in others] == [("", "")] * len(others)


def check_success(ends: Sequence[End]) -> None:
    """The first process shows the run."""
    assert [end.code for end in ends] == [0] * len(ends), ends
    first, *others = ends
    assert first.out.count("run folder: ") == 1 and "error" not in first.err
    assert [(end.out, end.err) for end in others] == [("", "")] * len(others)


def stopped_in_step(
    main: Callable[[list[str]], None],
    command: list[str],
    trainer: type,
    step: Callable[[int], int],
    signal_number: signal.Signals = signal.SIGTERM,
) -> int:
    """Runs a recipe that gets a signal when the optimizer has made a step.

    Args:
        main: the recipe.
        command: its options.
        trainer: the class that it trains with.
        step: that step, counted from 1, from the number of an epoch's.
        signal_number: the signal.

    Returns:
        Steps that were made.
    """
    end_step, made = trainer.end_step, 0

    def asks_to_stop(self: Any) -> None:
        nonlocal made
        end_step(self)
        made += 1
        if made == step(self.steps_per_epoch):
            os.kill(os.getpid(), signal_number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "end_step", asks_to_stop)
        with pytest.raises(SystemExit) as caught:
            main(command)
    assert caught.value.code == 128 + signal_number
    return made


def history(folder: Path, without: tuple[str, ...] = ("seconds",)) -> list[dict[str, object]]:
    """The metrics, but not of these names, nor what ranks agree on, as one has nobody to."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:  # what replicas exchanged, without the time that took
        told = row.get("replicas", {})
        for name in [k for k in told if k.endswith("_s") or k == "scaling_efficiency"]:
            del told[name]
        row["wire_bytes"] -= row["account"].pop("agreements")["wire_bytes"]
    return [{k: v for k, v in row.items() if k not in without} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the checkpoint, of all ranks."""
    files = sorted((folder / "checkpoint").rglob("weights.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
