"""Loading, decoding, and batches that depend on nothing but the seed, the epoch and the batch."""

from pathlib import Path

import pytest
import torch

from recipes import data
from recipes.data import Images, Loader

CIFAR = Path(__file__).parents[3] / "shared" / "data" / "cifar10"


def loader(num_images: int = 10, **chosen) -> Loader:
    """Images whose pixels are all different, so that a crop or flip shows."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (num_images, 3, 32, 32), generator=generator, dtype=torch.uint8)
    options = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "batch_size": 4, **chosen}
    return Loader(split=Images(images, torch.arange(num_images)), **options)


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
    monkeypatch.setattr(data, "_hub_answers", lambda name: False)
    with pytest.raises(ValueError) as caught:
        data.load("nobody/there-is-no-such-data-set")
    assert "\n" not in str(caught.value)
    assert "--data digits, which needs no download" in str(caught.value)


def test_epoch_visits_each_image_once_and_drops_the_rest():
    batches = list(loader(drop_last=True).epoch(0))
    assert [len(x) for x, _, _ in batches] == [4, 4]
    assert len(loader(drop_last=True)) == 2
    kept = loader(drop_last=False)
    ids = torch.cat([ids for _, _, ids in kept.epoch(0)])
    assert sorted(ids.tolist()) == list(range(10))
    assert len(kept) == 3


def test_epoch_is_a_function_of_seed_and_epoch():
    first = [x for x, _, _ in loader().epoch(3)]
    again = [x for x, _, _ in loader().epoch(3)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other_epoch, other_seed = next(loader().epoch(4))[0], next(loader(seed=1).epoch(3))[0]
    assert not torch.equal(first[0], other_epoch)
    assert not torch.equal(first[0], other_seed)


def test_ids_and_labels_belong_to_the_images():
    plain = loader(crop_padding=0, flip=False)
    x, y, ids = next(plain.epoch(0))
    assert torch.equal(y, plain.split.labels[ids])
    assert torch.allclose(x * 255, plain.split.images[ids].float())


def test_crop_and_flip_are_those_of_the_padded_image():
    images = loader().split.images
    pad = torch.nn.functional.pad(images, (4, 4, 4, 4))
    # row 0, column 8, flipped; row 8, column 0, not flipped; the middle.
    draws = torch.tensor([[0.0, 0.99, 0.0], [0.99, 0.0, 0.9], [0.5, 0.5, 0.9]])
    out = loader()._augment(images[:3], draws)
    assert torch.equal(out[0], pad[0, :, 0:32, 8:40].flip(2))
    assert torch.equal(out[1], pad[1, :, 8:40, 0:32])
    assert torch.equal(out[2], images[2])


def test_fixed_augmentations_are_found_by_image_and_seed():
    fixed = loader(aug_seeds=2)
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    visits = 0
    for epoch in range(6):
        for x, _, ids in fixed.epoch(epoch):
            assert ids.shape == (4, 2)
            for key, image in zip(ids.tolist(), x, strict=True):
                visits += 1
                assert torch.equal(seen.setdefault(tuple(key), image), image)
    assert 10 < len(seen) <= 20 < visits  # both seeds occur, and images came back


def test_evaluation_visits_every_image_in_order():
    batches = list(loader(crop_padding=4, drop_last=True))
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    x = torch.cat([x for x, _ in batches])
    assert torch.allclose(x * 255, loader().split.images.float())


def test_normalisation_and_memory_layout():
    one = loader(mean=(0.5,) * 3, std=(0.25,) * 3, channels_last=True)
    x, _ = next(iter(one))
    assert torch.allclose(x, (one.split.images[:4].float() / 255 - 0.5) / 0.25, atol=1e-5)
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_global_generator_is_left_alone(global_rng_untouched):
    with global_rng_untouched():
        list(loader().epoch(0))


def test_neighbouring_keys_give_unrelated_generators():
    keys = [(0,), (0, 0), (0, 0, 0), (1,), (0, 1), (1, 0)]
    draws = {torch.rand((), generator=data.seeded(*key)).item() for key in keys}
    assert len(draws) == len(keys)
