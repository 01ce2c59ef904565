"""One training within limited minutes: counted messages, a deadline, and what it leaves.

A run that cannot end in the time that is left says so after a few steps, and makes room for
another. If its checkpoint is small enough to be carried, it trains until the time is up, and the
same command goes on with it.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from tqdm.auto import tqdm

from mpcomp.links.build import method_of
from recipes import cifar10, wikitext
from recipes.bench.evidence import stamp
from recipes.bench.jobs import Reporter
from recipes.bench.workers import num_cores
from recipes.image_config import ImageConfig
from recipes.lab.counted import counted, is_counted
from recipes.lab.full_size import STUDIES, Config, Study
from recipes.lab.replicas import ReplicaImageTrainer, ReplicaTextTrainer, Together
from recipes.lab.study_runs import between_replicas
from recipes.ranks import Stopped
from recipes.run_folder import RunFolder
from recipes.training import Trainer

__all__ = ["OutOfTime", "Timed", "train", "trainer_of"]

#: Steps that are not looked at, as the first are slower; then those that are. Their median counts,
#: as a link that learns a basis looks for one in few steps, which take long.
_SKIPPED: Final = 10
_LOOKED_AT: Final = 20
#: Seconds that a run needs behind its last step.
_MARGIN_S: Final = 2.0
_MB: Final = 1e6


class OutOfTime(Exception):
    """The end of a run that cannot end by itself in the time that is left."""


class Timed(Trainer[Any]):
    """A trainer that counts what coders would code, and looks at the clock.

    Attributes:
        reporter: whose time it is; None for no limit.
        can_go_on: whether the run leaves a checkpoint that is small enough to be carried.
        counts_codes: whether some of its messages are counted, and not coded.
    """

    reporter: Reporter | None = None
    can_go_on: bool = False
    counts_codes: bool = False
    _num_ended: int = 0
    _ended_at: tuple[float, ...] = ()

    def methods(self, argument: str, specs: tuple[str, ...]) -> Any:
        """The methods, counted."""
        made = [counted(method_of(argument, spec)) for spec in specs]
        self.counts_codes |= any(is_counted(method) for method in made)
        return made[0] if len(made) == 1 else made

    def end_step(self) -> None:
        """Ends the run if it has to.

        Raises:
            OutOfTime: no time is left, or not enough for the rest, and nothing can be carried.
        """
        super().end_step()
        if self.reporter is None:
            return
        self._num_ended += 1
        left_s = self.reporter.left_s
        if self.can_go_on:
            if left_s <= 0:
                signal.raise_signal(signal.SIGTERM)  # a checkpoint behind this step, then the end
            return
        if left_s <= 0:
            raise OutOfTime(f"its time was over after {self._num_ended} steps")
        if _SKIPPED <= self._num_ended <= _SKIPPED + _LOOKED_AT:
            self._ended_at += (time.monotonic(),)
        if self._num_ended == _SKIPPED + _LOOKED_AT:
            step_s = statistics.median(b - a for a, b in pairwise(self._ended_at))
            steps = self.config.epochs * self.steps_per_epoch - self._num_ended
            needed_s = steps * step_s + _MARGIN_S
            if needed_s > left_s:
                raise OutOfTime(f"it needs {needed_s:.0f} s more, and has {left_s:.0f}")


class _Images(Timed, cifar10.ImageTrainer):
    """Images, at cuts."""


class _Text(Timed, wikitext.TextTrainer):
    """Text, at cuts."""


class _ReplicaImages(Timed, ReplicaImageTrainer):
    """Images, on replicas."""


class _ReplicaText(Timed, ReplicaTextTrainer):
    """Text, on replicas."""


def trainer_of(study: Study, config: Config) -> Timed:
    """The trainer of a run, with its data.

    Raises:
        ValueError: there are no such data, or they do not fit.
    """
    if isinstance(config, ImageConfig):
        of_images = _ReplicaImages if study.on_replicas else _Images
        return of_images(config, cifar10.load_data(config))
    of_text = _ReplicaText if study.on_replicas else _Text
    return of_text(config, wikitext.load_data(config))


def train(reporter: Reporter, name: str, row: str, seed: int, options: argparse.Namespace) -> None:
    """Trains one run in a process of its own, and says its row: its outcome, or why it stopped."""
    study = STUDIES[name]
    config = study.configuration(options, row, seed)
    # Runs that share the GPU share the cores too: more threads than cores are many times slower.
    torch.set_num_threads(1 if options.device == "cpu" else max(1, num_cores() // options.workers))
    torch.backends.cudnn.benchmark = True
    tqdm.set_lock(threading.RLock())  # its own is of all processes, and would be left behind
    with closing(trainer_of(study, config)) as trainer:
        said = _outcome(trainer, reporter, _folder(options.resume, name, row, seed), options)
    reporter.say(
        {
            **said,
            "counted": trainer.counts_codes,
            "history": [_slim(epoch) for epoch in trainer.history],
            "settings": {**config.to_json(), "data": Path(config.data).name},
            "from": stamp(options.commit),
        }
    )


def _outcome(
    trainer: Timed, reporter: Reporter, folder: RunFolder, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains, and says what came out, or why it stopped."""
    trainer.reporter = reporter
    trainer.can_go_on = _state_bytes(trainer) <= options.carry_mb * _MB
    if trainer.can_go_on and not folder.config.exists():
        folder.create(trainer.config.to_json())
    try:
        kept = folder if trainer.can_go_on else None
        summary = trainer.fit(kept, resume=True, progress=False)
    except OutOfTime as error:
        return {"stopped": str(error)}
    except Stopped:
        return {"stopped": _left(folder, options.carry_mb)}
    except FloatingPointError as error:  # a result as well
        said = {"diverged": str(error)}
    else:
        said = summary.to_json()
        if isinstance(trainer, Together):
            said |= between_replicas(trainer, trainer.together.report())
    if trainer.can_go_on:
        shutil.rmtree(folder.path)
    return said


def _slim(epoch: Mapping[str, Any]) -> dict[str, Any]:
    """An epoch, without what nobody reads of it."""
    return {name: value for name, value in epoch.items() if name not in ("lr", "num_elements")}


def _state_bytes(trainer: Trainer[Any]) -> int:
    """Bytes of weights and of the optimizer's moments, the least that a checkpoint takes."""
    moments = 1 if isinstance(trainer.optimizer, torch.optim.SGD) else 2
    return sum((1 + moments) * p.nbytes for p in trainer.pipe.parameters())


def _folder(resume: Path, name: str, row: str, seed: int) -> RunFolder:
    """Folder of a run's checkpoint."""
    words = "".join(c if c.isalnum() else "-" for c in f"{name}-{row}-{seed}")
    return RunFolder(resume / words)


def _left(folder: RunFolder, carry_mb: float) -> str:
    """The remains of a run that was cut off: its checkpoint, unless that is too large."""
    size = sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file()) / _MB
    if size <= carry_mb:
        return f"at its limit, with a checkpoint of {size:.1f} MB"
    shutil.rmtree(folder.path)
    return f"at its limit; its checkpoint of {size:.1f} MB is too large to be carried"
