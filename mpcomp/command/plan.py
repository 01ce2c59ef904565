"""`mpcomp plan`: what a step of a model takes on given links with each method, and what to use."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stages
from mpcomp.comm.handshake import show_secret
from mpcomp.comm.joining import join
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.comm.probe import measure_chain
from mpcomp.command.models import Candidate, candidate
from mpcomp.command.output import print_json
from mpcomp.core.account import NOTHING
from mpcomp.core.context import TensorMeta
from mpcomp.core.precision import PRECISIONS, compute_dtype
from mpcomp.core.sent import Sent
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.links.auto import TIE_COMP
from mpcomp.page import write_page
from mpcomp.plan.known_quality import TASKS, methods_of
from mpcomp.plan.network import FIRST_WINDOW, Network
from mpcomp.plan.outcome import Outcome, plan
from mpcomp.plan.planner import Pair, Planner
from mpcomp.plan.prediction import Compute
from mpcomp.plan.profile import Profile, count_profile, measure_profile
from mpcomp.plan.replica_cost import ReplicaCost, replica_cost
from mpcomp.plan.timing import Undisturbed

__all__ = ["add_to"]

DEFAULT_MBPS = 100.0
#: Of a wait for another process.
TIMEOUT_S = 300.0
#: How much larger than the best the largest stage may be, where that makes cuts cheaper.
SLACK = 0.25
EPILOG = """\
examples:
  mpcomp plan gpt2 --stages 4 --mbps 100 --latency-ms 20
  mpcomp plan resnet18 --stages 4 --mbps 50 --batch 128 --chunks 8 --floor 2
  mpcomp plan llama --stages 8 --mbps 1000 --tflops 60 --config num_hidden_layers=32
  mpcomp plan gpt2 --stages 2 --mbps 20 --replicas 4 --replica-mbps 20
  torchrun --nproc-per-node 4 -m mpcomp plan gpt2 --measure
  mpcomp plan my_models.py:make --stages 3 --mbps 200 100 --latency-ms 5 40
