"""Data for a search: a part of the training data is held out to choose by. The test data is not even read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from divebatch.data import AdaptiveLoader
from divebatch.errors import ArgumentError
from divebatch.lab.experiments.datasets import DATASETS, DataPlace, Split
from divebatch.lab.experiments.datasets.augment import CropFlip, CropFlipRotate, Transform, Whole
from divebatch.lab.experiments.datasets.cifar import CIFAR10, CIFAR100, CifarFormat
from divebatch.lab.experiments.datasets.images import HostImages, image_split
from divebatch.lab.experiments.datasets.resample import RandomResizedCrop, ResizeCentreCrop
from divebatch.lab.experiments.datasets.split import require_fraction
from divebatch.lab.experiments.datasets.tiny_imagenet import (
    COLOURS,
    ORIGIN,
    SIDE,
    ImageFiles,
    read_classes,
    train_files,
)
from divebatch.lab.experiments.schema import Experiment, Part, build_settings

KIND = "held-out"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The training data of another kind, `fraction` of it held out at random for validation."""

    of: str
    """The other kind."""
    fraction: float = 0.2
    """The paper's."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the other kind."""

    def __post_init__(self) -> None:
        require_fraction("fraction", self.fraction)
        if self.of not in WAYS:
            raise ArgumentError(f"{self.of!r} data cannot be held out; known: {', '.join(WAYS)}")

    def load(self, seed: int, place: DataPlace) -> Split:
        """Which samples are held out follows from `seed`."""
        inner = build_settings(DATASETS[self.of], Part(kind=self.of, settings=self.settings), "data")
        return WAYS[self.of](inner, partial(_parted, fraction=self.fraction, seed=seed), seed, place)


def with_held_out(experiment: Experiment, fraction: float) -> Experiment:
    """The same experiment, trained on and validated with parts of its training data."""
    settings = {"of": experiment.data.kind, "fraction": fraction, "settings": experiment.data.settings}
    return replace(experiment, data=Part(kind=KIND, settings=settings))


Parting = Callable[[int], tuple[Tensor, Tensor]]
"""From the number of training samples to the numbers of those kept and of those held out."""


def _parted(num_samples: int, *, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
    num_held = round(num_samples * fraction)
    if not 0 < num_held < num_samples:
        raise ArgumentError(f"holding out {fraction} of {num_samples} training samples leaves a part empty")
    return order[num_held:].sort().values, order[:num_held].sort().values


def _part_synthetic(settings: Any, parting: Parting, seed: int, place: DataPlace) -> Split:
    split: Split = settings.load(seed, place)
    train = split.loader(1, seed=0).dataset
    kept, held = (each.to(place.device) for each in parting(len(train)))
    return replace(
        split,
        loader=partial(AdaptiveLoader, TensorDataset(*train[kept])),
        validation=[train[held]],
    )


def _part_cifar(
    settings: Any, parting: Parting, seed: int, place: DataPlace, *, form: CifarFormat, augmentation: Transform
) -> Split:
    images = form.read(form.origin.find(place.folder), form.train_files)
    kept, held = (HostImages(images.images[part], images.labels[part]) for part in parting(len(images)))
    train = (kept, augmentation if settings.augment else Whole())
    return image_split(train, (held, Whole()), form.colours, form.num_classes, settings.eval_batch_size, place)


def _part_tiny_imagenet(settings: Any, parting: Parting, seed: int, place: DataPlace) -> Split:
    folder = ORIGIN.find(place.folder)
    classes = read_classes(folder)
    files = train_files(folder, classes)
    kept, held = (_files(files, part) for part in parting(len(files)))
    middle = ResizeCentreCrop(settings.image_size, settings.resize)
    crops: Transform = RandomResizedCrop(SIDE, settings.image_size) if settings.augment else middle
    return image_split((kept, crops), (held, middle), COLOURS, len(classes), settings.eval_batch_size, place)


def _files(files: ImageFiles, part: Tensor) -> ImageFiles:
    return ImageFiles([files.paths[number] for number in part.tolist()], files.labels[part].tolist())


WAYS: dict[str, Callable[[Any, Parting, int, DataPlace], Split]] = {
    "synthetic": _part_synthetic,
    "cifar10": partial(_part_cifar, form=CIFAR10, augmentation=CropFlip()),
    "cifar100": partial(_part_cifar, form=CIFAR100, augmentation=CropFlipRotate()),
    "tiny-imagenet": _part_tiny_imagenet,
}
"""How each kind of data is parted. A new kind is one function and one row."""

DATASETS.setdefault(KIND, HeldOut)
