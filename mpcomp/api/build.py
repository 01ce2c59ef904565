"""`mpcomp.pipeline`: from a model and a few choices to a `Pipeline`.

One way for one process and for many; where stages live, and how ranks come to agree, is a
`Launch`'s (`mpcomp.api.launch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stages as staging
from mpcomp.api.advice import (
    advise_on_cut,
    advise_on_sequences,
    advise_on_threads,
    advise_on_ties,
    advise_on_weights,
)
from mpcomp.api.config import PipelineConfig
from mpcomp.api.launch import DistributedLaunch, Launch, LocalLaunch
from mpcomp.api.learned_loss import check_loss, place_loss
from mpcomp.api.pipeline import Pipeline
from mpcomp.checkpoint.weights import add_partial_guard, check_weights, load_weights, to_meta
from mpcomp.comm.devices import model_of
from mpcomp.comm.mesh import launched
from mpcomp.compressors import Compressor
from mpcomp.core.context import TensorMeta
from mpcomp.core.embeddings import check_dense_gradients, check_max_norm, check_whole_batches
from mpcomp.core.loss import LossFn
from mpcomp.core.spec import SpecValue
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.engines.distributed import DistributedEngine
from mpcomp.engines.first_data import FirstData
from mpcomp.feedback import Feedback
from mpcomp.links.boundary import Boundary
from mpcomp.links.build import MethodLike, Methods, boundaries_of, format_of, tie_method_of
from mpcomp.links.link import Link
from mpcomp.links.tied_weights import TiedWeights, ties_of
from mpcomp.pilot.dial import Dial
from stages.split import Where

__all__ = ["build", "pipeline"]


def pipeline(
    model: nn.Module,
    chunks: int,
    *,
    act_comp: Methods = None,
    grad_comp: Methods = None,
    budget: str | float | None = None,
    link: str | None = None,
    dp_comp: Any = None,
    tie_comp: MethodLike = None,
    ties: str | None = None,
    network: ReplicaNetwork | None = None,
    data: str = "all",
    split: Where | None = None,
    sample: Any = None,
    devices: str | torch.device | Sequence[str | torch.device] | None = None,
    replicas: int = 1,
    shard: bool = False,
    param_comp: Compressor | str | None = None,
    schedule: str | None = None,
    in_flight: int | str | None = None,
    in_flight_bytes: int | None = None,
    connections: int | str = "auto",
    loss_fn: LossFn | None = None,
    recompute: bool = False,
    seed: int = 0,
    engine: str | None = None,
    warmup_steps: int = 0,
    scaler: torch.amp.GradScaler | None = None,
    weights: str | Path | None = None,
    timeout: float = 300.0,
    checks: str = "state",
) -> Pipeline:
    """Cuts ``model`` into stages that exchange compressed activations and gradients.

    In one process all stages are here, share the model's parameters and move to their devices.
    Under torchrun, or in an initialised process group, each rank keeps its own stages and lets go
    of the rest; every rank calls this with the same arguments, and then makes the same calls with
    the same data (or see ``data``). The result is the same; on CPUs bit for bit, with as many
    threads a process.

    Args:
        model: an `nn.Sequential` (such as `stages.resnet18`), a causal language model or an
            encoder of transformers, or any module that `stages.split` can cut by the names of its
            blocks.
        chunks: microbatches per batch, at least 1.
        act_comp: method for activations: an object, a spec string (`mpcomp.parse`), "auto" for
            one that is found out and said (`mpcomp.pilot.dial`), "auto:scratch" for a language
            model that begins with random weights, "auto:relu" for cuts behind a ReLU, "auto:memory"
            for samples that come again (see `mpcomp.links.auto`), None for none; a list with one
            for each boundary; or a mapping from a boundary's number, or the name of the block it
            comes after, to one (others: none).
        grad_comp: method for gradients, likewise.
        budget: quality that the words' methods may cost, as means of the project's studies: "0.1 %"
            to "5 %", or 0.001 to 0.05, of perplexity, and points of accuracy behind a ReLU. Their
            steps follow (`mpcomp.links.budget`). None for the steps that words have by themselves.
        link: of every cut, its rate each way and its latency one way, as "100 Mbit/s, 20 ms".
            "auto" plans with it whether compression pays (`mpcomp.pilot.paying`); None measures
            the links.
        dp_comp: what compresses gradients between replicas: `GraVAC`, `DGC`, `PowerSGD` ..., a
            compressor, `ErrorFeedback`, `EF21` or `ConEF` round one, or a spec string; or
            `LocalSGD`, which exchanges what parameters have moved by, once a period.
        tie_comp: method for the gradient of a parameter that two stages share (a language model's
            embedding and head), which they exchange once a step; None for none, or beside one of
            the words for cuts for theirs ("ef+quant:4:scale=128"). "none" is none in any case.
        ties: what becomes of a weight that the first stage and the last one share. "together"
            puts what follows its second use (final norm, head and loss) beside the first stage,
            as one stage more, so that nothing is exchanged and nobody has a copy: what the last
            blocks give crosses one more cut. "apart" gives both stages a copy. None is "together"
            with the engine's own schedule where the model allows it and ``tie_comp`` is not given.
        network: how replicas are connected, which decides about the way of their gradients.
        data: which ranks are given batches: "all", or "first" for the first of each pipeline alone,
            which tells the others sizes, masks, positions and sample ids (`Pipeline.has_data`).
            Inputs and targets do not leave it. The last stage is on that rank too, as where
            ``ties`` are together; of a model without ties it has final norm and head of a language
            model, or else the last block.
        split: number of stages, block counts, names of blocks to cut after, "paper", or "time";
            by default one stage a device or rank (two a rank with interleaved and V schedules).
            "time" makes as many, balanced by the time that each block takes on ``sample``: with
            several processes on each rank, so that a slow machine gets less to do.
        sample: a batch to measure with, of the size of a microbatch; for ``split="time"``.
        devices: one for each stage (they may repeat), or one for all; the CPU by default, or one
            stage per GPU where there are several and ``split`` is not given. With several
            processes one for each rank, or one for all; by default the GPU of this process's
            number on its machine, or the CPU.
        replicas: copies of the pipeline, on so many times the ranks. Each is given its own share
            of the data (`ReplicaSampler`); gradients are averaged once a step.
        shard: each replica holds a piece of every parameter and of the optimizer's state (ZeRO, by
            torch's FSDP2), and a stage is whole during a step alone. Not with a schedule that
            splits backward, and not with two copies of a tied weight.
        param_comp: with ``shard``, compressor of the parameters that replicas gather, such as
            ``Quantize(8, scale=128)``; None for none.
        schedule: "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
            "ZBVZeroBubble" or "DualPipeV", for several processes; None is the engine's own (1F1B
            of depth ``in_flight``).
        in_flight: with the engine's own schedule, microbatches that the first stage may have
            under way, each of which keeps its activations: the number of stages is 1F1B,
            ``chunks`` hides most of a slow link; None for twice the stages less one, "auto" to
            measure in the first steps. Results do not depend on it. Updates within a step
            (``forward_backward(update=...)``) have a depth of their own.
        in_flight_bytes: bound on what a rank keeps of all of them for backward; the first step
            measures what one microbatch keeps.
        connections: between the ranks of a cut or tie, each way. Each carries a part of every
            message: on a link with a latency of 10 ms or more four take fewer round trips, as each
            begins with a window of its own after a pause. "auto" takes four there and one
            elsewhere, by what the ranks measure before the first step. gloo's alone; a process
            makes none.
        loss_fn: ``loss_fn(output, target)``, the mean over its rows, or over what its
            ``num_terms(target)`` counts (or with ``reduction="sum"``). The first step compares it
            with its value for the batch. A module's parameters are trained with the last stage:
            ``SGD([*pipe.parameters(), *loss_fn.parameters()])``. By default
            `CausalLMLoss` for a causal language model, what the head of an encoder computes from
            labels, and for a model that gives
            ``(output, loss)`` when called with targets (``targets=None`` in its forward) its own.
        recompute: keep only stage inputs and recompute the rest in backward.
        seed: of all random choices of compressors and of dropout.
        engine: "local", "distributed", or None to choose: distributed under torchrun.
        warmup_steps: training steps that go uncompressed at first.
        scaler: loss scaler for fp16: losses are scaled by it, and non-finite steps are skipped
            (``pipe.step_skipped``) on all ranks. Call its ``unscale_``, ``step`` and ``update`` as
            usual.
        weights: folder with the model's .safetensors files, or a checkpoint; the model may then be
            on the meta device, and each rank reads its own stages alone.
        timeout: seconds that a rank waits for another before all give up.
        checks: "state" compares, every hundred steps, what both ends of links keep, tied weights
            and the weights of replicas; "message" besides gives each message of a cut or tie a sum
            over its bits, 16 bytes more or 8, that its receiver compares (and an accelerator waits
            for); "none" does neither. See docs/guide/security.md.

    Returns:
        A `Pipeline`.

    Raises:
        ValueError: a choice outside what is accepted; the message names it and the fix. The
            model has not been moved then. Also, on every rank, if ranks were given different
            choices.
        TypeError: a compressor or a loss function that is none.
        PeerError: another rank failed or did not come.
    """
    given = {name: value for name, value in locals().items() if name != "model"}
    return build(model, PipelineConfig(**given))


def _must_round_alike(link: Link) -> bool:
    """Whether both ends keep one estimate, which GPUs of two models may come to differently."""
    method: Any = link.method
    multiplies = False
    while not isinstance(method, Feedback):
        multiplies |= getattr(method, "multiplies", False)
        method = getattr(method, "inner", None)
        if not isinstance(method, SpecValue):
            return False
    if not method.mirrors(TensorMeta((1, 1))):
        return False
    return multiplies or any(coder.multiplies for coder in method.coders)


def build(model: nn.Module, config: PipelineConfig) -> Pipeline:
    """The pipeline of a configuration; see `pipeline`."""
    launch: Launch
    if config.engine == "distributed" or (config.engine is None and launched()):
        launch = DistributedLaunch(config)
    else:
        launch = LocalLaunch(config)
    of_run: dict[str, Any] = {
        "seed": config.seed,
        "replica": launch.replica,
        "warmup_steps": config.warmup_steps,
        "checked": config.checks == "message",
    }
    with launch.abort_all_on_error():
        cut = launch.cut(model)
        config.check_data(cut)
        loss_fn = config.loss_for(cut)
        dial = Dial(
            cut,
            act_comp=config.act_comp,
            grad_comp=config.grad_comp,
            budget=config.budget,
            link=config.link,
            reads_weights=config.weights is not None,
        )
        boundaries = boundaries_of(
            config.act_comp,
            config.grad_comp,
            [stage.block_names[-1] for stage in cut[:-1]],
            words=dial.words,
            **of_run,
        )
        dial.mark(boundaries)
        of_ties = tie_method_of(
            config.tie_comp, config.act_comp, config.grad_comp, tied=bool(staging.ties(cut))
        )
        ties = ties_of(cut, of_ties, **of_run)
        launch.check(cut, ties)
        _check_embeddings(model, cut, chunks=config.chunks, replicas=config.replicas)
        check_loss(loss_fn, cut, shard=config.shard)
        own = launch.own_stages(cut)
        check_weights([cut[i] for i in own], config.weights)
        exchanged = [tie for tie in ties if isinstance(tie, TiedWeights)]
        crossings: list[Boundary | TiedWeights] = [*boundaries, *exchanged]
        plan: dict[str, Any] = {
            "methods": [[str(link.method) for link in each.links] for each in crossings],
            "formats": [[format_of(link) for link in each.links] for each in crossings],
            "auto": dial.sentence(boundaries),
        }
        alike = any(_must_round_alike(link) for each in crossings for link in each.links)
        if alike or dial.is_open:  # as it may come to a memory
            plan["GPU"] = model_of(launch.device_of(own[0]))
    launch.connect(cut, plan)
    if 0 in own and launch.replica == 0:  # one rank speaks for all
        if config.split is None or isinstance(config.split, int):
            advise_on_cut(model, cut)
        advise_on_ties(cut)
        if config.weights is None:
            advise_on_weights(launch.weights)
        if launch.device_of(0).type == "cpu":
            advise_on_threads(launch.local_ranks)
        if not cut[0].of_transformers:
            advise_on_sequences(model)
        dial.tell(boundaries, tells=not dial.is_open)
    for i, stage in enumerate(cut):
        if i not in own:
            to_meta(stage)
            continue
        if config.weights is not None:
            load_weights(stage, config.weights)
        stage.to(launch.device_of(i))
    last = len(cut) - 1
    place_loss(loss_fn, cut, launch.device_of(last) if last in own else None)
    plain = launch.prepare(model, cut, own)
    if len(own) < len(cut):
        add_partial_guard(model)
    engine, replica_sync = launch.engine(cut, boundaries, ties, plain)
    first_data = None
    if config.data == "first" and isinstance(engine, DistributedEngine):
        first_data = FirstData(
            engine, [s for s, place in zip(plain.cut, engine.places, strict=True) if place]
        )
    return Pipeline(
        [cut[i] for i in own],
        plain.cut,
        boundaries,
        engine,
        chunks=config.chunks,
        loss_fn=loss_fn,
        scaler=config.scaler,
        ties=ties,
        warmup_steps=config.warmup_steps,
        replica_sync=replica_sync,
        plain_model=plain.model,
        compares_copies=config.checks != "none",
        first_data=first_data,
        dial=dial,
    )


def _check_embeddings(
    model: nn.Module, cut: Sequence[staging.Stage], *, chunks: int, replicas: int
) -> None:
    """Raises ValueError for an embedding that would not train as in the plain model.

    Args:
        model: that was cut.
        cut: all stages.
        chunks: microbatches.
        replicas: number of them.
    """
    tied = {name for tie in staging.ties(cut) for _, name in tie}
    shared = {name for names in staging.shared_parameters(model) for name in names} - tied
    check_dense_gradients(model, "the exchange of a weight that two stages share", tied)
    check_max_norm(
        model, "two stages share its weight, and the other copy would stay as it was", tied
    )
    if chunks > 1:
        check_max_norm(
            model,
            "another layer has its weight too, and would find rows that later microbatches look up "
            "as they were; chunks=1 is right",
            shared,
        )
    if chunks * replicas > 1:
        check_whole_batches(model, chunks * replicas)
    if replicas > 1:
        check_dense_gradients(model, "the mean over replicas")
        check_max_norm(model, "replicas look up different rows, and would come apart")
