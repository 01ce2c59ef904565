"""What the tests of the recipes share: folders of images in CIFAR-10's form, and a tiny run."""

import io
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from recipes.image_config import ImageConfig

WriteParquet = Callable[..., Path]


@pytest.fixture(autouse=True)
def _private_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps what `datasets` converts out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def write_parquet(tmp_path: Path) -> WriteParquet:
    """Writes both splits with random images and the labels 0, 1, ... and gives the folder."""

    def write(
        *,
        num_train: int = 12,
        num_test: int = 4,
        size: int = 32,
        columns: tuple[str, str] = ("img", "label"),
        splits: tuple[str, str] = ("train", "test"),
    ) -> Path:
        folder = tmp_path / "images"
        folder.mkdir()
        random = np.random.default_rng(0)
        for split, count in zip(splits, (num_train, num_test), strict=True):
            pixels = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
            rows = {columns[0]: [png(one) for one in pixels], columns[1]: [*range(count)]}
            features = datasets.Features(
                {columns[0]: datasets.Image(), columns[1]: datasets.Value("int64")}
            )
            table = datasets.Dataset.from_dict(rows, features=features)
            table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
        return folder

    return write


def png(pixels: np.ndarray) -> dict[str, bytes | None]:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": None}


@pytest.fixture
def sentences(tmp_path: Path) -> Callable[[int], str]:
    """Writes a file of so many lines of text, and gives its name."""

    def write(count: int) -> str:
        file = tmp_path / "words.txt"
        lines = (f"the {i} stage sends {i * i} to the next\n" for i in range(count))
        file.write_text("".join(lines))
        return str(file)

    return write


@pytest.fixture
def tiny() -> Callable[..., ImageConfig]:
    """A run of seconds: few digits, a narrow model."""

    def config(**chosen: object) -> ImageConfig:
        defaults = {
            "width": 4,
            "epochs": 2,
            "batch_size": 16,
            "train_limit": 40,
            "test_limit": 20,
            "chunks": 2,
            "precision": "fp32",
            "device": "cpu",
        }
        return ImageConfig.for_data("digits", **{**defaults, **chosen})

    return config
