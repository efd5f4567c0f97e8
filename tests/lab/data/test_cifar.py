"""CIFAR's files: read in every protocol, and refused by name where they hold anything else; nothing in them runs."""

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import cifar_pixels, python2_pickle, write_cifar10, write_cifar100

from divebatch.errors import DataError
from divebatch.lab.data import DATASETS, DataPlace
from divebatch.lab.data.cifar import Cifar10, Cifar100

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
    mean, std = (np.array(values)[:, None, None] for values in (Cifar10.colours.mean, Cifar10.colours.std))
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
    assert Cifar100.colours != Cifar10.colours


def test_the_augmentations_of_the_paper(tmp_path):
    write_cifar10(tmp_path)
    write_cifar100(tmp_path)
    kinds = {kind: type(load(tmp_path, kind).loader(4, seed=0)._augment).__name__ for kind in ("cifar10", "cifar100")}
    assert kinds == {"cifar10": "CropFlip", "cifar100": "CropFlipRotate"}


def test_the_inner_folder_in_place_of_the_outer(tmp_path, monkeypatch):
    inner = write_cifar10(tmp_path)
    monkeypatch.chdir(inner)
    with pytest.raises(DataError, match=re.escape(f"is the dataset itself: pass --data-dir '{tmp_path}'")):
        load(Path(os.curdir))


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch"])
def test_a_missing_file_is_named(tmp_path, name):
    folder = write_cifar10(tmp_path)
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{name}' is missing.*https://"):
        load(tmp_path)


PIXELS = cifar_pixels(2)


NO_ENTRIES = "is no pickle of 'data' and 'labels'"
NO_IMAGES = "'data' must be uint8 of shape"
WRONG = {
    "a list": ([1, 2], NO_ENTRIES),
    "no data": ({"labels": [1, 2]}, NO_ENTRIES),
    "labels of the other set": ({"data": PIXELS, "fine_labels": [1, 2]}, NO_ENTRIES),
    "labels as a number": ({"data": PIXELS, "labels": 3}, NO_ENTRIES),
    "data is a list": ({"data": [1, 2], "labels": [1, 2]}, NO_IMAGES),
    "wide integers": ({"data": PIXELS.astype(np.int64), "labels": [1, 2]}, NO_IMAGES),
    "grey images": ({"data": PIXELS[:, :1024], "labels": [1, 2]}, NO_IMAGES),
    "no dimension": ({"data": np.array(1, np.uint8), "labels": [1, 2]}, NO_IMAGES),
    "fewer labels": ({"data": PIXELS, "labels": [1]}, NO_IMAGES),
    "no image": ({"data": PIXELS[:0].copy(), "labels": []}, NO_IMAGES),
    "label 10": ({"data": PIXELS, "labels": [1, 10]}, r"labels\[1\] is 10, not a class from 0 to 9"),
    "label -1": ({"data": PIXELS, "labels": [-1, 1]}, r"labels\[0\] is -1"),
    "label as text": ({"data": PIXELS, "labels": [1, "2"]}, r"labels\[1\] is '2'"),
    "label as truth": ({"data": PIXELS, "labels": [True, 1]}, r"labels\[0\] is True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_contents_are_named_with_their_file(tmp_path, name):
    folder = write_cifar10(tmp_path)
    content, what = WRONG[name]
    (folder / "data_batch_4").write_bytes(pickle.dumps(content, 4))
    with pytest.raises(DataError, match=rf"data_batch_4': .*{what}.*cifar-10-python\.tar\.gz \(md5 c58f3"):
        load(tmp_path)


GOOD = python2_pickle({"batch_label": "a", "labels": [1, 2], "data": cifar_pixels(2)})
SENTINEL = "harm-was-done"


def read(path: Path, content: bytes):
    path.write_bytes(content)
    return Cifar10()._read_file(path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("key", [str, str.encode])
def test_every_binary_protocol_is_read(tmp_path, protocol, key):
    pixels = cifar_pixels(3)
    entries = {key("data"): pixels, key("labels"): [3, 0, np.int64(9)]}
    images, labels = read(tmp_path / "batch", pickle.dumps(entries, protocol))
    assert labels == [3, 0, 9]
    assert images.dtype == np.uint8
    assert np.array_equal(images, pixels)


class Call:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


HOSTILE = {
    "os.system": pickle.dumps(Call(os.system, f"touch {SENTINEL}"), protocol=2),
    "eval": pickle.dumps({"data": Call(eval, f"open({SENTINEL!r}, 'w')")}, protocol=4),
    "getattr": pickle.dumps(Call(getattr, "text", "join"), protocol=5),
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"Pevil\n.",
    "a bytearray of 2^62 bytes": b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b".",
    "cut short": GOOD[:-40],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_by_name_and_nothing_runs(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="batch"):
        read(tmp_path / "batch", HOSTILE[name])
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]
