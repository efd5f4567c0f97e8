import os
import pickle
import re

import numpy as np
import pytest
import torch
from image_files import cifar_pixels, python2_pickle, write_cifar10, write_cifar100

from divebatch.errors import ArgumentError, DataError
from divebatch.lab.data import DATASETS, DataPlace
from divebatch.lab.data.cifar import CIFAR10, CIFAR100

CPU = torch.device("cpu")


def load(folder, kind="cifar10", **settings):
    return DATASETS[kind](**settings).load(0, DataPlace(CPU, folder))


def in_order(loader):
    images, labels = map(torch.cat, zip(*loader.full_pass(), strict=True))
    return images, labels.tolist()


def test_cifar10_is_read_in_the_order_of_its_files(tmp_path):
    write_cifar10(tmp_path, per_file=3)
    split = load(tmp_path, augment=False)
    images, labels = in_order(split.loader(4, seed=0))
    assert labels == [(number + place) % 10 for number in range(5) for place in range(3)]
    pixels = np.concatenate([cifar_pixels(3, seed=number) for number in range(5)]).reshape(-1, 3, 32, 32) / 255
    mean, std = (np.array(values)[:, None, None] for values in (CIFAR10.colours.mean, CIFAR10.colours.std))
    torch.testing.assert_close(images, torch.tensor((pixels - mean) / std).float(), atol=1e-5, rtol=1e-5)
    assert (split.num_classes, split.num_features) == (10, 0)


def test_validation_is_the_test_file(tmp_path):
    write_cifar10(tmp_path, per_file=3)
    ((images, labels),) = load(tmp_path).validation
    assert labels.tolist() == [5, 6, 7]
    assert images.shape == (3, 3, 32, 32)


def test_cifar100_has_its_fine_labels(tmp_path):
    write_cifar100(tmp_path, train=12, test=6)
    split = load(tmp_path, "cifar100", eval_batch_size=4)
    _, labels = in_order(split.loader(5, seed=0))
    assert labels == [(7 * place) % 100 for place in range(12)]
    assert [len(y) for _, y in split.validation] == [4, 2]
    assert split.num_classes == 100
    assert CIFAR100.colours != CIFAR10.colours


def test_the_augmentations_of_the_paper(tmp_path):
    write_cifar10(tmp_path)
    write_cifar100(tmp_path)
    kinds = {kind: type(load(tmp_path, kind).loader(4, seed=0)._augment).__name__ for kind in ("cifar10", "cifar100")}
    assert kinds == {"cifar10": "CropFlip", "cifar100": "CropFlipRotate"}


def test_the_data_does_not_depend_on_the_seed(tmp_path):
    write_cifar10(tmp_path)
    first, other = (DATASETS["cifar10"]().load(seed, DataPlace(CPU, tmp_path)).loader(4, seed=0) for seed in (0, 1))
    assert torch.equal(in_order(first)[0], in_order(other)[0])


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_files_of_later_pythons_are_read(tmp_path, protocol):
    folder = write_cifar10(tmp_path)
    labels = np.array([9, 8], dtype=np.int64)
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": cifar_pixels(2), b"labels": labels}, protocol))
    ((_, found),) = load(tmp_path).validation
    assert found.tolist() == [9, 8]


def test_no_folder_was_given():
    with pytest.raises(
        DataError, match=r"data_dir=FOLDER.*'cifar-10-batches-py' \(unpacked from https://www.cs.toronto"
    ):
        load(None)


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(DataError, match=r"nowhere' does not exist.*cifar-10-batches-py.*https://"):
        load(tmp_path / "nowhere")


def test_a_folder_without_the_dataset(tmp_path):
    with pytest.raises(DataError, match=r"there is no folder '.*cifar-100-python'.*https://"):
        load(tmp_path, "cifar100")


@pytest.mark.parametrize("relative", [False, True])
def test_the_inner_folder_in_place_of_the_outer(tmp_path, monkeypatch, relative):
    inner = write_cifar10(tmp_path)
    monkeypatch.chdir(inner)
    given = os.curdir if relative else inner
    with pytest.raises(
        DataError, match=re.escape(f"is the dataset itself: give the folder that holds it, '{tmp_path}'")
    ):
        load(inner.__class__(given))


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch"])
def test_a_missing_file_is_named(tmp_path, name):
    folder = write_cifar10(tmp_path)
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{name}' is missing.*https://"):
        load(tmp_path)


