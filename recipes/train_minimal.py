"""A whole compressed training on images in one file, to be read from top to bottom and copied.

    python recipes/train_minimal.py                        # digits of 8x8 pixels, no download
    torchrun --nproc-per-node 2 recipes/train_minimal.py   # the same, a stage a process
    python recipes/train_minimal.py --act quant:4 --grad ef21+topk:0.1
    python recipes/train_minimal.py --data cifar10 --width 64 --epochs 30

It prints the loss and the bytes sent after each epoch, then the test accuracy with compression on
(as trained) and off, and what went over each cut. `recipes.cifar10` has options for everything
else: checkpoints, replicas, mixed precision, plots, other models.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import mpcomp
import stages

CIFAR10 = Path(__file__).resolve().parents[2] / "shared/data/cifar10"


def main(argv: Sequence[str] | None = None) -> float:
    """Trains, and gives the test accuracy with compression on."""
    options = parse_args(argv)
    (images, labels), (test_images, test_labels) = load(options.data)
    images, labels = images[: options.limit], labels[: options.limit]

    # Every process makes the same model, and keeps the stage that is its own. One process has all
    # stages, and sends the same bytes between them.
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(options.seed)
    pipe = mpcomp.pipeline(
        stages.resnet18(num_classes=10, width=options.width),
        chunks=options.chunks,
        split=max(2, num_processes),
        act_comp=options.act,
        grad_comp=options.grad,
        loss_fn=F.cross_entropy,
        seed=options.seed,
    )
    speaks = int(os.environ.get("RANK", 0)) == 0

    num_steps = options.epochs * (len(labels) // options.batch_size)
    optimizer = torch.optim.SGD(pipe.parameters(), options.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=options.lr, total_steps=num_steps, cycle_momentum=False
    )

    start = time.perf_counter()
    for epoch in range(options.epochs):
        losses: list[Tensor] = []
        for x, y, ids in batches(images, labels, options, epoch):
            # All microbatches, forward and back; the same loss on every rank. Methods that remember
            # each sample's activations (aqsgd) know it by its id.
            losses.append(pipe.forward_backward(x, y, sample_ids=ids))
            mpcomp.clip_grad_norm_(pipe, 5.0)  # the norm over all stages
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        sent = pipe.sent  # by all ranks so far
        if speaks:
            print(
                f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}, "
                f"{sent.wire_bytes / 1e3:.0f} kB sent, {sent.below_bf16:.1f} times below bf16, "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )

    tests = list(zip(torch.split(test_images, 256), torch.split(test_labels, 256), strict=True))
    on: float = pipe.evaluate(tests, accuracy)
    with pipe.uncompressed():
        off: float = pipe.evaluate(tests, accuracy)
    if speaks:
        print(f"test accuracy {100 * on:.2f} % with compression, {100 * off:.2f} % without")
    pipe.report(show=True)  # per cut and direction: bytes, times below bf16, fidelity, time
    return on


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", choices=("digits", "cifar10"), default="digits")
    add("--act", default="topk:0.1", help="what compresses activations (default %(default)s)")
    add("--grad", default="topk:0.1", help="what compresses their gradients (default %(default)s)")
    add("--chunks", type=int, default=4, help="microbatches of a batch")
    add("--width", type=int, default=16, help="channels of the first layers")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=64)
    add("--lr", type=float, default=0.05, help="the highest")
    add("--limit", type=int, help="training images")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def load(name: str) -> list[tuple[Tensor, Tensor]]:
    """Images [n, 3, h, w] and labels [n], to train on and to test on."""
    if name == "digits":
        from sklearn.datasets import load_digits

        found = load_digits()
        images = torch.tensor(found.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
        labels = torch.tensor(found.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        chosen = (order[540:], order[:540])
        splits = [(images[rows], labels[rows]) for rows in chosen]
    else:
        import datasets
        import numpy as np

        source = datasets.load_dataset(str(CIFAR10) if CIFAR10.exists() else "uoft-cs/cifar10")
        splits = []
        for split in ("train", "test"):
            pixels = torch.tensor(np.stack([np.asarray(image) for image in source[split]["img"]]))
            images = pixels.permute(0, 3, 1, 2).float() / 255
            splits.append((images, torch.tensor(source[split]["label"])))
    mean, std = splits[0][0].mean((0, 2, 3), keepdim=True), splits[0][0].std()
    return [((x - mean) / std, labels) for x, labels in splits]


def batches(
    images: Tensor, labels: Tensor, options: argparse.Namespace, epoch: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Images, labels and ids in an order of their own in each epoch, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * options.seed + epoch)
    order = torch.randperm(len(labels), generator=generator)
    for ids in torch.split(order, options.batch_size):
        if len(ids) == options.batch_size:
            size, pad = images.shape[-1], images.shape[-1] // 8
            i, j = torch.randint(2 * pad + 1, (2,), generator=generator).tolist()
            yield F.pad(images[ids], [pad] * 4)[..., i : i + size, j : j + size], labels[ids], ids


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of a batch that is right; [b, classes] and [b]."""
    return (output.argmax(1) == target).double().mean()


if __name__ == "__main__":
    main()
