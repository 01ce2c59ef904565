"""Compressed messages for stages of `torch.distributed.pipelining`, which torch's schedules drive.

A schedule asks its stage for operations that send and receive. Here what they move are messages::

    get_fwd_send_ops      encodes the output      get_fwd_recv_ops            makes room for it
    set_local_fwd_input   encodes within a rank   _retrieve_recv_activations  decodes it

and gradients likewise. Groups, schedules and data parallelism stay torch's. Shapes are those that
stages tell each other; `clear_runtime_states` begins a step, `perform_reduce_grad` ends it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from mpcomp.comm.channels import LocalChannel
from mpcomp.core.context import Step, TensorMeta
from mpcomp.core.sample_ids import split_sample_ids
from mpcomp.core.torch_forwards import forward_of
from mpcomp.core.wire import no_tensor, says_no_tensor
from mpcomp.entropy import KINDS
from mpcomp.links.boundary import Boundary, ConnectedBoundary, Crossing
from mpcomp.links.build import Methods, boundaries_of, format_of
from mpcomp.links.link import Link
from mpcomp.links.state import restored

__all__ = ["CompressedStage", "compressed"]


def compressed(
    stages: Any,
    *,
    act: Methods = None,
    grad: Methods = None,
    ids: Callable[[], Any] | None = None,
    lr: Callable[[], float] | None = None,
    seed: int = 0,
    warmup_steps: int = 0,
) -> Any:
    """Compresses what stages of torch's send; every rank calls this with the same settings.

    Args:
        stages: this rank's stage, or the list of all that it has.
        act: methods of activations, as ``act_comp`` of `mpcomp.pipeline`. ``auto`` is the same at
            each cut here, for models in general, as a stage does not know the whole model.
        grad: methods of their gradients, as ``grad_comp``.
        ids: gives the ids of the samples in the batch that begins (AQ-SGD), the same on each rank.
        lr: gives the learning rate, for methods that follow it.
        seed: of random choices.
        warmup_steps: training steps that go uncompressed at first.

    Returns:
        What was given; each stage is a `CompressedStage` now.

    Raises:
        ValueError: a method lacks what it needs.
        TypeError: something else than stages of torch 2.13 or later.
    """
    listed: list[Any] = list(stages) if isinstance(stages, Sequence) else [stages]
    for stage in listed:
        if not hasattr(stage, "_stage_meta") or isinstance(stage, CompressedStage):
            raise TypeError(
                f"compressed({type(stage).__name__}): expected a stage of torch.distributed."
                "pipelining (torch 2.13 or later), not yet compressed, or a list of this rank's"
            )
    names = [f"stage {i}" for i in range(listed[0].num_stages - 1)]
    first = listed[0]._resolve_peer_global_rank(0)
    cuts = boundaries_of(act, grad, names, seed=seed, replica=first, warmup_steps=warmup_steps)
    for link in (link for cut in cuts for link in cut.links):
        scaled = getattr(link.method, "lr_scaled", False)
        for lacks, what in (
            (link.method.adapts, "sums over all ranks: give a fixed ratio here"),
            (link.method.by_sample and not ids, "ids=f: f() gives the ids of the batch's samples"),
            (scaled and not lr, "lr=f: f() gives the learning rate"),
        ):
            if lacks:
                raise ValueError(f"{link.direction}={link.method} in compressed() needs {what}")
    rank = _Rank(
        {stage.stage_index: stage for stage in listed}, cuts, (seed, warmup_steps), ids, lr
    )
    for stage in listed:
        name, bases = f"Compressed{type(stage).__name__}", (CompressedStage, type(stage))
        stage.__class__, stage.rank = type(name, bases, {}), rank
    return stages


class _Mail(LocalChannel):
    """Messages that torch's operations move, in host memory or, with NCCL, on the device."""

    on_wire = True

    def __init__(self, device: torch.device, carrier: torch.device) -> None:
        super().__init__(device)
        self._carrier = carrier
        self.equal_lengths = carrier.type != "cpu"  # gloo takes less than there is room for

    def post(self, microbatch: int, num_bytes: int, room: int = 0) -> None:
        self._messages[microbatch] = torch.zeros(num_bytes, dtype=torch.uint8, device=self._carrier)

    def send(self, microbatch: int, message: Tensor) -> None:
        self._messages[microbatch] = message.to(self._carrier)

    def send_nothing(self, microbatch: int, num_bytes: int) -> None:
        self.send(microbatch, no_tensor(num_bytes))

    def moving(self, microbatch: int) -> Tensor:
        """The memory of a message, to be sent from or received into."""
        message = self._messages[microbatch]
        assert message is not None
        return message

    def receive_any(self, microbatch: int) -> Tensor | None:
        message = self.moving(microbatch)
        return None if says_no_tensor(message) else message.to(self.device)


