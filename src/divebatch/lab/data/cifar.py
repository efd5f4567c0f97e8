"""CIFAR-10 and CIFAR-100 in their "python version", or smaller sets in the same format."""

import pickle
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from divebatch.lab.data.augment import CropFlip, CropFlipRotate, Transform, Whole
from divebatch.lab.data.dataset import DataPlace, DatasetSettings, DataSplit, LabelledSamples, Origin, Parts
from divebatch.lab.data.images import Colours, image_split
from divebatch.lab.tables import Count

URL = "https://www.cs.toronto.edu/~kriz"
SIDE = 32
PIXELS = 3 * SIDE * SIDE


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of plain containers and numpy arrays that refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        arrays = module.removeprefix("numpy.").replace("_core.", "core.")
        known = {
            *(("core.multiarray", "_reconstruct"), ("core.multiarray", "scalar"), ("core.numeric", "_frombuffer")),
            *(("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")),
        }
        if (arrays, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no data needs")
        return super().find_class(module, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar(DatasetSettings):
    """A CIFAR dataset with the official split, whatever the seed."""

    origin: ClassVar[Origin]
    train_files: ClassVar[tuple[str, ...]]
    test_files: ClassVar[tuple[str, ...]]
    label_key: ClassVar[str]
    num_classes: ClassVar[int]
    colours: ClassVar[Colours]
    augmentation: ClassVar[Transform]

    augment: bool = True
    eval_batch_size: Count = 2000

    def parts(self, seed: int, place: DataPlace) -> Parts:
        folder = self.origin.find(place.folder)
        augmentation = self.augmentation if self.augment else Whole()

        def split(train: LabelledSamples, validation: LabelledSamples) -> DataSplit:
            sets = (train, augmentation), (validation, Whole())
            return image_split(*sets, self.colours, self.num_classes, self.eval_batch_size, place)

        return self.read(folder, self.train_files), lambda: self.read(folder, self.test_files), split

    def read(self, folder: Path, names: Sequence[str]) -> LabelledSamples:
        parts = [self._read_file(self.origin.require_file(folder / name)) for name in names]
        planes = torch.from_numpy(np.concatenate([images for images, _ in parts])).view(-1, 3, SIDE, SIDE)
        labels = torch.tensor([label for _, labels in parts for label in labels])
        return LabelledSamples(planes.permute(0, 2, 3, 1).contiguous(), labels)

    def _read_file(self, path: Path) -> tuple[Any, list[int]]:
        try:
            with path.open("rb") as file:
                entries = _PlainUnpickler(file, encoding="latin1").load()  # Python 2 wrote these files
            by_name = {key.decode() if isinstance(key, bytes) else key: value for key, value in entries.items()}
            images, labels = by_name["data"], list(by_name[self.label_key])
        except Exception as error:  # a damaged file may raise anything
            what = f"is no pickle of 'data' and {self.label_key!r} ({type(error).__name__}: {str(error)[:200]})"
            raise self.origin.damaged(path, what) from error
        is_good = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape[1:] == (PIXELS,)
        if not is_good or not 0 < len(images) == len(labels):
            what = f"'data' must be uint8 of shape (images, {PIXELS}), with as many {self.label_key!r}"
            raise self.origin.damaged(path, what)
        labels = [label.item() if isinstance(label, np.generic) else label for label in labels]
        for place, label in enumerate(labels):
            if type(label) is not int or not 0 <= label < self.num_classes:
                found, last = reprlib.repr(label), self.num_classes - 1  # a text may be too long to print
                raise self.origin.damaged(path, f"{self.label_key}[{place}] is {found}, not a class from 0 to {last}")
        return images, labels


class Cifar10(Cifar):
    """CIFAR-10, trained on mirror images and on random crops with a margin of 4 zero pixels."""

    origin = Origin("cifar-10-batches-py", f"{URL}/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a")
    train_files = tuple(f"data_batch_{number}" for number in range(1, 6))
    test_files = ("test_batch",)
    label_key = "labels"
    num_classes = 10
    colours = Colours(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
    augmentation = CropFlip()


class Cifar100(Cifar):
    """CIFAR-100, trained with Cifar10's augmentation and rotations by up to 15 degrees."""

    origin = Origin("cifar-100-python", f"{URL}/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85")
    train_files = ("train",)
    test_files = ("test",)
    label_key = "fine_labels"
    num_classes = 100
    colours = Colours(mean=(0.50708, 0.48655, 0.44092), std=(0.26733, 0.25644, 0.27615))
    augmentation = CropFlipRotate()
