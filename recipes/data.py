"""Images for the recipes: loaded from where they lie, and decoded once into uint8 tensors."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.hub import Form, load_splits

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
