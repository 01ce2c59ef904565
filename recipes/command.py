"""The command line that recipes share: options, a new or a resumed run, and a run to compare with.

    if __name__ == "__main__":
        run_recipe(RECIPE)

A mistake ends with one line on every rank, and leaves no folder behind.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, NoReturn, TypeVar

import mpcomp
from mpcomp.data_parallel.network import PATHS
from mpcomp.monitor.step_log import tensorboard_writer
from mpcomp.view.report import write_report
from recipes import plots
from recipes.config import LISTS, OPTIMIZERS, PRECISIONS, SMALL, AnyConfig, check_at_least
from recipes.launcher import may_restart, num_restarts
from recipes.ranks import RENDEZVOUS_S, Ranks, joined
from recipes.run_folder import RunFolder, write_json
from recipes.summary import Summary, seconds_a_step, speeds, table
from recipes.training import Trainer

AnyData = TypeVar("AnyData")

# Groups of options in --help, in its order.
MODEL: Final = "model"
DATA: Final = "data"
CUTS: Final = "cuts and compression"
TRAINING: Final = "training"
OPTIMIZER: Final = "optimizer and learning rate"
OUTPUT: Final = "output, checkpoints and resumption"
RANKS: Final = "ranks and links, under torchrun"
REPLICAS: Final = "replicas, under torchrun"
GROUPS: Final = (MODEL, DATA, CUTS, TRAINING, OPTIMIZER, OUTPUT, RANKS, REPLICAS)

# Not part of a run's configuration.
OWN_OPTIONS: Final = ("out", "resume", "compare", "stop_after", "heal", "trace", "tensorboard")
# May be given with --resume.
RESUMED_OPTIONS: Final = {"resume", "stop_after", "heal", "trace", "tensorboard", "epochs"}
# May differ from machine to machine.
MACHINE_OPTIONS: Final = ("data", "device", "threads")


class Parser(argparse.ArgumentParser):
    """Options in groups; those not given are absent; a mistake is an error in one line."""

    def __init__(self, recipe: str, description: str) -> None:
        super().__init__(
            prog=f"python -m recipes.{recipe}",
            usage="%(prog)s [options]",  # all of them stand below, in their groups
            description=description,
            argument_default=argparse.SUPPRESS,
        )
        self._by_title = {title: self.add_argument_group(title) for title in GROUPS}

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")

    def group(self, title: str) -> Callable[..., argparse.Action]:
        """The ``add_argument`` of one of `GROUPS`."""
        return self._by_title[title].add_argument

    def add_common(self) -> None:
        """The options that every recipe has."""
        add = self.group(CUTS)
        add("--split", help="paper, a number of stages, block counts 3,2,2,3, or names a,b,c")
        add("--chunks", type=int, help="microbatches of a batch")
        for name, what in (("--act", "activations"), ("--grad", "gradients")):
            add(
                name,
                nargs="+",
                metavar="SPEC",
                help=f"{what}: auto, auto:scratch, auto:relu, auto:memory or a spec; one for all, "
                "or one a boundary",
            )
        add("--budget", help='quality that auto may cost, "0.1 %%" to "5 %%"')
        add("--warmup-steps", type=int, help="steps without compression")
        add("--warmup-epochs", type=int, help="epochs without compression")
        add(
            "--compare",
            nargs="?",
            const="none",
            metavar="SPEC",
            help="train with this at the cuts first, to compare (as bf16; without one: none)",
        )
        add = self.group(TRAINING)
        add("--epochs", type=int)
        add("--eval-every", type=int, help="epochs between evaluations")
        add("--batch-size", type=int, help="of all replicas together")
        add(
            "--updates",
            type=int,
            metavar="N",
            help="steps in a call, between which the pipeline does not drain (asynchronous)",
        )
        add("--seed", type=int)
        add("--precision", choices=PRECISIONS, help="auto: bf16 where the device computes in it")
        add("--recompute", action=argparse.BooleanOptionalAction, help="activations, for memory")
        add("--device", help="auto, cpu, cuda, or one for each stage (or process): cuda:0,cuda:1")
        add("--threads", type=int, help="of torch on the CPU")
        add = self.group(OPTIMIZER)
        add(
            "--optimizer",
            choices=OPTIMIZERS,
            help="nadam: for --updates; lars, lamb: for large batches; muon: hidden matrices, "
            "AdamW the rest; pass --lr",
        )
        add("--lr", type=float)
        add("--base-batch", type=int, metavar="N", help="that lr is for: it is times batch / N")
        add("--lr-warmup-epochs", type=int, help="in which the learning rate rises, step by step")
        add(
            "--lr-milestones",
            type=int,
            nargs="+",
            metavar="EPOCH",
            help="after so many epochs the rate falls, in place of the recipe's own schedule",
        )
        add("--lr-factor", type=float, help="by which it falls there (default 0.1)")
        add("--momentum", type=float, help="of sgd and lars")
        add("--nesterov", action=argparse.BooleanOptionalAction, help="of sgd and lars")
        add("--weight-decay", type=float)
        add(
            "--clip",
            type=float,
            metavar="NORM",
            help="largest global gradient norm; with --updates, of a stage",
        )
        add = self.group(OUTPUT)
        add("--out", type=Path, metavar="FOLDER", help="run folder (default runs/<time>-<data>)")
        add("--resume", type=Path, metavar="FOLDER",
            help="go on with the run in this folder; with --epochs for longer")  # fmt: skip
        add("--save-every-steps", type=int, metavar="N", help="beside the end of each epoch")
        add("--save-every-minutes", type=float, metavar="M", help="likewise")
        add("--keep", type=int, metavar="K", help="checkpoints (default 1, the last)")
        add("--heal", action="store_true", help="go on by itself after a process is killed")
        add("--stop-after", type=int, metavar="EPOCHS", help="stop early, to be resumed later")
        add("--trace", type=int, metavar="STEPS", help="time what each rank does in so many steps")
        add("--tensorboard", action="store_true", help="figures of each step, in the run folder")
        add = self.group(RANKS)
        add("--schedule", help="GPipe, 1F1B, Interleaved1F1B, ... (default: the engine's own)")
        add(
            "--in-flight",
            type=lambda text: int(text) if text.isdecimal() else text,
            metavar="N",
            help="microbatches that the first stage has under way, or auto",
        )
        add("--connections", type=int, metavar="N",
            help="of each cut, each way; several are faster where the latency is long")  # fmt: skip
        add("--timeout", type=float, metavar="S", help="seconds to wait for another process")
        add("--mbps", type=float, metavar="RATE",
            help="simulate links of so many Mbit/s each way, on one machine")  # fmt: skip
        add = self.group(REPLICAS)
        add("--replicas", type=int, help="copies of the pipeline, each with part of a batch")
        add("--dp-comp", metavar="SPEC", help="what compresses gradients between replicas")
        add("--dp-path", choices=PATHS, help="of these gradients (default: the cheapest)")
        add("--dp-small", choices=SMALL, help="round those too small to compress to 16 bits")
        add("--per-machine", type=int, metavar="N", help="replicas on a machine: two levels")
        add("--shard", action="store_true",
            help="replicas share parameters and the optimizer's state (ZeRO)")  # fmt: skip
        add("--param-comp", metavar="SPEC", help="of parameters that sharing replicas gather")


@dataclass(frozen=True, kw_only=True)
class Recipe(Generic[AnyConfig, AnyData]):
    """A recipe: its trainer, its data, and its options.

    Attributes:
        parser: with its own options and the common ones.
        config: of its runs.
        configure: makes one from the options that were given.
        load: what the runs of a configuration are trained and evaluated on.
        trainer: makes that of a run.
        describe: the data in words.
        per_step: whether the table has the bytes of a step.
    """

    parser: Parser
    config: type[AnyConfig]
    configure: Callable[[Mapping[str, Any]], AnyConfig]
    load: Callable[[AnyConfig], AnyData]
    trainer: Callable[[AnyConfig, AnyData, Ranks], Trainer[AnyConfig]]
    describe: Callable[[AnyData], str]
    per_step: bool = False


def run_recipe(recipe: Recipe[AnyConfig, AnyData], argv: Sequence[str] | None = None) -> None:
    """Runs the recipe; a mistake in the input ends it with one line."""
    if _before_all(argv).heal:
        mpcomp.heal(lambda: _run(recipe, argv))
    else:
        _run(recipe, argv)


def _run(recipe: Recipe[AnyConfig, AnyData], argv: Sequence[str] | None) -> None:
    with joined(_timeout(argv)) as ranks:
        options = vars(recipe.parser.parse_args(argv))
        now = ranks.gather(time.strftime("%Y%m%d-%H%M%S"))[0]
        folder, config, compare = ranks.together(
            lambda: (
                _resumed(recipe, options) if "resume" in options else _started(recipe, options, now)
            )
        )
        how = {name: options.get(name) for name in ("stop_after", "trace", "tensorboard")}
        check_at_least("trace", how["trace"], 1)
        _check_same(ranks, {**config.to_json(), "compare": compare, **how})
        runs = _train(recipe, config, folder, ranks, compare=compare, **how)
        print(f"\n{table(runs, per_step=recipe.per_step)}")
        if config.mbps is not None and ranks.speaks:
            of_runs = (folder,) if compare is None else (folder.baseline, folder)
            seconds = [seconds_a_step(one, config.updates) for one in of_runs]
            print(f"\n{speeds(runs, seconds, config.mbps)}")
        print(f"\nrun folder: {folder.path}")
        print(f"page: {folder.page}")


def _before_all(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options that are needed before there is anybody to read all options with."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--timeout", nargs="?")
    parser.add_argument("--heal", action="store_true")
    return parser.parse_known_args(argv)[0]


def _timeout(argv: Sequence[str] | None) -> float:
    given = _before_all(argv).timeout
    try:
        return float(given) if given is not None and float(given) > 0 else RENDEZVOUS_S
    except ValueError:  # which is said once all are there
        return RENDEZVOUS_S


def _started(
    recipe: Recipe[AnyConfig, AnyData], options: Mapping[str, Any], now: str
) -> tuple[RunFolder, AnyConfig, str | None]:
    """A new run: its folder, its configuration, and what is at the cuts of one to compare with."""
    chosen = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
    chosen |= {key: tuple(chosen[key]) for key in LISTS if key in chosen}
    if chosen.get("split") == "1":  # replicas alone: no cut to compress at
        chosen = {"act": ("none",), "grad": ("none",), **chosen}
    config = recipe.configure(chosen)
    compare = options.get("compare")
    if compare is not None and config == config.compared_to(compare):
        raise ValueError(
            f"--compare {compare} compares a run with itself; pass --act, --grad or --dp-comp"
        )
    name = re.sub(r"[^\w.]+", "-", Path(config.data).name)  # of a glob, or with a configuration
    folder = RunFolder(options.get("out", Path("runs") / f"{now}-{name}"))
    if may_restart() and "out" not in options:
        raise ValueError(
            "--heal or torchrun's --max-restarts, and no --out: pass --out a folder, in which a "
            "restarted run finds its checkpoint"
        )
    if num_restarts() and folder.config.exists():
        was = recipe.config.from_json(folder.read_config())
        if was == config:
            return folder, config, compare  # the next attempt at the same run
    folder.check()
    return folder, config, compare


def _resumed(
    recipe: Recipe[AnyConfig, AnyData], options: Mapping[str, Any]
) -> tuple[RunFolder, AnyConfig, str | None]:
    """The run to go on with, which keeps its configuration, as does the one to compare with."""
    if extra := sorted(set(options) - RESUMED_OPTIONS):
        given = ", ".join("--" + name.replace("_", "-") for name in extra)
        raise ValueError(
            f"--resume goes on with the configuration of {options['resume']}; drop {given}, or "
            "start a new run with --out"
        )
    folder = RunFolder(options["resume"])
    config = recipe.config.from_json(folder.read_config())
    if "epochs" in options:
        config = config.extended(options["epochs"])
    if not folder.baseline.config.exists():
        return folder, config, None
    return folder, config, recipe.config.from_json(folder.baseline.read_config()).act[0]


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


@contextmanager
def _tensorboard(pipe: mpcomp.Pipeline, folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Has figures of each step written into the run folder, by the rank that writes it."""

    def writer() -> Any:
        return tensorboard_writer(folder.path / "tensorboard") if pipe.rank == 0 else None

    with ranks.together(writer) or nullcontext() as written:
        pipe.log_to(written)
        yield


