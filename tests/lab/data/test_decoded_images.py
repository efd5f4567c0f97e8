import os

import numpy as np
import pytest
import torch
from image_files import write_jpeg, write_tiny_imagenet

from divebatch.lab.data import tiny_imagenet
from divebatch.lab.data.tiny_imagenet import FOLDER, read_classes, train_files


@pytest.fixture
def decoded(monkeypatch):
    """The names of the files that were decoded, in any order."""
    names = []
    decode = tiny_imagenet.decode

    def noted(path):
        names.append(os.path.basename(path))
        return decode(path)

    monkeypatch.setattr(tiny_imagenet, "decode", noted)
    return names


def files_of(folder):
    return train_files(folder, read_classes(folder))


def test_images_are_decoded_once_and_come_back_the_same(tmp_path, decoded):
    folder = write_tiny_imagenet(tmp_path)
    first = files_of(folder).in_memory()
    assert len(decoded) == len(first)
    again = files_of(folder).in_memory()
    assert len(decoded) == len(first)
    assert torch.equal(again.images, first.images)
    assert torch.equal(again.labels, first.labels)


def test_some_of_the_files_come_from_the_cache_of_all(tmp_path, decoded):
    folder = write_tiny_imagenet(tmp_path)
    whole = files_of(folder).in_memory()
    decoded.clear()
    some = files_of(folder).select(torch.tensor([5, 0, 3])).select(torch.tensor([2, 0])).in_memory()
    assert decoded == []
    assert torch.equal(some.images, whole.images[[3, 5]])
    assert torch.equal(some.labels, whole.labels[[3, 5]])


def change_an_image(folder):
    write_jpeg(folder / "train" / "n02" / "images" / "n02_1.JPEG", np.random.default_rng(9))


def cut_the_cache(folder):
    (path,) = (folder / FOLDER).glob("train-*.npy")
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("change", [change_an_image, cut_the_cache])
def test_what_has_changed_is_decoded_anew(tmp_path, decoded, change):
    folder = write_tiny_imagenet(tmp_path)
    files_of(folder).in_memory()
    change(folder)
    decoded.clear()
    found = files_of(folder).in_memory()
    assert len(decoded) == len(found)
    expected = np.stack([tiny_imagenet.decode(path) for path in files_of(folder).paths])
    assert torch.equal(found.images, torch.from_numpy(expected))


def test_a_folder_that_cannot_be_written_to_only_costs_time(tmp_path):
    folder = write_tiny_imagenet(tmp_path)
    (folder / FOLDER).write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match=r"cannot be kept in '.*\.decoded'.*each start decodes them"):
        assert len(files_of(folder).in_memory()) == 9
