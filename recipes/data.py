"""Images for the recipes, decoded once into uint8 tensors, and their batches, drawn from seeds.

What a batch holds depends only on (seed, epoch, batch, replica), so a resumed run sees exactly the
images of an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import mpcomp
from recipes.config import seeded
from recipes.hub import Form, load_splits
from recipes.image_config import ImageConfig

FORM: Final = Form(
    columns=("img", "label"),
    splits=("train", "test"),
    example="uoft-cs/cifar10",
    local="digits",
)
IMAGE_SIZE: Final = 32
CIFAR_MEAN_STD: Final = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
DIGITS_MEAN_STD: Final = ((0.3055,) * 3, (0.3237,) * 3)
NUM_DIGITS_TEST: Final = 540  # of 1,797


@dataclass(frozen=True)
class Images:
    """One split: images [n, 3, 32, 32] uint8 and labels [n] int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def head(self, limit: int | None) -> Images:
        """The first `limit` images; all for None."""
        return self if limit is None else Images(self.images[:limit], self.labels[:limit])

    def to(self, device: torch.device) -> Images:
        """The same split on another device."""
        return Images(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """Both splits, and the channel statistics that normalise them."""

    train: Images
    test: Images
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int = 10


def load(data: str, *, train_limit: int | None = None, test_limit: int | None = None) -> Dataset:
    """`digits`, a folder of parquet files with the columns of CIFAR-10, or a data set's hub name.

    A limit keeps the first images of a split.

    Raises:
        ValueError: there is no such data, or it has other columns.
    """
    if data == "digits":
        digits = _load_digits()
        return dataclasses.replace(
            digits, train=digits.train.head(train_limit), test=digits.test.head(test_limit)
        )
    splits = load_splits(data, FORM)
    mean, std = CIFAR_MEAN_STD
    return Dataset(
        train=_decode(splits["train"], data, train_limit),
        test=_decode(splits["test"], data, test_limit),
        mean=mean,
        std=std,
    )


def _load_digits() -> Dataset:
    """scikit-learn's 8x8 handwritten digits as 3x32x32, with a fixed stratified split."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ValueError(
            'the data set digits comes with scikit-learn: pip install -e ".[recipes]"'
        ) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) * (255 / 16)  # [n, 1, 8, 8]
    images = F.interpolate(images, size=IMAGE_SIZE, mode="bilinear", align_corners=False)
    images = images.round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    labels = torch.from_numpy(digits.target).long()
    train, test = train_test_split(
        np.arange(len(labels)), test_size=NUM_DIGITS_TEST, stratify=digits.target, random_state=0
    )
    mean, std = DIGITS_MEAN_STD
    return Dataset(
        train=Images(images[train], labels[train]),
        test=Images(images[test], labels[test]),
        mean=mean,
        std=std,
    )


def _decode(split: Any, data: str, limit: int | None) -> Images:
    """The first `limit` images of a split, decoded once; Pillow decodes outside Python's lock."""
    import datasets
    from PIL import Image

    if isinstance(split.features["img"], datasets.Image):
        split = split.cast_column("img", datasets.Image(decode=False))
    if limit is not None:
        split = split.select(range(min(limit, len(split))))
    rows = split[:]  # at once: row by row takes longer than the decoding
    if not rows["label"]:
        raise ValueError(f"{data} has an empty split; expected at least one image in each")

    def decode(row: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        source = row["bytes"] if isinstance(row, Mapping) else row
        if source is None:
            source = Path(row["path"]).read_bytes()
        if not isinstance(source, bytes):
            raise ValueError(
                f"the column img of {data} holds {type(source).__name__}; expected encoded images "
                "(bytes of PNG or JPEG)"
            )
        image = Image.open(io.BytesIO(source)).convert("RGB")
        if image.size != (IMAGE_SIZE, IMAGE_SIZE):
            raise ValueError(
                f"{data} holds an image of {image.size[0]}x{image.size[1]} pixels; expected "
                f"{IMAGE_SIZE}x{IMAGE_SIZE}: resize the images"
            )
        return np.asarray(image)

    with ThreadPoolExecutor() as pool:
        pixels = np.stack(list(pool.map(decode, rows["img"])))  # [n, 32, 32, 3]
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    return Images(images, torch.tensor(rows["label"], dtype=torch.int64))


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
    memory_format: torch.memory_format = torch.contiguous_format

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
        return ((images.float() - mean) / std).contiguous(memory_format=self.memory_format)


def loaders_of(
    config: ImageConfig, dataset: Dataset, device: torch.device
) -> tuple[Loader, Loader]:
    """For training and for evaluation.

    Raises:
        ValueError: a batch cannot fill its microbatches on every replica.
    """
    config.check_fills_call(len(dataset.train))
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
            batch_size=config.call_batch,
            num_replicas=config.replicas,
            seed=config.seed,
            drop_last=config.drop_last,
            crop_padding=config.crop_padding,
            flip=config.flip,
            aug_seeds=config.aug_seeds,
            memory_format=config.memory_format,
        )

    return loader(dataset.train), loader(dataset.test)
