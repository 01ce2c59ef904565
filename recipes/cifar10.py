"""Trains a ResNet cut into compressed stages, and evaluates it with compression on and off.

    python -m recipes.cifar10 --data digits --compare       # a minute, no download
    python -m recipes.cifar10 --act topk:0.1 --grad ef21+topk:0.1 --device cuda
    python -m recipes.cifar10 --resume runs/<folder>
    torchrun --nproc-per-node 4 -m recipes.cifar10 --data digits --compare   # a stage a process

Defaults are those of Rudakov et al. for CIFAR-10 (`Config`), with smaller ones for `--data digits`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from recipes import plots
from recipes.config import MODELS, PRECISIONS, Config
from recipes.ranks import Ranks, joined
from recipes.run_folder import RunFolder, write_json
from recipes.summary import Summary, label, table
from recipes.training import Trainer, load_data

OWN_OPTIONS = ("out", "resume", "compare", "stop_after")  # not part of a run's configuration
MACHINE_OPTIONS = ("data", "device", "threads")  # may differ from machine to machine


class Parser(argparse.ArgumentParser):
    """A mistake is an error in one line, like any other."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parse_args(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The options that were given, by name; what was not given is absent."""
    parser = Parser(
        prog="python -m recipes.cifar10",
        description="Train a ResNet cut into compressed stages; evaluate with and without them.",
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--data", help="hub name (default uoft-cs/cifar10), folder of parquet files, or digits")
    add("--model", choices=MODELS)
    add("--width", type=int, help="channels of the first stage (64 is ResNet's own)")
    add("--split", help="paper, a number of stages, block counts 3,2,2,3, or block names a,b,c")
    add("--chunks", type=int, help="microbatches of a batch")
    add("--act", nargs="+", metavar="SPEC", help="activations: one spec, or one for each boundary")
    add("--grad", nargs="+", metavar="SPEC", help="gradients: one spec, or one for each boundary")
    add("--warmup-steps", type=int, help="steps without compression")
    add("--warmup-epochs", type=int, help="epochs without compression")
    add("--epochs", type=int)
    add("--schedule-epochs", type=int, help="half a period of the cosine schedule")
    add("--eval-every", type=int, help="epochs between evaluations")
    add("--batch-size", type=int, help="of all replicas together")
    add("--drop-last", action=argparse.BooleanOptionalAction, help="in training only")
    add("--lr", type=float)
    add("--momentum", type=float)
    add("--weight-decay", type=float)
    add("--clip", type=float, metavar="NORM", help="largest global gradient norm")
    add("--precision", choices=PRECISIONS, help="auto: bf16 where the device computes in it")
    add("--channels-last", action=argparse.BooleanOptionalAction)
    add("--recompute", action=argparse.BooleanOptionalAction, help="activations, to save memory")
    add("--device", help="auto, cpu, cuda, or one for each stage (or process): cuda:0,cuda:1")
    add("--threads", type=int, help="of torch on the CPU")
    add("--crop-padding", type=int, help="pixels of the random crop; 0 crops nothing")
    add("--flip", action=argparse.BooleanOptionalAction, help="random horizontal flip")
    add("--aug-seeds", type=int, help="fixed augmentations of each image; 0: always a fresh one")
    add("--train-limit", type=int, metavar="IMAGES")
    add("--test-limit", type=int, metavar="IMAGES")
    add("--seed", type=int)
    several = parser.add_argument_group("several processes, under torchrun").add_argument
    several("--replicas", type=int, help="copies of the pipeline, each with its part of a batch")
    several("--schedule", help="GPipe, 1F1B, Interleaved1F1B, ... (default: the engine's own)")
    several(
        "--in-flight",
        type=lambda text: int(text) if text.isdecimal() else text,
        metavar="N",
        help="microbatches that the first stage has under way, or auto",
    )
    several("--timeout", type=float, metavar="S", help="seconds to wait for another process")
    add("--out", type=Path, metavar="FOLDER", help="run folder (default runs/<time>-<data>)")
    add("--resume", type=Path, metavar="FOLDER", help="go on with the run in this folder")
    add("--stop-after", type=int, metavar="EPOCHS", help="stop early, to be resumed later")
    add("--compare", action="store_true", help="train without compression first, to compare")
    return vars(parser.parse_args(argv))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the recipe; a mistake in the input ends it with one line."""
    with joined() as ranks:
        options = parse_args(argv)
        now = ranks.gather(time.strftime("%Y%m%d-%H%M%S"))[0]
        folder, config, compare = ranks.together(
            lambda: _resumed(options) if "resume" in options else _started(options, now)
        )
        stop_after = options.get("stop_after")
        _check_same(ranks, {**config.to_json(), "compare": compare, "stop_after": stop_after})
        runs = _train(config, folder, ranks, compare=compare, stop_after=stop_after)
        print(f"\n{table(runs)}\n\nrun folder: {folder.path}")


def _started(options: Mapping[str, Any], now: str) -> tuple[RunFolder, Config, bool]:
    """A new run: its folder, its configuration, and whether to compare."""
    chosen = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
    chosen |= {key: tuple(chosen[key]) for key in ("act", "grad") if key in chosen}
    config = Config.for_data(chosen.pop("data", Config.data), **chosen)
    compare = options.get("compare", False)
    if compare and config == config.uncompressed():
        raise ValueError(
            "--compare with act none and grad none compares a run with itself; pass --act or --grad"
        )
    folder = RunFolder(options.get("out", Path("runs") / f"{now}-{Path(config.data).name}"))
    folder.check()
    return folder, config, compare


def _resumed(options: Mapping[str, Any]) -> tuple[RunFolder, Config, bool]:
    """The run to go on with, which keeps its configuration."""
    if extra := sorted(set(options) - {"resume", "stop_after"}):
        given = ", ".join("--" + name.replace("_", "-") for name in extra)
        raise ValueError(
            f"--resume goes on with the configuration of {options['resume']}; drop {given}, or "
            "start a new run with --out"
        )
    folder = RunFolder(options["resume"])
    config = Config.from_json(folder.read_config())
    return folder, config, folder.baseline.config.exists()


def _check_same(ranks: Ranks, options: Mapping[str, Any]) -> None:
    """Raises ValueError if ranks were given different runs, to go on with for example."""
    said = ranks.gather(options)
    for rank, other in enumerate(said):
        for name in sorted(set(options) - set(MACHINE_OPTIONS)):
            if other[name] != said[0][name]:
                raise ValueError(
                    f"{name} is {other[name]} on rank {rank}, {said[0][name]} on rank 0; start "
                    "every rank with the same options"
                )


def _train(
    config: Config, folder: RunFolder, ranks: Ranks, *, compare: bool, stop_after: int | None
) -> dict[str, Summary]:
    """The compressed run, after the uncompressed one where both are to be compared."""
    dataset = ranks.together(lambda: load_data(config))
    jobs = [(config.uncompressed(), folder.baseline)] if compare else []
    jobs.append((config, folder))
    # All pipelines stand before a folder is made: a mistake in the last leaves nothing behind.
    trainers = [Trainer(job, dataset, ranks) for job, _ in jobs]

    def create_folders() -> None:
        for job, job_folder in jobs if ranks.writes else ():
            job_folder.create(job.to_json())

    ranks.together(create_folders)
    num_images = f"{len(dataset.train)} training images, {len(dataset.test)} test images"
    print(f"{num_images}; {trainers[-1].placement()}")
    runs: dict[str, Summary] = {}
    for trainer, (job, job_folder) in zip(trainers, jobs, strict=True):
        print(f"training with {label(job)} -> {job_folder.path}", flush=True)
        runs[label(job)] = trainer.fit(job_folder, resume=True, stop_after=stop_after)
    print()
    trainers[-1].pipe.report(show=True)
    if compare and ranks.speaks:
        plots.plot_curves({name: one.history for name, one in runs.items()}, folder.curves)
    if compare and ranks.writes and folder.summary.exists():
        baseline, own = (one.to_json() for one in runs.values())
        write_json(folder.summary, {**own, "uncompressed_run": baseline})
    return runs


if __name__ == "__main__":
    main()