def _train(
    recipe: Recipe[AnyConfig, AnyData],
    config: AnyConfig,
    folder: RunFolder,
    ranks: Ranks,
    *,
    compare: str | None,
    stop_after: int | None,
    trace: int | None,
    tensorboard: bool | None,
) -> dict[str, Summary]:
    """The compressed run, after the one to compare it with, where there is one."""
    loaded = ranks.together(lambda: recipe.load(config))
    jobs = [] if compare is None else [(config.compared_to(compare), folder.baseline)]
    jobs.append((config, folder))
    # All pipelines stand before a folder is made: a mistake in the last leaves nothing behind.
    trainers = [recipe.trainer(job, loaded, ranks) for job, _ in jobs]

    def create_folders() -> None:
        for job, job_folder in jobs if ranks.writes else ():
            job_folder.create(job.to_json())
            job_folder.summary.unlink(missing_ok=True)  # of a run that had ended, and goes on

    ranks.together(create_folders)
    print(f"{recipe.describe(loaded)}; {trainers[-1].placement()}")
    for note in trainers[-1].notes():
        print(note)
    trainers[-1].prepare()
    runs: dict[str, Summary] = {}
    for trainer, (job, job_folder) in zip(trainers, jobs, strict=True):
        print(f"training with {job.label} -> {job_folder.path}", flush=True)
        with ExitStack() as stack:
            if tensorboard:
                stack.enter_context(_tensorboard(trainer.pipe, job_folder, ranks))
            if trainer is not trainers[-1]:  # what it is compared with need not shrink anything
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", ".* would not shrink")
            runs[job.label] = trainer.fit(
                job_folder, resume=True, stop_after=stop_after, trace=trace
            )
    print()
    trainers[-1].pipe.report(show=True)
    if compare is not None and ranks.speaks:
        histories = {name: one.history for name, one in runs.items()}
        losses = {
            job.label: plots.losses_of_steps(job_folder, trainer.iterations_per_epoch)
            for trainer, (job, job_folder) in zip(trainers, jobs, strict=True)
        }
        plots.plot_curves(histories, folder.curves, trainers[-1].metric, losses=losses)
    if compare is not None and ranks.writes and folder.summary.exists():
        baseline, own = (one.to_json() for one in runs.values())
        write_json(folder.summary, {**own, "uncompressed_run": baseline})
    if ranks.speaks:
        write_report([job_folder.path for _, job_folder in jobs], folder.page)
    return runs
