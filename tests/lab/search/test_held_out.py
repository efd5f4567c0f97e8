import shutil
from dataclasses import replace

import pytest
import torch

from divebatch.errors import ArgumentError
from divebatch.lab.experiments.assembly import check_parts
from divebatch.lab.experiments.datasets import DataPlace
from divebatch.lab.experiments.datasets.synthetic import Synthetic
from divebatch.lab.experiments.schema import Part
from divebatch.lab.search.held_out import HeldOut, with_held_out
from lab.experiments.dataset_tests.image_files import write_cifar10, write_cifar100, write_tiny_imagenet
from lab.search.tiny_search import tiny_experiment

SYNTHETIC = {"num_samples": 250, "num_features": 4, "noise_variance": 0.1, "train_fraction": 0.8}


def place(folder=None, **settings) -> DataPlace:
    return DataPlace(torch.device("cpu"), folder, **settings)


def rows(split) -> tuple[set[tuple], set[tuple]]:
    """Training and validation samples, each as a tuple of numbers."""
    train = torch.cat([x.flatten(1) for x, _ in split.loader(7, seed=0).full_pass()])
    validation = torch.cat([x.flatten(1) for x, _ in split.validation])
    return set(map(tuple, train.tolist())), set(map(tuple, validation.tolist()))


def test_a_fifth_of_the_training_data_is_held_out_and_the_rest_trained_on():
    train, unseen = rows(Synthetic(**SYNTHETIC).load(3, place()))
    kept, held = rows(HeldOut(of="synthetic", settings=SYNTHETIC).load(3, place()))
    assert (len(kept), len(held)) == (160, 40)
    assert kept | held == train
    assert not kept & held
    assert not held & unseen


def test_labels_stay_with_their_samples():
    whole = Synthetic(**SYNTHETIC).load(3, place()).loader(250, seed=0)
    labels = {tuple(x): y for xs, ys in whole.full_pass() for x, y in zip(xs.tolist(), ys.tolist(), strict=True)}
    split = HeldOut(of="synthetic", settings=SYNTHETIC).load(3, place())
    for xs, ys in [*split.loader(16, seed=1).full_pass(), *split.validation]:
        assert [labels[tuple(x)] for x in xs.tolist()] == ys.tolist()


def test_the_seed_chooses_what_is_held_out(tmp_path):
    write_cifar10(tmp_path)
    first, same, other = (
        rows(HeldOut(of="cifar10", settings={"augment": False}).load(seed, place(tmp_path)))[1] for seed in (1, 1, 2)
    )
    assert first == same != other


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize(
    ("kind", "write", "test_data"),
    [
        ("cifar10", write_cifar10, "cifar-10-batches-py/test_batch"),
        ("cifar100", write_cifar100, "cifar-100-python/test"),
        ("tiny-imagenet", write_tiny_imagenet, "tiny-imagenet-200/val"),
    ],
)
def test_images_are_held_out_without_any_test_data_there(tmp_path, kind, write, test_data, on_device):
    write(tmp_path)
    gone = tmp_path / test_data
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    small = {"image_size": 64, "resize": 64} if kind == "tiny-imagenet" else {}
    split = HeldOut(of=kind, fraction=0.25, settings={"augment": False, **small}).load(
        0, place(tmp_path, on_device=on_device)
    )
    kept, held = rows(split)
    assert not kept & held
    assert len(held) == round(0.25 * (len(kept) + len(held)))


def test_training_images_are_augmented_and_held_out_ones_are_not(tmp_path):
    write_cifar10(tmp_path)
    plain = rows(HeldOut(of="cifar10", settings={"augment": False}).load(0, place(tmp_path)))
    augmented = rows(HeldOut(of="cifar10").load(0, place(tmp_path)))
    assert augmented[1] == plain[1]
    assert augmented[0] != plain[0]


def test_an_experiment_with_a_part_held_out_checks_the_part():
    experiment = with_held_out(tiny_experiment(), 0.2)
    check_parts(experiment)
    with pytest.raises(ArgumentError, match="fraction must lie between 0 and 1"):
        check_parts(with_held_out(tiny_experiment(), 1.0))
    unknown = replace(tiny_experiment(), data=Part(kind="poems"))
    with pytest.raises(ArgumentError, match="'poems' data cannot be held out; known: synthetic, cifar10"):
        check_parts(with_held_out(unknown, 0.2))


def test_a_part_must_not_be_empty():
    with pytest.raises(ArgumentError, match="leaves a part empty"):
        HeldOut(of="synthetic", fraction=0.001, settings=SYNTHETIC).load(0, place())
