"""Compressed messages in the pipeline that transformers makes of a model, for inference.

``from_pretrained(..., distributed_config=DistributedConfig(pp_size=n))`` leaves each rank its
blocks, and a stage that moves tensors. It moves the same way here, but less::

    communicate           the message of a link instead of hidden states
    broadcast_from_last   the largest logits and their tokens, where the user asks for that
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcomp.comm.handshake import fingerprint
from mpcomp.core.context import Step, TensorMeta
from mpcomp.entropy import KINDS
from mpcomp.links.auto import AUTO, INFERENCE
from mpcomp.links.budget import spelt
from mpcomp.links.build import Methods, boundaries_of, format_of
from mpcomp.links.link import Link

__all__ = ["CompressedPipelineStage", "compress_pipeline"]


def compress_pipeline(
    model: nn.Module, act_comp: Methods = "auto", *, top_logits: int | None = None, seed: int = 0
) -> CompressedPipelineStage:
    """Compresses what the ranks of transformers' own pipeline send; every rank calls it.

    Args:
        model: from ``from_pretrained(..., distributed_config=DistributedConfig(pp_size=n))``.
        act_comp: methods of activations, as of `mpcomp.pipeline`. ``auto`` is for a released
            language model.
        top_logits: of each position the last rank sends so many largest logits to the others,
            and all ranks take the rest for minus infinity; None sends all.
        seed: of random choices.

    Returns:
        The stage of this rank, which counts what it sends.

    Raises:
        TypeError: a model that transformers has not cut, or that is compressed already.
        ValueError: a method or a number that cannot be, or ranks that differ.
    """
    stage: Any = getattr(model, "_pp_stage", None)
    if not hasattr(stage, "communicate") or isinstance(stage, CompressedPipelineStage):
        raise TypeError(
            f"compress_pipeline({type(model).__name__}): expected a model not yet compressed, from "
            "from_pretrained(..., distributed_config=DistributedConfig(pp_size=2)) of transformers "
            "5.23 or later; mpcomp.pipeline cuts any other"
        )
    config: Any = model.config
    vocabulary = config.get_text_config(decoder=True).vocab_size
    if top_logits is not None and not 1 <= top_logits <= vocabulary:
        raise ValueError(f"top_logits={top_logits}: expected 1 to {vocabulary}, or None for all")
    names = [f"stage {i}" for i in range(stage.pp_size - 1)]
    words = [{**AUTO, "auto": spelt(INFERENCE, None)}] * len(names)
    cuts = boundaries_of(act_comp, None, names, seed=seed, replica=0, warmup_steps=0, words=words)
    links = [cut.act for cut in cuts]
    for link in links:
        link.defers_nonfinite = True  # NaN goes on, as transformers does it
        if link.method.adapts:
            raise ValueError(f"act_comp={link.method} adapts in training: name a fixed method here")
    if any(link.varies for link in links):
        if "gloo" not in str(dist.get_backend_config(stage.pp_group)):
            raise ValueError(
                "NCCL moves messages of one length, and these vary: begin with dist."
                "init_process_group('cpu:gloo,cuda:nccl'), or take act_comp='quant:4'"
            )
        stage.comm_on_cpu = True
    stage.links, stage.num_calls = links, 0
    stage.top_logits, stage.vocabulary = top_logits, vocabulary
    name, bases = f"Compressed{type(stage).__name__}", (CompressedPipelineStage, type(stage))
    stage.__class__ = type(name, bases, {})
    _compare(stage, seed, next(model.parameters()).device)
    return stage  # type: ignore[no-any-return]


def _compare(stage: Any, seed: int, device: torch.device) -> None:
    """Compares the settings of all ranks: gloo dies of messages that differ in length."""
    methods = [(str(link.method), format_of(link)) for link in stage.links]
    number = fingerprint(methods, KINDS, seed, stage.top_logits)
    own = torch.tensor([number], device="cpu" if stage.comm_on_cpu else device)
    heard = [torch.empty_like(own) for _ in range(stage.pp_size)]
    dist.all_gather(heard, own, group=stage.pp_group)
    if any(each != own for each in heard):
        raise ValueError(
            "ranks called compress_pipeline with different settings, or have different versions of "
            f"mpcomp: give the same on every rank. This one has {stage.links[0].method}, "
            f"seed={seed}, top_logits={stage.top_logits}"
        )


class CompressedPipelineStage:
    """A stage of transformers' whose messages are compressed; `compress_pipeline` makes it of one.

    Attributes:
        links: of all cuts; ``link.meter.eval.sent`` counts what this rank has sent.
        top_logits: number of logits of a position that the last rank sends; None for all.
        vocabulary: number of logits of a position.
        num_calls: of the model so far.
        pp_rank: of transformers, the number of this stage.
    """

    links: list[Link]
    top_logits: int | None
    vocabulary: int
    num_calls: int
    pp_rank: int

    def communicate(
        self,
        operation: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        tensor: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor | None:
        """Sends hidden states [b, s, h] to the next stage, or receives the previous one's.

        Raises:
            ValueError: an operation that is neither.
            RuntimeError: a message is not one that this rank expects.
        """
        move: Any = super().communicate  # type: ignore[misc]
        step = Step(self.num_calls, train=False)
        if operation == "recv_forward" and self.pp_rank > 0:
            assert shape is not None
            link, meta = self.links[self.pp_rank - 1], TensorMeta(tuple(shape), dtype)
            room = (link.message_bytes(meta, step, 0, device),)
            message = move(operation, device=device, dtype=torch.uint8, shape=room)
            return link.decode(message, meta, step, 0, device)
        if operation == "send_forward" and self.pp_rank < len(self.links):
            assert tensor is not None
            link, x = self.links[self.pp_rank], tensor.detach().to(dtype=dtype).contiguous()
            message = link.encode(x, step, 0)
            move(operation, device=device, dtype=torch.uint8, tensor=message)
            link.compare_sent(x, message, step, 0)
            return None
        if operation in ("recv_forward", "send_forward"):
            return None  # the first stage receives nothing, and the last sends nothing
        raise ValueError(
            f"{operation!r} of transformers' pipeline: compress_pipeline knows inference "
            "alone; mpcomp.pipeline trains"
        )

    def broadcast_from_last(
        self, tensor: Tensor | None, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The logits [b, s, vocabulary] on every rank, which end a call of the model."""
        self.num_calls += 1
        broadcast: Any = super().broadcast_from_last  # type: ignore[misc]
        if self.top_logits is None:
            return broadcast(tensor, dtype=dtype, device=device)  # type: ignore[no-any-return]
        packed = None
        if tensor is not None:
            largest = tensor.to(dtype).topk(self.top_logits)
            bits = largest.values.float().contiguous().view(torch.int32)
            packed = torch.cat([bits, largest.indices.int()], dim=-1)
        bits, tokens = broadcast(packed, dtype=torch.int32, device=device).chunk(2, dim=-1)
        values = bits.contiguous().view(torch.float32).to(dtype)
        logits = torch.full((*bits.shape[:2], self.vocabulary), -torch.inf, device=device)
        return logits.to(dtype).scatter(-1, tokens.long(), values)
