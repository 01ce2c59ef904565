"""Batches that depend on nothing but the seed, the epoch, the batch and the replica."""

import pytest
import torch

import mpcomp
from recipes.config import seeded
from recipes.data import Dataset, Images, Loader, loaders_of


def loader(num_images: int = 10, **chosen) -> Loader:
    """Images whose pixels are all different, so that a crop or flip shows."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (num_images, 3, 32, 32), generator=generator, dtype=torch.uint8)
    options = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "batch_size": 4, **chosen}
    return Loader(split=Images(images, torch.arange(num_images)), **options)


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
    one = loader(mean=(0.5,) * 3, std=(0.25,) * 3, memory_format=torch.channels_last)
    x, _ = next(iter(one))
    assert torch.allclose(x, (one.split.images[:4].float() / 255 - 0.5) / 0.25, atol=1e-5)
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_global_generator_is_left_alone(global_rng_untouched):
    with global_rng_untouched():
        list(loader().epoch(0))


def test_neighbouring_keys_give_unrelated_generators():
    keys = [(0,), (0, 0), (0, 0, 0), (1,), (0, 1), (1, 0)]
    draws = {torch.rand((), generator=seeded(*key)).item() for key in keys}
    assert len(draws) == len(keys)


def test_replicas_share_every_image(tiny):
    """Each image stays on its replica, all have as many, and augmentations are drawn apart."""
    both = [loader(11, batch_size=4, replica=i, num_replicas=2, aug_seeds=99) for i in (0, 1)]
    seen = [
        [torch.cat([ids for _, _, ids in one.epoch(epoch)]) for epoch in range(8)] for one in both
    ]
    for replica, epochs in enumerate(seen):
        assert all(len(ids) == len(both[replica]) * 2 == 4 for ids in epochs)
        share = mpcomp.ReplicaSampler(range(11), (replica, 2), shuffle=False)
        assert set(torch.cat(epochs)[:, 0].tolist()) == set(share)
    assert not torch.equal(seen[0][0][:, 1], seen[1][0][:, 1])


def test_replicas_share_every_image_of_an_evaluation():
    both = [loader(10, batch_size=4, replica=i, num_replicas=2) for i in (0, 1)]
    labels = [[y.tolist() for _, y in one] for one in both]
    assert labels == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]


def test_batches_that_cannot_be_shared(tiny):
    images = Images(torch.zeros(41, 3, 32, 32, dtype=torch.uint8), torch.zeros(41).long())
    dataset = Dataset(images, images, (0.0,) * 3, (1.0,) * 3)
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="last batch of 41 test images has 1, fewer than replicas"):
        loaders_of(tiny(batch_size=8, replicas=2), dataset, cpu)
    with pytest.raises(ValueError, match="of 20 training images of a replica has 2, fewer than"):
        loaders_of(tiny(batch_size=12, replicas=2, chunks=4, drop_last=False), dataset, cpu)