@dataclass
class _Rank:
    """Cuts beside the stages of a rank, and the step that these are in."""

    stages: dict[int, _PipelineStageBase]
    cuts: list[Boundary]
    settings: tuple[int, int]
    ids: Callable[[], Any] | None
    lr: Callable[[], float] | None
    connected: dict[int, ConnectedBoundary] = field(default_factory=dict)
    metas: dict[int, TensorMeta] = field(default_factory=dict)
    num_steps: int = 0
    open: Step | None = None
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    def connect(self) -> None:
        """Makes the channels of all cuts beside the stages, once their places are known."""
        first = next(iter(self.stages.values()))
        places = first.stage_index_to_group_rank
        here = sorted(stage for stage, rank in places.items() if rank == first.group_rank)
        if here != sorted(self.stages):
            raise ValueError(
                f"this rank has the stages {here}, and compressed() was given {list(self.stages)}: "
                "call it once, with the list of all of them"
            )
        backends = dist.get_backend_config(first.group)
        for index in here:
            for cut in range(max(0, index - 1), min(index + 1, len(self.cuts))):
                links = self.cuts[cut].links
                local = places[cut] == places[cut + 1]
                # What varies in length is coded on the host, where gloo takes it.
                nccl = "nccl" in backends and not any(link.varies for link in links)
                device, host = self.stages[index].device, torch.device("cpu")
                at = device if nccl else host
                act, grad = (LocalChannel(device) if local else _Mail(device, at) for _ in links)
                for link in links:
                    link.on_wire, link.defers_nonfinite = not local, True
                if not local:
                    self._compare(cut, self.stages[index])
                self.connected[cut] = ConnectedBoundary(self.cuts[cut], act, grad)

    def _compare(self, cut: int, stage: _PipelineStageBase) -> None:
        """Tells the later stage at a cut what both have in common: gloo dies of what differs."""
        told: list[Any] = [(str(link.method), format_of(link)) for link in self.cuts[cut].links]
        told.append(("kinds of coded integers", *KINDS))
        told.append(("seed, warmup_steps, step", *self.settings, self.num_steps))
        heard: list[Any] = [None]  # one object, as a plain neighbour would send its shapes
        before = stage.stage_index > cut
        peer = stage._resolve_peer_global_rank(cut if before else cut + 1)
        place: Any = {"group": stage.group, "device": stage.device, "use_batch": True}
        if not before:
            dist.send_object_list([told], dst=peer, **place)
            return
        dist.recv_object_list(heard, src=peer, **place)
        if heard != [told]:
            raise ValueError(
                f"stage {cut} has {heard[0]}, and stage {cut + 1} {told}: call compressed() on "
                "every rank, for all of its stages, with the same settings"
            )

    def begin(self, stage: int) -> None:
        """Notes that a stage begins a step, which ends a pass of evaluation."""
        if stage in self.begun:
            if self.open is not None and self.open.train:
                raise RuntimeError(
                    f"step {self.open.index} of compressed stages has not ended: schedule.step "
                    "raised, or its schedule lacks REDUCE_GRAD. Other ranks may have gone on: "
                    "start again from a checkpoint"
                )
            self._end(train=False)
        self.begun.add(stage)

    def step(self, stage: _PipelineStageBase, num_rows: int) -> Step:
        """The step under way, with so many rows in a microbatch; its first message makes it."""
        if self.open is None:
            sizes, train = [num_rows] * len(stage.args_recv_info), stage.has_backward
            ids = split_sample_ids(self.ids() if self.ids and train else None, sizes)
            lr, count = self.lr() if self.lr else None, len(sizes)
            self.open = Step(self.num_steps, train, sample_ids=ids, lr=lr, num_microbatches=count)
            for link in (link for cut in self.connected for link in self.cuts[cut].links):
                link.check_step(self.open, sizes)
        return self.open

    def end(self, stage: _PipelineStageBase) -> None:
        """Notes that a stage ends a step; with the last one methods keep what they learned."""
        if stage.stage_index not in self.begun:
            return  # one call of torch's has another in it
        self.ended.add(stage.stage_index)
        if self.ended == self.stages.keys():
            self._end(train=stage.has_backward)
            self.num_steps += stage.has_backward

    def _end(self, *, train: bool) -> None:
        for cut in self.connected.values():
            # Both ends have seen the same tensors, so they agree whether all were finite.
            nonfinite = [link.nonfinite.found(train) for link in cut.boundary.links]
            cut.boundary.finish_step(train and not any(nonfinite))
            cut.act.channel.close()
            cut.grad.channel.close()
        self.open = None
        self.begun.clear()
        self.ended.clear()


