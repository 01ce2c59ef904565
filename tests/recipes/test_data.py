"""Loading and decoding."""

from pathlib import Path

import pytest
import torch

from recipes import data, hub

CIFAR = Path(__file__).parents[3] / "shared" / "data" / "cifar10"


def test_digits_have_a_fixed_stratified_split():
    digits = data.load("digits")
    assert (len(digits.train), len(digits.test)) == (1257, 540)
    assert digits.train.images.shape == (1257, 3, 32, 32)
    assert digits.train.images.dtype == torch.uint8
    assert digits.test.labels.bincount().min() >= 51
    pixels = digits.train.images.float() / 255
    assert abs(pixels.mean() - digits.mean[0]) < 1e-3
    assert abs(pixels.std() - digits.std[0]) < 1e-3
    assert torch.equal(digits.test.images, data.load("digits").test.images)


def test_limits_keep_the_first_images():
    full, few = data.load("digits"), data.load("digits", train_limit=7, test_limit=3)
    assert torch.equal(few.train.images, full.train.images[:7])
    assert len(few.test) == 3


def test_folder_of_parquet_files(write_parquet):
    images = data.load(str(write_parquet()))
    assert images.train.images.shape == (12, 3, 32, 32)
    assert images.train.labels.tolist() == list(range(12))
    assert images.train.images.float().std() > 50  # decoded, not zeros
    assert images.mean == data.CIFAR_MEAN_STD[0]


@pytest.mark.skipif(not CIFAR.is_dir(), reason="CIFAR-10 does not lie beside the checkout")
def test_real_cifar10():
    images = data.load(str(CIFAR), train_limit=500, test_limit=100)
    assert images.train.images.shape == (500, 3, 32, 32)
    assert sorted(images.train.labels.unique().tolist()) == list(range(10))
    mean = images.train.images.float().mean((0, 2, 3)) / 255
    assert torch.allclose(mean, torch.tensor(data.CIFAR_MEAN_STD[0]), atol=0.03)


def test_missing_columns_are_named(write_parquet):
    folder = write_parquet(columns=("image", "label"))
    with pytest.raises(ValueError, match=r"columns \['image', 'label'\].*expected.*'img', 'label'"):
        data.load(str(folder))


def test_missing_split_is_named(write_parquet):
    with pytest.raises(
        ValueError, match=r"splits \['train', 'validation'\]; expected train and test"
    ):
        data.load(str(write_parquet(splits=("train", "validation"))))


def test_other_image_sizes_are_refused(write_parquet):
    with pytest.raises(ValueError, match="28x28 pixels; expected 32x32"):
        data.load(str(write_parquet(size=28)))


def test_missing_folder():
    with pytest.raises(ValueError, match=r"no folder \./nowhere; pass --data"):
        data.load("./nowhere")


def test_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="cannot load the data set .*--data digits"):
        data.load(str(tmp_path))


def test_hub_name_without_network_says_what_to_pass(monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda name, kind: False)
    with pytest.raises(ValueError) as caught:
        data.load("nobody/there-is-no-such-data-set")
    assert "\n" not in str(caught.value)
    assert "--data digits, which needs no download" in str(caught.value)
