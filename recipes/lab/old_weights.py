"""The cost of old weights, by the parts that have them: why a tied model learned so slowly.

    python -m recipes.lab.old_weights --data FOLDER --seeds 3

A plain decoder in one process takes asynchronous steps: each use of a weight is given it as old as
a pipeline of so many stages would have it, and its gradient comes as late (`mpcomp.engines.updates`
has the rule). Rows say which parts are old, when the tied weight moves, and how large the
embedding's output is when training begins: blocks add theirs to it.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mpcomp.engines.updates import lag_of, late_of
from recipes.decoder import Embedding, token_loss
from recipes.lab.race import Batch, Entrant, RaceConfig, decoder_of, load, race
from recipes.lab.race_report import render
from recipes.lab.study import Line, Runs, Study, data_of, given, run_study, study_parser
from recipes.lab.time_to_loss import UPDATES
from recipes.ranks import Ranks


class Row(NamedTuple):
    """A model, and its weights that are old.

    Attributes:
        tied: the head's weight is the embedding's.
        ends: the embedding and the head have old weights.
        blocks: the blocks have.
        waits: the tied weight moves when both uses' gradients of the same steps are there.
        unit: the embedding's output is as large as N(0, 1); else as a weight of the head, N(0, 1 /
            width).
    """

    tied: bool = True
    ends: bool = True
    blocks: bool = True
    waits: bool = False
    unit: bool = False


ROWS: Final[dict[str, Row]] = {
    "untied, of 1": Row(tied=False, unit=True),
    "untied, small": Row(tied=False),
    "tied, small, nothing old": Row(ends=False, blocks=False),
    "tied, small, only ends old": Row(blocks=False),
    "tied, small, only blocks old": Row(ends=False),
    "tied, small, waiting": Row(waits=True),
    "tied, small": Row(),
    "tied, of 1, nothing old": Row(ends=False, blocks=False, unit=True),
    "tied, of 1, waiting": Row(waits=True, unit=True),
    "tied, of 1": Row(unit=True),
}


class Aged(Entrant):
    """A plain decoder in asynchronous steps.

    Args:
        config: of the run.
        row: which weights are old.
        device: of the model.
    """

    num_cuts, act_bytes, grad_bytes = 1, 0.0, 0.0

    def __init__(self, config: RaceConfig, row: Row, device: torch.device) -> None:
        root = config.size.width**0.5
        self.module = model = decoder_of(config).to(device)
        embedding = model[0]
        assert isinstance(embedding, Embedding)
        if not row.unit:
            embedding.scale = 1.0
            if not row.tied:
                with torch.no_grad():
                    embedding.token.weight.div_(root)
        self._clip, num_blocks = config.clip, config.size.num_blocks
        num_stages = num_blocks + row.tied
        #: Of each use of a weight: its stage, updates that it lacks, and those it is late by.
        self._uses: dict[str, tuple[int, int, int]] = {}
        for name, _ in model.named_parameters(remove_duplicate=False):
            part = int(name.split(".")[0])
            is_end = name == "0.token.weight" or part == num_blocks + 1
            stage = min(max(0, part - 1), num_stages - 1)
            lag = lag_of(stage, num_stages, together=row.tied)
            late = late_of(stage, num_stages, together=row.tied)
            if row.tied and row.waits:
                lag, late = lag + late if stage == 0 else lag, 0
                if part == num_blocks + 1:
                    lag = late_of(0, num_stages, together=True)
            old = row.ends if is_end else row.blocks
            self._uses[name] = (stage, lag, late) if old else (stage, 0, 0)

    def train(self, batches: Sequence[Batch], update: Callable[[], None]) -> None:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        oldest = max(lag for _, lag, _ in self._uses.values())
        versions: deque[dict[str, Tensor]] = deque(maxlen=oldest + 1)
        gathered: list[list[tuple[str, Tensor]]] = [[] for _ in batches]
        for t, (x, y) in enumerate(batches):
            versions.append({name: each.detach().clone() for name, each in parameters.items()})
            given = {
                name: versions[-1 - min(t, lag)][name].clone().requires_grad_()
                for name, (_, lag, _) in self._uses.items()
            }
            output = functional_call(self.module, given, (x,), tie_weights=False)
            grads = torch.autograd.grad(token_loss(output, y), list(given.values()))
            for (name, (_, _, late)), grad in zip(self._uses.items(), grads, strict=True):
                gathered[min(t + late, len(batches) - 1)].append((name, grad))
            for name, grad in gathered[t]:
                parameter = parameters[name]
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            self._clip_gradients(parameters)
            update()

    def _clip_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        """By the norm of each stage; a tied weight is the first one's."""
        of_stages: dict[int, set[nn.Parameter]] = {}
        for name, (stage, _, _) in sorted(self._uses.items(), key=lambda use: use[1][0]):
            if all(parameters[name] not in each for each in of_stages.values()):
                of_stages.setdefault(stage, set()).add(parameters[name])
        for own in of_stages.values():
            if self._clip is not None:
                nn.utils.clip_grad_norm_(own, self._clip)

    @torch.no_grad()
    def losses(self, batches: Sequence[Batch]) -> dict[str, float]:
        losses = [token_loss(self.module(x), y).item() for x, y in batches]
        return {"on": sum(losses) / len(losses)}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the table; `--table` prints only."""
    options = parse_args(argv)
    study = Study(
        parse=lambda _: options,
        runs=runs,
        train=train,
        settings=settings,
        same_settings=True,
        render=lambda lines: render(lines, None, None, list(ROWS)),
    )
    run_study(study, argv)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the study."""
    parser = study_parser("old_weights", __doc__, ROWS, seeds=3)
    add = parser.add_argument
    add("--data", default="python-docs", help="folder, text file or python-docs")
    add("--max-steps", type=int, default=200, help="(default %(default)s)")
    add("--lr", type=float, help="after its rise, constant")
    return parser.parse_args(argv)


def runs(options: argparse.Namespace, num_processes: int) -> Runs[RaceConfig]:
    """All rows of a seed before the next."""
    return {
        (row, seed): RaceConfig(
            **{
                **given(options, RaceConfig),
                **{"model": "tiny", "precision": "fp32", "seed": seed, "target": 0.0},
                **{
                    "tied": ROWS[row].tied,
                    "unit": ROWS[row].tied,
                    "rival": row,
                    "updates": UPDATES,
                },
            }
        )
        for seed in range(options.seeds)
        for row in options.rows
    }


def settings(config: RaceConfig, options: argparse.Namespace) -> Line:
    """Settings that all lines of a results file share."""
    names = ("model", "max_steps", "lr", "clip", "read_every", "eval_blocks", "rise")
    shared: dict[str, Any] = {name: getattr(config, name) for name in names}
    return shared


def train(config: RaceConfig, settings: Line, ranks: Ranks) -> Line:
    """Trains one row; the device is the CPU."""
    assert config.rival is not None
    row, device = ROWS[config.rival], torch.device("cpu")
    text = data_of(config, load, ranks)
    return race(config, text, device, lambda config, device: Aged(config, row, device))


if __name__ == "__main__":
    main()
