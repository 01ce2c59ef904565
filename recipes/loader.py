"""Batches of images, shuffled and augmented from seeds.

What a batch holds depends only on (seed, epoch, batch, replica), so a resumed run sees exactly the
images of an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import mpcomp
from recipes.data import Dataset, Images
from recipes.image_config import ImageConfig


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Batches of one split, normalised and on its device.

    `epoch(e)` shuffles and augments for training and yields (x, y, ids); iterating yields (x, y)
    in order, every image once. With `aug_seeds` = n an image has n fixed augmentations, one is
    drawn on each visit, and ids are [b, 2]: (id, augmentation seed).

    Of several replicas each gets its part of every batch; in training an image stays on one.
    """

    split: Images
    mean: tuple[float, ...]
    std: tuple[float, ...]
    batch_size: int  # of all replicas together
    replica: int = 0
    num_replicas: int = 1
    seed: int = 0
    drop_last: bool = True
    crop_padding: int = 4
    flip: bool = True
    aug_seeds: int = 0
    channels_last: bool = False

    def __len__(self) -> int:
        """The number of batches in an epoch of training."""
        whole, rest = divmod(len(self.split) // self.num_replicas, self._share)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def _share(self) -> int:
        return self.batch_size // self.num_replicas

    def of(self, pipe: mpcomp.Pipeline) -> Loader:
        """The same batches, as the replica of this process gets them."""
        return dataclasses.replace(self, replica=pipe.replica, num_replicas=pipe.num_replicas)

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The batches of one epoch (counted from 0)."""
        place = self.replica, self.num_replicas
        own = torch.tensor(
            list(mpcomp.ReplicaSampler(self.split, place, shuffle=False, seed=self.seed))
        )
        order = own[torch.randperm(len(own), generator=seeded(self.seed, epoch))]
        fixed_draws = self._fixed_draws()
        for batch, ids in enumerate(torch.split(order, self._share)[: len(self)]):
            generator = seeded(self.seed, epoch, batch, *([self.replica] if self.replica else ()))
            if self.aug_seeds:
                aug_seeds = torch.randint(self.aug_seeds, (len(ids),), generator=generator)
                draws = fixed_draws[ids, aug_seeds]
                ids_sent = torch.stack([ids, aug_seeds], dim=1)
            else:
                draws = torch.rand(len(ids), 3, generator=generator)
                ids_sent = ids
            images, labels = self._take(ids)
            yield self._normalise(self._augment(images, draws)), labels, ids_sent

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in torch.split(torch.arange(len(self.split)), self.batch_size):
            images, labels = self._take(batch.tensor_split(self.num_replicas)[self.replica])
            yield self._normalise(images), labels

    def _take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = ids.to(self.split.images.device)
        return self.split.images[ids], self.split.labels[ids]

    def _fixed_draws(self) -> Tensor:
        """[n, aug_seeds, 3] numbers in [0, 1): the fixed augmentations of every image."""
        shape = (len(self.split), self.aug_seeds, 3)
        return torch.rand(shape, generator=seeded(self.seed))

    def _augment(self, images: Tensor, draws: Tensor) -> Tensor:
        """Random crop and flip; `draws` [b, 3] in [0, 1) choose row, column and flip.

        The numbers are drawn on the CPU, so that every device sees the same images.
        """
        draws = draws.to(images.device)
        pad, size = self.crop_padding, images.shape[-1]
        span = torch.arange(size, device=images.device)
        shift = (draws[:, :2] * (2 * pad + 1)).long()
        rows = shift[:, 0, None] + span  # [b, size]
        columns = shift[:, 1, None] + span
        if self.flip:
            columns = torch.where(draws[:, 2, None] < 0.5, columns.flip(1), columns)
        padded = F.pad(images, (pad, pad, pad, pad))
        sample = torch.arange(len(images), device=images.device)[:, None, None, None]
        channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
        return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]

    def _normalise(self, images: Tensor) -> Tensor:
        mean = torch.tensor(self.mean, device=images.device)[:, None, None] * 255
        std = torch.tensor(self.std, device=images.device)[:, None, None] * 255
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return ((images.float() - mean) / std).contiguous(memory_format=layout)


def loaders_of(
    config: ImageConfig, dataset: Dataset, device: torch.device
) -> tuple[Loader, Loader]:
    """For training and for evaluation.

    Raises:
        ValueError: a batch cannot fill its microbatches on every replica.
    """
    num_train, share = len(dataset.train) // config.replicas, config.batch_size // config.replicas
    whose = "" if config.replicas == 1 else " of a replica"
    if config.drop_last and num_train < share:
        raise ValueError(
            f"batch_size is {config.batch_size}, but there are {len(dataset.train)} training "
            "images; pass a smaller --batch-size"
        )
    if not config.drop_last and 0 < num_train % share < config.chunks:
        raise ValueError(
            f"the last batch of {num_train} training images{whose} has {num_train % share}, fewer "
            f"than chunks ({config.chunks}); drop it with --drop-last, or pass another --batch-size"
        )
    if 0 < (rest := len(dataset.test) % config.batch_size) < config.replicas:
        raise ValueError(
            f"the last batch of {len(dataset.test)} test images has {rest}, fewer than replicas "
            f"({config.replicas}); pass another --batch-size or --test-limit"
        )

    def loader(split: Images) -> Loader:
        return Loader(
            split=split.to(device),
            mean=dataset.mean,
            std=dataset.std,
            batch_size=config.batch_size,
            num_replicas=config.replicas,
            seed=config.seed,
            drop_last=config.drop_last,
            crop_padding=config.crop_padding,
            flip=config.flip,
            aug_seeds=config.aug_seeds,
            channels_last=config.channels_last,
        )

    return loader(dataset.train), loader(dataset.test)


def seeded(*key: int) -> torch.Generator:
    """A generator of its own for each key, unrelated for neighbouring keys."""
    # SeedSequence counts trailing zeros as absent; the length keeps (1,) and (1, 0) apart.
    state = np.random.SeedSequence([len(key), *key]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))