"""


def add_to(commands: Any) -> None:
    """Adds the command to others."""
    parser = commands.add_parser(
        "plan",
        help="predict a step's time on given links, with each method, and what to use",
        description=textwrap.dedent(__doc__ or ""),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="resnet18, gpt2, an architecture of transformers, a folder, or file.py:function",
    )
    add(
        "--config",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="entries of a language model's configuration, as in num_hidden_layers=24 "
        "tie_word_embeddings=false",
    )
    add("--batch", type=int, default=8, help="rows of a step, of one replica (default %(default)s)")
    add("--chunks", type=int, help="microbatches of it (default: as many as rows, at most 8)")
    add("--seq-len", type=int, default=1024, metavar="TOKENS", help="(default %(default)s)")
    add("--task", choices=TASKS, help="whose studies say what methods cost in quality")
    add(
        "--floor",
        type=float,
        default=2.0,
        metavar="LOSS",
        help="the most that quality may have cost there, in %% of perplexity or points of "
        "accuracy (default %(default)s)",
    )
    add(
        "--method",
        nargs="+",
        action="append",
        metavar="SPEC",
        help="methods of activations and gradients, or one for both; again for another pair "
        "(default: those that were studied for the task)",
    )
    add(
        "--ties",
        choices=("together", "apart"),
        help="a weight that the first stage and the last share: both uses on the first machine, or "
        "a copy on each (default: together where the model allows it)",
    )
    add(
        "--tie-comp",
        metavar="SPEC",
        help="of tied weights that are apart, where cuts are compressed; sets --ties apart "
        f"(default {TIE_COMP})",
    )
    add("--samples", type=int, metavar="N", help="of the training set, for methods with a memory")
    add("--html", type=Path, metavar="FILE", help="write a page with a slider for the rate")
    _add_cluster(parser.add_argument_group("machines and links"))


def _add_cluster(group: Any) -> None:
    add = group.add_argument
    add("--stages", type=int, metavar="N", help="one a machine")
    add(
        "--measure",
        action="store_true",
        help="measure links and machines: start it with torchrun, one process for each stage",
    )
    add(
        "--mbps",
        type=float,
        nargs="+",
        metavar="RATE",
        help="Mbit/s of every machine each way, or one for each link (default 100)",
    )
    add(
        "--latency-ms",
        type=float,
        nargs="+",
        metavar="MS",
        help="one way, of all links or of each (default 0)",
    )
    add(
        "--warm-windows",
        action="store_true",
        help="TCP keeps its windows over a pause (net.ipv4.tcp_slow_start_after_idle=0)",
    )
    add(
        "--connections",
        type=int,
        default=1,
        metavar="N",
        help="of each link, each way, as mpcomp.pipeline(connections=N) makes them (default 1)",
    )
    add("--split", help="paper, or block counts as in 3,3,3,3 (default: the fastest that is found)")
    add("--in-flight", type=int, metavar="N", help="microbatches under way on the first stage")
    add("--precision", choices=PRECISIONS, default="auto", help="(default: bf16 where it is fast)")
    add(
        "--tflops",
        type=float,
        metavar="N",
        help="speed in training of machines that are not like this one; nothing is measured then "
        "but coding",
    )
    add("--cores", type=int, metavar="N", help="that all stages share, where they are one machine")
    add("--replicas", type=int, default=1, metavar="N", help="of the pipeline")
    add(
        "--dp-comp",
        nargs="+",
        metavar="SPEC",
        help="methods between replicas; the first is in the steps' times (default: a few)",
    )
    add("--replica-mbps", type=float, metavar="RATE", help="(default: as between stages)")
    add("--replica-latency-ms", type=float, metavar="MS", help="(default: as between stages)")


#: Methods between replicas that are worth a look.
DP_COMPS = ("none", "bf16", "powersgd:4", "ef+topk:0.01+quant:4", "diloco:30+ef+quant:4")


def run(options: argparse.Namespace) -> None:
    """Plans and prints.

    Raises:
        ValueError, TypeError: options that do not fit the model or each other.
        OSError: a file cannot be written.
    """
    _check(options)
    group = _Group() if options.measure else None
    if group is not None:
        options.stages = group.mesh.num_ranks
    chunks = options.chunks or min(options.batch, 8)
    model = candidate(
        options.model,
        rows=options.batch // chunks,
        seq_len=options.seq_len,
        config=dict(_entry(text) for text in options.config),
    )
    task = options.task or model.task
    timing = Undisturbed()
    together = _together(model, options)
    profile = _profile(model, options, timing, together=together)
    computes = [[block.compute for block in profile.blocks]] * options.stages
    if group is not None:
        computes, links = group.measure(profile)
        options.mbps = [rate for rate, _ in links]
        options.latency_ms = [500 * round_trip for _, round_trip in links]
        if group.mesh.rank:
            return  # the first rank plans for all
    cuts = _cuts(model, profile, computes, options)
    replicas = _replicas(profile, cuts[0], options)
    planner = Planner(
        profile,
        _network(options),
        chunks=chunks,
        cuts=cuts,
        task=task,
        computes=computes,
        tie_comp=options.tie_comp or TIE_COMP,
        in_flight=options.in_flight,
        num_cores=options.cores,
        exchange_s=replicas[0].seconds if replicas else 0.0,
        replicas=_of_all_stages(replicas[0], profile) if replicas else NOTHING,
        num_samples=options.samples,
        settle=timing,
    )
    pairs = [_pair(given) for given in options.method] if options.method else methods_of(task)
    outcome = plan(planner, pairs, task=task, floor=options.floor, replicas=replicas)
    about = _about(model, profile, options, chunks)
    if options.json:
        print_json(options, {"about": about, "timing": timing.to_dict(), **outcome.to_dict()})
    else:
        _print(outcome, f"{about}\n{timing.sentence()}", options)
    if options.html:
        rates = [rate if math.isfinite(rate) else None for rate in options.mbps]
        write_page(
            options.html, "mpcomp.plan", {"about": about, "mbps": rates, **outcome.to_dict()}
        )
        print(f"\npage: {options.html.resolve()}")


class _Group:
    """The processes that torchrun has started, one for each stage.

    Raises:
        ValueError: it has not.
        PeerError: one of them does not come.
    """

    def __init__(self) -> None:
        device = torch.device("cpu")
        join(device, TIMEOUT_S)
        self.mesh = ProcessMesh(1, TIMEOUT_S, device)
        show_secret(self.mesh)
        self.mesh.connect([f"rank {rank}" for rank in range(self.mesh.num_ranks)])

    def measure(self, profile: Profile) -> tuple[list[list[Compute]], list[tuple[float, float]]]:
        """Times of each rank for each block; of each link (Mbit/s, round trip in seconds)."""
        own = [tuple(block.compute) for block in profile.blocks]
        found = self.mesh.all_gather_object(own, "times of blocks")
        links = measure_chain(self.mesh)
        self.mesh.close()
        dist.destroy_process_group()
        return [[Compute(*times) for times in of_rank] for of_rank in found], links


def _print(outcome: Outcome, about: str, options: argparse.Namespace) -> None:
    print(about, "", outcome.table(), sep="\n")
    print(
        f"\n* recommended; x: times less time than with bf16 or no compression; costs: in the "
        f"project's studies of {TASKS[outcome.task]};\npays below: the rate under which it is "
        "faster than bf16, all else equal;\nbelow bf16: of MB a step, which has tied weights and "
        "agreements; cuts alone: of MB at cuts"
    )
    if outcome.times is None:
        print("(steps of so many stages and microbatches are not simulated for every rate)")
    if outcome.replicas:
        print("", outcome.replica_table(), sep="\n")
    print("", *outcome.summary(), sep="\n")


def _about(model: Candidate, profile: Profile, options: argparse.Namespace, chunks: int) -> str:
    seconds = sum(sum(block.compute) for block in profile.blocks)
    how = "counted" if options.tflops else "measured here"
    links = ", ".join(f"{rate:.4g}" for rate in options.mbps)
    latency = ", ".join(f"{ms:.3g}" for ms in options.latency_ms)
    connections = f", {options.connections} connections" if options.connections > 1 else ""
    return (
        f"{model.described}: {profile.num_parameters / 1e6:.1f} M parameters in "
        f"{profile.num_blocks} blocks; a microbatch takes {seconds:.2f} s of computing ({how}); "
        f"steps of {options.batch} rows in {chunks} microbatches over {options.stages} stages, "
        f"{links} Mbit/s, {latency} ms{connections}"
        + (f", {options.replicas} replicas" if options.replicas > 1 else "")
    )


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for numbers that make no sense."""
    for name in ("stages", "batch", "chunks", "seq_len", "replicas", "cores", "in_flight"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: pass at least 1")
    if options.measure and (options.stages or options.mbps or options.latency_ms):
        raise ValueError("--measure finds stages, rates and latencies itself; leave them out")
    if options.measure and options.replicas > 1 and options.replica_mbps is None:
        raise ValueError("--measure sees the links between stages; pass --replica-mbps as well")
    if not options.measure and options.stages is None:
        raise ValueError("pass --stages, or --measure with torchrun")
    options.mbps = options.mbps or [DEFAULT_MBPS]
    options.latency_ms = options.latency_ms or [0.0]
    if options.stages == 1:
        raise ValueError("--stages 1: a pipeline of one stage sends nothing; pass 2 or more")
    if options.chunks is not None and options.chunks > options.batch:
        raise ValueError(
            f"--chunks {options.chunks} of --batch {options.batch}: pass at most as many as rows"
        )
    for given in options.method or ():
        if len(given) > 2:
            raise ValueError(f"--method {' '.join(given)}: pass two at most, and --method again")
    # Before anything is measured, which takes minutes; the first rank writes it.
    writes = not options.measure or os.environ.get("RANK", "0") == "0"
    if options.html and writes and not options.html.parent.is_dir():
        raise ValueError(f"--html {options.html}: there is no folder {options.html.parent}")


def _entry(text: str) -> tuple[str, str]:
    """A configuration's entry and its value."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--config {text}: pass NAME=VALUE, as in num_hidden_layers=24")
    return name, value


def _pair(given: Sequence[str]) -> Pair:
    return given[0], given[-1]


def _together(model: Candidate, options: argparse.Namespace) -> bool:
    """Whether both uses of a weight go to the first host.

    Raises:
        ValueError: they are to, and cannot; or there is no such cut.
    """
    if options.ties == "apart" or (options.tie_comp and options.ties is None):
        return False
    num_blocks = len(stages.blocks(model.model))
    if options.split:
        where = _counts(options.split)
    elif options.stages <= num_blocks:  # as early as can be: other cuts are found from times
        where = [1] * (options.stages - 1) + [num_blocks - options.stages + 1]
    else:
        return False  # what is too many is said where cuts are found
    first = stages.split(model.model, where, together=True)[0]
    together = first.together and not first.why_apart
    if options.ties == "together" and not together:
        why = first.why_apart or "no weight of the first stage is used in the last one again"
        raise ValueError(f"--ties together, but {why}; leave --ties out")
    return together


def _profile(
    model: Candidate, options: argparse.Namespace, timing: Undisturbed, *, together: bool
) -> Profile:
    if options.tflops is not None:
        speed = 1e12 * options.tflops
        return count_profile(model.model, model.sample, flops_per_s=speed, together=together)
    dtype = compute_dtype(options.precision, torch.device("cpu"))
    return measure_profile(
        model.model, model.sample, model.loss, autocast=dtype, settle=timing, together=together
    )


def _network(options: argparse.Namespace) -> Network:
    """The hosts of a pipeline and the links between them."""
    num_links = options.stages - 1
    rates, latencies = options.mbps, options.latency_ms
    for name, values in (("mbps", rates), ("latency-ms", latencies)):
        if len(values) not in (1, num_links):
            raise ValueError(
                f"--{name} has {len(values)} values for {num_links} links between "
                f"{options.stages} stages: pass one for all, or one for each"
            )
    one = len(rates) == 1
    return Network(
        host_mbps=(rates[0] if one else math.inf,) * options.stages,
        latency_s=tuple(ms / 1e3 for ms in (latencies * num_links)[:num_links]),
        link_mbps=None if one else tuple(rates),
        window_bytes=math.inf if options.warm_windows else FIRST_WINDOW,
        connections=options.connections,
    )


def _cuts(
    model: Candidate,
    profile: Profile,
    computes: Sequence[Sequence[Compute]],
    options: argparse.Namespace,
) -> list[list[int]]:
    """Ways to cut the model: as asked, or balanced, evenly and with the fewest bytes."""
    if options.split == "paper":
        cut = stages.split(model.model, "paper")
        names = [block.name for block in profile.blocks[: profile.num_blocks]]
        ends = [0, *(1 + names.index(stage.block_names[-1]) for stage in cut[:-1]), len(names)]
        return [[end - start for start, end in itertools.pairwise(ends)]]
    if options.split:
        return [_counts(options.split)]
    seconds = [[sum(compute) for compute in of_host] for of_host in computes]
    sizes = [block.output.numel * block.output.dtype.itemsize for block in profile.blocks]
    found = [profile.balanced(options.stages, seconds)]
    cheaper = profile.balanced(options.stages, seconds, slack=SLACK, prices=sizes)
    return found if cheaper in found else [*found, cheaper]


def _counts(split: str) -> Any:
    """A split as `stages.split` takes it."""
    if split == "paper":
        return split
    try:
        return [int(count) for count in split.split(",")]
    except ValueError:
        raise ValueError(f"--split {split}: pass paper, or block counts as in 3,3,3,3") from None


def _of_all_stages(cost: ReplicaCost, profile: Profile) -> Sent:
    """All that a pipeline sends its replicas, by what its largest stage does."""
    own = Sent(cost.wire_bytes, cost.dense_bytes, cost.num_elements)
    return (profile.num_parameters / cost.num_elements) * own


def _replicas(
    profile: Profile, counts: Sequence[int], options: argparse.Namespace
) -> list[ReplicaCost]:
    """Costs between replicas of the stage that has most to send; all exchange at once."""
    if options.replicas == 1:
        return []
    of_hosts: list[dict[str, TensorMeta]] = [{} for _ in counts]
    for stage, own in enumerate(profile.stages(counts)):
        for block in profile.blocks[own]:
            of_hosts[stage % len(counts)] |= block.parameters
    parameters = max(of_hosts, key=lambda own: sum(meta.numel for meta in own.values()))
    rate = options.replica_mbps or min(options.mbps)
    latency = options.replica_latency_ms
    network = ReplicaNetwork(
        bandwidth_mbps=rate,
        latency_ms=max(options.latency_ms) if latency is None else latency,
    )
    return [
        replica_cost(method, parameters, options.replicas, network)
        for method in options.dp_comp or DP_COMPS
    ]
