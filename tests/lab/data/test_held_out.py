import shutil

import pytest
import torch
from image_files import write_cifar10, write_cifar100, write_tiny_imagenet

from divebatch.errors import ArgumentError
from divebatch.lab.data import DATASETS, DataPlace

SYNTHETIC = {"num_samples": 250, "num_features": 4, "noise_variance": 0.1, "train_fraction": 0.8}


def place(folder=None, **settings) -> DataPlace:
    return DataPlace(torch.device("cpu"), folder, **settings)


def load(kind, seed, fraction=0.2, place=DataPlace(torch.device("cpu")), **settings):  # noqa: B008
    return DATASETS[kind](**settings).load(seed, place, held_out=fraction)


def rows(split) -> tuple[set[tuple], set[tuple]]:
    """Training and validation samples, each as a tuple of numbers."""
    train = torch.cat([x.flatten(1) for x, _ in split.loader(7, seed=0).full_pass()])
    validation = torch.cat([x.flatten(1) for x, _ in split.validation])
    return set(map(tuple, train.tolist())), set(map(tuple, validation.tolist()))


def test_a_fifth_of_the_training_data_is_held_out_and_the_rest_trained_on():
    train, unseen = rows(load("synthetic", 3, 0.0, **SYNTHETIC))
    kept, held = rows(load("synthetic", 3, **SYNTHETIC))
    assert (len(kept), len(held)) == (160, 40)
    assert kept | held == train
    assert not kept & held
    assert not held & unseen


def test_labels_stay_with_their_samples():
    whole = load("synthetic", 3, 0.0, **SYNTHETIC).loader(250, seed=0)
    labels = {tuple(x): y for xs, ys in whole.full_pass() for x, y in zip(xs.tolist(), ys.tolist(), strict=True)}
    split = load("synthetic", 3, **SYNTHETIC)
    for xs, ys in [*split.loader(16, seed=1).full_pass(), *split.validation]:
        assert [labels[tuple(x)] for x in xs.tolist()] == ys.tolist()


def test_the_seed_chooses_what_is_held_out(tmp_path):
    write_cifar10(tmp_path)
    first, same, other = (rows(load("cifar10", seed, place=place(tmp_path), augment=False))[1] for seed in (1, 1, 2))
    assert first == same != other


@pytest.mark.parametrize(
    ("kind", "write", "test_data"),
    [
        ("cifar10", write_cifar10, "cifar-10-batches-py/test_batch"),
        ("cifar100", write_cifar100, "cifar-100-python/test"),
        ("tiny-imagenet", write_tiny_imagenet, "tiny-imagenet-200/val"),
    ],
)
def test_images_are_held_out_without_any_test_data_there(tmp_path, kind, write, test_data):
    write(tmp_path)
    gone = tmp_path / test_data
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    small = {"image_size": 64, "resize": 64} if kind == "tiny-imagenet" else {}
    split = load(kind, 0, 0.25, place=place(tmp_path), augment=False, **small)
    kept, held = rows(split)
    assert not kept & held
    assert len(held) == round(0.25 * (len(kept) + len(held)))


def test_training_images_are_augmented_and_held_out_ones_are_not(tmp_path):
    write_cifar10(tmp_path)
    plain = rows(load("cifar10", 0, place=place(tmp_path), augment=False))
    augmented = rows(load("cifar10", 0, place=place(tmp_path)))
    assert augmented[1] == plain[1]
    assert augmented[0] != plain[0]


def test_a_part_must_not_be_empty():
    with pytest.raises(ArgumentError, match="leaves a part empty"):
        load("synthetic", 0, 0.001, **SYNTHETIC)
