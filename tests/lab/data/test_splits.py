"""Drawn data follows from its seed; a part of any training data can be held out, without a look at the test data."""

import shutil

import pytest
import torch
from image_files import write_cifar10, write_cifar100, write_tiny_imagenet

from divebatch.errors import ArgumentError
from divebatch.lab.data import DATASETS, DataPlace
from divebatch.lab.data.synthetic import Synthetic

CPU = DataPlace(torch.device("cpu"))
PAPER = Synthetic(num_samples=20_000, num_features=512, noise_variance=0.1, train_fraction=0.8)


def train_tensors(split):
    return split.loader(128, seed=0).dataset.tensors


def test_the_papers_data():
    split = PAPER.load(0, CPU)
    features, labels = train_tensors(split)
    assert features.shape == (16_000, 512)
    assert split.validation[0][0].shape == (4_000, 512)
    assert features.min() >= -1
    assert features.max() <= 1
    assert abs(features.mean()) < 0.01
    assert abs(features.var() - 1 / 3) < 0.01
    assert set(labels.unique().tolist()) == {0.0, 1.0}
    assert 0.4 < labels.mean() < 0.6


def test_labels_follow_the_weights_but_for_the_noise():
    clean = Synthetic(num_samples=2_000, num_features=8, noise_variance=1e-12, train_fraction=0.5).load(3, CPU)
    features, labels = train_tensors(clean)
    signs = labels * 2 - 1
    # A separator exists: the perceptron finds it within a bounded number of mistakes.
    weights = torch.zeros(8, 1)
    for _ in range(500):
        wrong = (features @ weights) * signs <= 0
        if not wrong.any():
            break
        weights += (features * signs * wrong).sum(0, keepdim=True).T
    assert not ((features @ weights) * signs <= 0).any()


def test_each_seed_has_its_own_data_and_always_the_same():
    first, again, other = (train_tensors(PAPER.load(seed, CPU))[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


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


def test_a_part_must_not_be_empty():
    with pytest.raises(ArgumentError, match="leaves a part empty"):
        load("synthetic", 0, 0.001, **SYNTHETIC)
