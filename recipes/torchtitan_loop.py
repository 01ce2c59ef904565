"""Compressed cuts in a loop of torchtitan's shape: torch's own stages, driven by its schedule.

    torchrun --nproc-per-node 2 -m recipes.torchtitan_loop
    torchrun --nproc-per-node 4 -m recipes.torchtitan_loop --act auto --grad auto
    torchrun --nproc-per-node 2 -m recipes.torchtitan_loop --schedule Interleaved1F1B

Names are torchtitan's, of ``distributed/pipeline_parallel.py`` and ``Trainer.train_step``. One line
is new: `compressed`. The model learns to count.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from mpcomp.pipelining import compressed
from recipes.decoder import decoder, equal_stages, token_loss

BLOCKS, VOCAB, CONTEXT = 8, 64, 32


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains; gives the losses on the rank of the last stage, and an empty list elsewhere."""
    options = parse_args(argv)
    kind, local_rank = "cpu", int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        kind = "cuda"
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group({"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[kind])
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    pp_mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("pp",))["pp"]
    group, size = pp_mesh.get_group(), pp_mesh.size()

    schedule_class = get_schedule_class(options.schedule)
    several = issubclass(schedule_class, PipelineScheduleMulti)
    num_stages = size * (2 if several else 1)
    blocks, stages = iter(decoder(num_blocks=BLOCKS, width=64, vocab=VOCAB, context=CONTEXT)), []
    for index, count in enumerate(equal_stages(BLOCKS, num_stages)):
        part = nn.Sequential(*(next(blocks) for _ in range(count)))
        if index % size == pp_mesh.get_local_rank():
            stages.append(PipelineStage(part.to(device), index, num_stages, device, group=group))
    stages = compressed(stages, act=options.act, grad=options.grad)  # what is new
    given = stages if several else stages[0]
    pp_schedule = schedule_class(given, options.microbatches, loss_fn=token_loss)

    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)
    history = []
    for step in range(options.steps):
        optimizer.zero_grad()
        input_ids, labels = (tokens.to(device) for tokens in batch(options.batch, step))
        args = (input_ids,) if any(stage.is_first for stage in stages) else ()
        is_last = any(stage.is_last for stage in stages)
        losses: list[Tensor] = []
        targets = {"target": labels, "losses": losses} if is_last else {}
        pp_schedule.step(*args, **targets, return_outputs=False)
        norm = clip_grad_norm_(parameters, 1.0, group)
        optimizer.step()
        lr_scheduler.step()
        if losses:
            history.append(float(torch.stack(losses).mean()))
            print(f"step {step + 1}: loss {history[-1]:.3f}, norm {norm:.2f}", flush=True)
    for stage in stages:
        for link in stage.links:
            sent = link.meter.train.sent
            if link.sender_stage == stage.stage_index and sent.wire_bytes:
                fewer = f"{sent.wire_bytes / 1e3:.0f} kB, {sent.below_bf16:.1f} times below bf16"
                print(f"{link.name}: {link.method}, {fewer}", flush=True)
    return history


def clip_grad_norm_(parameters: list[Tensor], max_norm: float, group: dist.ProcessGroup) -> Tensor:
    """Clips by the norm over all stages, which it gives."""
    squared = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) ** 2
    dist.all_reduce(squared, group=group)
    norm = squared.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def batch(rows: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens that count by 1 to 4, and each one's next; both [rows, CONTEXT]."""
    generator = torch.Generator().manual_seed(step)
    start, by = (torch.randint(1, high, (rows, 1), generator=generator) for high in (VOCAB, 5))
    counted = (start + by * torch.arange(CONTEXT + 1)) % VOCAB
    return counted[:, :-1].contiguous(), counted[:, 1:].contiguous()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--act", default="topk:0.1", help="what compresses activations (default %(default)s)")
    add("--grad", default="topk:0.1", help="what compresses their gradients (default %(default)s)")
    add("--schedule", default="1F1B", help="of torch's, with a stage a rank or two in turn")
    add("--microbatches", type=int, default=4)
    add("--batch", type=int, default=16)
    add("--steps", type=int, default=20)
    add("--lr", type=float, default=3e-3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