def test_a_folder_in_the_place_of_a_file(tmp_path):
    folder = write_cifar10(tmp_path)
    (folder / "test_batch").unlink()
    (folder / "test_batch").mkdir()
    with pytest.raises(DataError, match="test_batch' is not a file"):
        load(tmp_path)


PIXELS = cifar_pixels(2)


def pyramid(levels):
    """Lists of which each holds the one below twice."""
    return [1] if levels == 0 else [below := pyramid(levels - 1), below]


WRONG = {
    "a list": ([1, 2], "has no entries 'data' and 'labels'"),
    "no data": ({"labels": [1, 2]}, "has no entries"),
    "no labels": ({"data": PIXELS}, "has no entries"),
    "labels of the other set": ({"data": PIXELS, "fine_labels": [1, 2]}, "has no entries"),
    "data is a list": ({"data": [1, 2], "labels": [1, 2]}, "'data' is a list"),
    "wide integers": ({"data": PIXELS.astype(np.int64), "labels": [1, 2]}, "'data' is int64 of shape"),
    "grey images": ({"data": PIXELS[:, :1024], "labels": [1, 2]}, r"'data' is uint8 of shape \(2, 1024\), not uint8"),
    "four dimensions": ({"data": PIXELS.reshape(2, 3, 32, 32), "labels": [1, 2]}, "'data' is"),
    "one dimension": ({"data": PIXELS.ravel(), "labels": [1, 2]}, "'data' is"),
    "no dimension": ({"data": np.array(1, np.uint8), "labels": [1, 2]}, "'data' is"),
    "fewer labels": ({"data": PIXELS, "labels": [1]}, "'labels' must be a list of 2, got 1 of them"),
    "labels as a number": ({"data": PIXELS, "labels": 3}, "'labels' must be a list of 2, got a int"),
    "no image": ({"data": PIXELS[:0].copy(), "labels": []}, "must be a list of some"),
    "label 10": ({"data": PIXELS, "labels": [1, 10]}, r"labels\[1\] is 10, not a class from 0 to 9"),
    "label -1": ({"data": PIXELS, "labels": [-1, 1]}, r"labels\[0\] is -1"),
    "label as text": ({"data": PIXELS, "labels": [1, "2"]}, r"labels\[1\] is '2'"),
    "label as truth": ({"data": PIXELS, "labels": [True, 1]}, r"labels\[0\] is True"),
    "label as a fraction": ({"data": PIXELS, "labels": [0.5, 1]}, r"labels\[0\] is 0.5"),
    "label as a pyramid": ({"data": PIXELS, "labels": [1, pyramid(60)]}, r"labels\[1\] is \[\["),
    "nested labels": ({"data": PIXELS, "labels": np.ones((2, 1), int)}, r"labels\[0\] is array"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_contents_are_named_with_their_file(tmp_path, name):
    folder = write_cifar10(tmp_path)
    content, what = WRONG[name]
    (folder / "data_batch_4").write_bytes(pickle.dumps(content, 4))
    with pytest.raises(DataError, match=rf"data_batch_4': .*{what}.*cifar-10-python\.tar\.gz \(md5 c58f3"):
        load(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    folder = write_cifar10(tmp_path)
    whole = (folder / "data_batch_2").read_bytes()
    (folder / "data_batch_2").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"data_batch_2': cannot be read.*https://"):
        load(tmp_path)


def test_a_call_in_a_file_is_refused(tmp_path):
    folder = write_cifar10(tmp_path)
    (folder / "data_batch_1").write_bytes(python2_pickle({"data": PIXELS})[:-1] + b"0cos\nsystem\n.")
    with pytest.raises(DataError, match="data_batch_1"):
        load(tmp_path)


@pytest.mark.parametrize("size", [0, -1])
def test_an_evaluation_batch_must_hold_something(tmp_path, size):
    with pytest.raises(ArgumentError, match=f"eval_batch_size={size}"):
        load(tmp_path, eval_batch_size=size)