class CompressedStage(_PipelineStageBase):
    """A stage of torch's whose messages are compressed; `compressed` makes it of one."""

    rank: _Rank

    @property
    def links(self) -> list[Link]:
        """The links of its cuts, those before it first; ``link.meter.train`` counts bytes."""
        cuts = self.rank.cuts[max(0, self.stage_index - 1) : self.stage_index + 1]
        return [link for cut in cuts for link in cut.links]

    def state_dict(self) -> dict[str, bytes]:
        """Memories of the methods here, under a key of this stage and pipeline alone."""
        links = {link.name: (str(link.method), link.endpoint.state_dict()) for link in self.links}
        torch.save((self.rank.num_steps, links), buffer := io.BytesIO())
        return {self._key: buffer.getvalue()}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        """Goes on from a `state_dict`; raises ValueError if it is of another stage or method."""
        if self._key not in state:
            raise ValueError(f"no state of links for {self._key}, but for {', '.join(state)}")
        num_steps, saved = torch.load(io.BytesIO(state[self._key]), weights_only=True)
        own = {link.name: str(link.method) for link in self.links}
        if (methods := {name: method for name, (method, _) in saved.items()}) != own:
            raise ValueError(f"state of links with {methods} cannot be loaded into {own}")
        devices = dict.fromkeys(("sender", "receiver"), self.device)
        for put in [restored(link, saved[link.name][1], devices) for link in self.links]:
            put()
        self.rank.num_steps = num_steps

    @property
    def _key(self) -> str:
        return f"stage {self.stage_index} from rank {self._resolve_peer_global_rank(0)}"

    # -- what torch's schedules call -----------------------------------------------------------

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        here = self.stage_index
        if not self.rank.connected:
            self.rank.connect()
        prepared = super()._prepare_forward_infra(*args, **kwargs)  # type: ignore[safe-super]
        for cut, metas in (here - 1, self._stage_meta.inputs), (here, self._stage_meta.outputs):
            if not 0 <= cut < len(self.rank.cuts):
                continue
            if metas is None or len(metas) != 1 or hasattr(metas[0], "placements"):
                raise ValueError(
                    f"boundary {cut} of stage {here} carries {metas}: expected one plain tensor. "
                    "What all stages need, such as positions, goes to schedule.step by keyword"
                )
            (meta,) = metas
            like = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            self.rank.metas[cut] = TensorMeta.of(like)
        return prepared

    def clear_runtime_states(self) -> None:
        self.rank.begin(self.stage_index)
        super().clear_runtime_states()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        self.rank.end(self)

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        # From torch 2.15 on, of FSDP2's stages, by some schedules in place of the former.
        super().wait_for_gradient_reduction(grad_scale_factor)  # type: ignore[misc]
        self.rank.end(self)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        cut, at = self._at(self.stage_index - 1, fwd_chunk_id)
        cut.act.post(*at)
        return self._op(dist.irecv, cut.act, fwd_chunk_id, self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        outputs, _ = forward_of(self, fwd_chunk_id)
        cut = self._send_activation(self.stage_index, outputs, fwd_chunk_id)
        return self._op(dist.isend, cut.act, fwd_chunk_id, self.stage_index + 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._send_activation(self.stage_index - 1, prev_stage_outputs, mb_index)

    def _send_activation(self, number: int, given: Any, microbatch: int) -> ConnectedBoundary:
        cut, (meta, step, _) = self._at(number, microbatch)
        x = given if isinstance(given, Tensor) else given[0]
        if tuple(x.shape) != meta.shape or x.dtype != meta.dtype:
            raise ValueError(
                f"boundary {number}, microbatch {microbatch}: {list(x.shape)} {x.dtype}, but "
                f"{list(meta.shape)} {meta.dtype} at first: torch's schedules take microbatches of "
                "one shape (drop_last=True in a loader)"
            )
        cut.act.send(x.detach(), meta, step, microbatch)
        return cut

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        cut, at = self._at(self.stage_index - 1, fwd_chunk_id)
        self.args_recv_info[fwd_chunk_id][0].buffer, _ = cut.act.receive(*at)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last or not self._wants(bwd_chunk_id):
            return []
        cut, at = self._at(self.stage_index, bwd_chunk_id)
        cut.grad.post(*at)
        return self._op(dist.irecv, cut.grad, bwd_chunk_id, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first or self._get_grad_send_meta(0) is None:
            return super().get_bwd_send_ops(bwd_chunk_id)  # nothing is waited for
        cut, at = self._at(self.stage_index - 1, bwd_chunk_id)
        (grad,) = self.bwd_cache.pop(bwd_chunk_id)
        cut.grad.send(grad, *at)
        return self._op(dist.isend, cut.grad, bwd_chunk_id, self.stage_index - 1)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self._wants(mb_index):
            cut, at = self._at(self.stage_index, mb_index)
            cut.grad.send(next_stage_bwd_outputs[0], *at)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        if self._wants(bwd_chunk_id):
            cut, at = self._at(self.stage_index, bwd_chunk_id)
            gradient = cut.grad.receive_any(*at)
            if gradient is None:  # torch sends zeros
                meta, *_ = at
                gradient = torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)
            self.grad_recv_info[bwd_chunk_id][0].buffer = gradient
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _wants(self, microbatch: int) -> bool:
        """Whether the gradient of an output will come."""
        return self.grad_recv_info[microbatch][0].tensor_meta is not None

    def _at(self, cut: int, microbatch: int) -> tuple[ConnectedBoundary, tuple[Any, Step, int]]:
        meta = self.rank.metas[cut]
        step = self.rank.step(self, meta.num_rows)
        return self.rank.connected[cut], (meta, step, microbatch)

    def _op(self, kind: Any, way: Crossing, microbatch: int, stage: int) -> list[dist.P2POp]:
        assert isinstance(way.channel, _Mail)
        to = self._resolve_peer_global_rank(stage)
        return [dist.P2POp(kind, way.channel.moving(microbatch), to, self.group)]
