import os
import sys

import numpy as np
import pytest
import torch
from image_files import write_jpeg, write_tiny_imagenet
from PIL import Image
from slow_images import resize

from divebatch.errors import ArgumentError, DataError, MissingExtraError
from divebatch.lab.data import DATASETS, DataPlace, tiny_imagenet
from divebatch.lab.data.tiny_imagenet import COLOURS, FOLDER, read_classes, train_files

CPU = torch.device("cpu")


def load(folder, **settings):
    settings = {"image_size": 64, "resize": 64, **settings}
    place = DataPlace(CPU, folder)
    return DATASETS["tiny-imagenet"](**settings).load(0, place)


def in_order(loader):
    images, labels = map(torch.cat, zip(*loader.full_pass(), strict=True))
    return images, labels.tolist()


def picture(path) -> torch.Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB")))


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    return ((pixels / 255 - torch.tensor(COLOURS.mean)) / torch.tensor(COLOURS.std)).permute(2, 0, 1)


def test_images_come_by_class_and_name_and_grey_becomes_rgb(tmp_path):
    folder = write_tiny_imagenet(tmp_path)
    split = load(tmp_path, augment=False)
    images, labels = in_order(split.loader(4, seed=0))
    assert labels == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    paths = [
        folder / "train" / name / "images" / f"{name}_{k}.JPEG" for name in ("n01", "n02", "n03") for k in range(3)
    ]
    with Image.open(paths[1]) as grey:
        assert grey.mode == "L"
    for image, path in zip(images, paths, strict=True):
        torch.testing.assert_close(image, normalised(picture(path)), atol=1e-3, rtol=0)
    assert split.num_classes == 3


def test_validation_has_the_classes_of_its_list(tmp_path):
    write_tiny_imagenet(tmp_path, classes=("n03", "n01", "n02"))
    ((images, labels),) = load(tmp_path).validation
    assert labels.tolist() == [2, 0, 1]
    assert images.shape == (3, 3, 64, 64)


def test_the_papers_sizes(tmp_path):
    folder = write_tiny_imagenet(tmp_path)
    split = load(tmp_path, image_size=224, resize=256)
    x, _ = next(iter(split.loader(2, seed=0)))
    assert x.shape == (2, 3, 224, 224)
    ((images, _),) = split.validation
    expected = normalised(resize(picture(folder / "val" / "images" / "val_0.JPEG"), 256)[16:240, 16:240])
    torch.testing.assert_close(images[0], expected, atol=1e-3, rtol=0)
    assert type(split.loader(2, seed=0)._augment).__name__ == "RandomResizedCrop"
    assert (DATASETS["tiny-imagenet"]().image_size, DATASETS["tiny-imagenet"]().resize) == (224, 256)


BROKEN = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not found"),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:400]),
    "another format": lambda path: Image.new("RGB", (64, 64)).save(path, format="PNG"),
    "another size": lambda path: write_jpeg(path, np.random.default_rng(0), side=32),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_named(tmp_path, name):
    folder = write_tiny_imagenet(tmp_path)
    BROKEN[name](folder / "train" / "n02" / "images" / "n02_1.JPEG")
    with pytest.raises(DataError, match=r"n02_1\.JPEG': is no image that can be used .*cs231n"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["wnids.txt", "val/val_annotations.txt"])
def test_a_missing_list_is_named(tmp_path, name):
    folder = write_tiny_imagenet(tmp_path)
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{name}' is missing.*tiny-imagenet-200\.zip"):
        load(tmp_path)


LISTS = {
    "no class": ("wnids.txt", "\n", r"CLASS/images' holds no \*\.JPEG"),
    "a class without images": ("wnids.txt", "n01\nn02\nn03\nn99\n", r"n99/images' holds no \*\.JPEG"),
    "an unknown class": ("val/val_annotations.txt", "val_0.JPEG\tn01\nval_1.JPEG\tn77\n", "line 2: class 'n77'"),
    "an unknown image": ("val/val_annotations.txt", "val_9.JPEG\tn01\n", "line 1: there is no 'val/images/val_9.JPEG'"),
    "no class in a line": ("val/val_annotations.txt", "val_0.JPEG\n", "line 1: class ''"),
}


@pytest.mark.parametrize("name", LISTS)
def test_wrong_lists_are_named(tmp_path, name):
    folder = write_tiny_imagenet(tmp_path)
    file, content, what = LISTS[name]
    (folder / file).write_text(content)
    with pytest.raises(DataError, match=what):
        load(tmp_path)


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    write_tiny_imagenet(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'divebatch\[images\]'"):
        load(tmp_path)


def test_an_image_larger_than_what_it_is_cut_from(tmp_path):
    with pytest.raises(ArgumentError, match="image_size=224 cannot be cut out of resize=200"):
        load(tmp_path, image_size=224, resize=200)


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
    assert torch.equal(again.inputs, first.inputs)
    assert torch.equal(again.labels, first.labels)


def test_some_of_the_files_come_from_the_cache_of_all(tmp_path, decoded):
    folder = write_tiny_imagenet(tmp_path)
    whole = files_of(folder).in_memory()
    decoded.clear()
    some = files_of(folder).select(torch.tensor([5, 0, 3])).select(torch.tensor([2, 0])).in_memory()
    assert decoded == []
    assert torch.equal(some.inputs, whole.inputs[[3, 5]])
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
    assert torch.equal(found.inputs, torch.from_numpy(expected))


def test_a_folder_that_cannot_be_written_to_only_costs_time(tmp_path):
    folder = write_tiny_imagenet(tmp_path)
    (folder / FOLDER).write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match=r"cannot be kept in '.*\.decoded'.*each start decodes them"):
        assert len(files_of(folder).in_memory()) == 9
