"""Tiny-ImageNet in the folders of its archive, or a smaller set in the same format."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from divebatch.checks import warn_user
from divebatch.errors import ArgumentError, DataError, MissingExtraError
from divebatch.lab.data.augment import RandomResizedCrop, ResizeCentreCrop, Transform
from divebatch.lab.data.dataset import DataPlace, DatasetSettings, DataSplit, LabelledSamples, Origin, Parts
from divebatch.lab.data.images import Colours, image_split
from divebatch.lab.tables import Count

ORIGIN = Origin(
    "tiny-imagenet-200",
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "90528d7ca1a48142e341f4ef8d21d0de",  # from the loaders of several projects; the publisher gives none
)
COLOURS = Colours(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
SIDE = 64
FOLDER = ".decoded"
"""Folder for decoded images beside their files, which can be deleted at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyImageNet(DatasetSettings):
    """Tiny-ImageNet's 64 x 64 photos, trained on random resized crops and mirror images, tested on the middle."""

    image_size: Count = 224
    """Side of the model's input, in pixels."""
    resize: Count = 256
    """Side of a test image before its middle is cut out, in pixels."""
    augment: bool = True
    eval_batch_size: Count = 500

    def __post_init__(self) -> None:
        if self.image_size > self.resize:
            raise ArgumentError(f"image_size={self.image_size} cannot be cut out of resize={self.resize}")

    def parts(self, seed: int, place: DataPlace) -> Parts:
        """Read the official split, whatever the seed; the classes are the lines of wnids.txt."""
        _pillow()  # before any work
        folder = ORIGIN.find(place.folder)
        classes = read_classes(folder)
        middle = ResizeCentreCrop(self.image_size, self.resize)
        crops: Transform = RandomResizedCrop(SIDE, self.image_size) if self.augment else middle

        def split(train: ImageFiles, validation: ImageFiles) -> DataSplit:
            sets = (train.in_memory(), crops), (validation.in_memory(), middle)
            return image_split(*sets, COLOURS, len(classes), self.eval_batch_size, place)

        return train_files(folder, classes), lambda: validation_files(folder, classes), split


class ImageFiles:
    """JPEG files with their labels, decoded on demand.

    Args:
        paths: The files.
        labels: The class of each file.
        cache: The beginning of the name of a file for all decoded images. None: no file is kept.
        part_of: The files from which these were selected, and their numbers there. None: these are all files.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        labels: Sequence[int],
        *,
        cache: Path | None = None,
        part_of: tuple["ImageFiles", Tensor] | None = None,
    ) -> None:
        self.paths, self.labels = list(map(str, paths)), torch.tensor(labels)
        self._cache, self._part_of = cache, part_of

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, numbers: Tensor) -> "ImageFiles":
        paths = [self.paths[number] for number in numbers.tolist()]
        return ImageFiles(paths, self.labels[numbers].tolist(), part_of=(self, numbers))

    def content(self) -> Iterator[Any]:
        """Yield labels, file names and file sizes, because reading all files would take as long as an epoch."""
        yield self.labels
        yield "\n".join(f"{Path(path).name} {os.path.getsize(path)}" for path in self.paths).encode()

    def in_memory(self) -> LabelledSamples:
        """Return all images decoded, from the cache if there is one."""
        if self._part_of is not None:
            whole, numbers = self._part_of
            return whole.in_memory().select(numbers)
        return LabelledSamples(torch.from_numpy(self._decoded()), self.labels)

    def _decoded(self) -> NDArray[np.uint8]:
        # Decoding a large set takes minutes, reading it back only seconds.
        if self._cache is None:
            return self._decode_all()
        digest = hashlib.sha256()
        for path in self.paths:
            status = os.stat(path)
            digest.update(f"{os.path.basename(path)} {status.st_size} {status.st_mtime_ns}\n".encode())
        kept = self._cache.with_name(f"{self._cache.name}-{digest.hexdigest()[:16]}.npy")
        try:
            images: NDArray[np.uint8] = np.load(kept, mmap_mode="c")
            if images.shape == (len(self), SIDE, SIDE, 3) and images.dtype == np.uint8:
                return images
        except (OSError, ValueError):  # the file is missing or damaged
            pass
        images = self._decode_all()
        scratch = kept.with_suffix(f".{os.getpid()}.tmp")
        try:
            kept.parent.mkdir(exist_ok=True)
            for old in kept.parent.glob(f"{self._cache.name}-*.npy"):
                old.unlink(missing_ok=True)
            with scratch.open("wb") as file:
                np.save(file, images)
            os.replace(scratch, kept)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink()
            # Data folders are often read-only or full, which only costs time at each start.
            warn_user(f"decoded images cannot be kept in '{kept.parent}' ({error.strerror}): each start decodes them")
        return images

    def _decode_all(self) -> NDArray[np.uint8]:
        images = np.empty((len(self), SIDE, SIDE, 3), np.uint8)

        def fill(number: int) -> None:
            images[number] = decode(self.paths[number])

        with ThreadPoolExecutor() as pool:
            for _ in pool.map(fill, range(len(self))):
                pass  # raises the errors of threads
        return images


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "images") from error
    return Image


def decode(path: str) -> NDArray[np.uint8]:
    """Decode a file as (64, 64, 3); grey becomes RGB."""
    pillow = _pillow()
    try:
        with pillow.open(path, formats=("JPEG",)) as image:
            if image.size != (SIDE, SIDE):
                raise ValueError(f"it has {image.width} x {image.height} pixels, not {SIDE} x {SIDE}")
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise ORIGIN.damaged(Path(path), f"is no image that can be used ({error})") from error


def read_classes(folder: Path) -> dict[str, int]:
    """Read wnids.txt and number its class names in sorted order."""
    path = ORIGIN.require_file(folder / "wnids.txt")
    names = path.read_text(encoding="utf-8", errors="replace").split()
    return {name: number for number, name in enumerate(sorted(names))}


def train_files(folder: Path, classes: dict[str, int]) -> ImageFiles:
    """Return the files train/CLASS/images/*.JPEG, sorted by class and name."""
    images = {name: sorted((folder / "train" / name / "images").glob("*.JPEG")) for name in classes}
    if not images or not all(images.values()):
        name = next((name for name, found in images.items() if not found), "CLASS")
        raise DataError(
            f"'{folder / 'train' / name / 'images'}' holds no *.JPEG, though wnids.txt names this class: unpack the "
            f"archive from {ORIGIN.url} again"
        )
    labels = [classes[name] for name, found in images.items() for _ in found]
    return ImageFiles([path for found in images.values() for path in found], labels, cache=folder / FOLDER / "train")


def validation_files(folder: Path, classes: dict[str, int]) -> ImageFiles:
    """Return the files that val/val_annotations.txt lists (file, class, box), sorted by name."""
    path = ORIGIN.require_file(folder / "val" / "val_annotations.txt")
    there = {image.name for image in (folder / "val" / "images").glob("*.JPEG")}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    labels: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        name, wnid, *_ = [*line.split("\t"), ""]
        if name not in there or wnid not in classes:
            what = f"there is no 'val/images/{name}'" if name not in there else f"class {wnid!r} is not in wnids.txt"
            raise ORIGIN.damaged(path, f"line {number}: {what}")
        labels[name] = classes[wnid]
    names = sorted(labels)
    paths = [folder / "val" / "images" / name for name in names]
    return ImageFiles(paths, [labels[name] for name in names], cache=folder / FOLDER / "val")
