"""Datasets: settings that read samples, and the split of the samples into training and validation data."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from divebatch.data import AdaptiveLoader
from divebatch.errors import ArgumentError, DataError


@dataclass(frozen=True, slots=True)
class DataPlace:
    """The folder of the data, and the device and layout of batches."""

    device: torch.device
    folder: Path | None = None
    """The parent of cifar-10-batches-py, cifar-100-python, tiny-imagenet-200, text. None: data is drawn."""
    channels_last: bool = False
    """Whether image batches have the memory format channels_last."""
    compile: bool = False
    """Whether to compile the preparation of images on the device."""
    sequence_length: int | None = None
    """The model's longest sequence. None: the model takes no sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSplit:
    """Training data with a loader for any batch size, and validation data in batches."""

    loader: Callable[..., AdaptiveLoader]
    """A function that makes a loader over the training data: `loader(batch_size, seed=seed)`."""
    validation: Iterable[Any]
    """This rank's batches (inputs, targets) on the device, which can be iterated repeatedly."""
    has_parts: bool = False
    """Whether a run may be one pass in parts, because no augmentation depends on the epoch."""
    num_features: int = 0
    """Length of a flat sample; 0 for images and sequences."""
    num_classes: int = 1
    """Number of classes or tokens; 1 for a single logit."""
    fingerprint: str = ""
    """A hash of all samples, equal for equal data."""


def drawing(loader: AdaptiveLoader, sampler: Sampler[int]) -> AdaptiveLoader:
    """Return a copy of a loader whose epochs are drawn by a sampler."""
    drawn: DataLoader[Any] = DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler)
    return AdaptiveLoader.wrap(drawn, seed=loader.seed, transform=loader.transform)


class Samples(Protocol):
    """Samples that can be counted, selected and compared."""

    def __len__(self) -> int: ...

    def select(self, numbers: Tensor) -> Self: ...

    def content(self) -> Iterable[Tensor | bytes]:
        """Return content for a hash, which differs if samples differ."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LabelledSamples:
    """Samples in memory, feature vectors or images (uint8, NHWC), and their labels."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, numbers: Tensor) -> "LabelledSamples":
        numbers = numbers.to(self.labels.device)
        return LabelledSamples(self.inputs[numbers], self.labels[numbers])

    def content(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.labels


Parts = tuple[Samples, Callable[[], Samples], Callable[[Any, Any], DataSplit]]
"""Training samples without augmentation, a function that reads the test samples, and a function that splits both.

Test samples are read only if they are used, which a search does not.
"""


class DatasetSettings(ABC):
    """Settings of a dataset: a dataclass that can read its samples."""

    @abstractmethod
    def parts(self, seed: int, place: DataPlace) -> Parts:
        """Read or draw the data of the trial with this seed."""

    def load(self, seed: int, place: DataPlace, *, held_out: float = 0.0) -> DataSplit:
        """Prepare the data of a trial for training.

        Args:
            seed: The trial's seed, for drawn data and for the choice of held-out samples.
            place: The folder to read from, and the device and layout of batches.
            held_out: Fraction of the training samples to validate on. 0: validate on the dataset's test samples.
        """
        train, read_test, split = self.parts(seed, place)
        if held_out:
            num_held = round(len(train) * held_out)
            if not 0 < num_held < len(train):
                raise ArgumentError(f"holding out {held_out} of {len(train)} training samples leaves a part empty")
            order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
            validation, train = (train.select(each.sort().values) for each in (order[:num_held], order[num_held:]))
        else:
            validation = read_test()
        return replace(split(train, validation), fingerprint=_fingerprint(train, validation))


def _fingerprint(*samples: Samples) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for each in samples:
        digest.update(f"{len(each)} samples".encode())
        for part in each.content():
            digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part.cpu()).data)
    return digest.hexdigest()


class FixedOrder:
    """The batches of a loader in fixed order, which can be iterated repeatedly."""

    def __init__(self, loader: AdaptiveLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self.loader.full_pass()


# Datasets on disk


def find_folder(data_dir: Path | None, name: str, contents: str) -> Path:
    """Return the folder `name` inside `data_dir`; `contents` describes the folder in an error."""
    wanted = f"the one that holds '{name}' ({contents})"
    if data_dir is None:
        raise DataError(f"no data folder was given: pass data_dir=FOLDER, {wanted}")
    found = data_dir / name
    if found.is_dir():
        return found
    if data_dir.resolve().name == name:
        raise DataError(
            f"'{data_dir}' is the dataset itself: pass --data-dir '{data_dir.resolve().parent}', which holds it"
        )
    missing = f"'{data_dir}' does not exist" if not data_dir.is_dir() else f"there is no folder '{found}'"
    raise DataError(f"{missing}: pass --data-dir FOLDER, {wanted}")


@dataclass(frozen=True, slots=True)
class Origin:
    """A dataset's unpacked folder, the address of its archive, and the archive's MD5 checksum.

    CIFAR's publisher gives MD5 sums. They reveal a broken download but hardly a forged archive; nothing in the files
    is executed.
    """

    folder: str
    url: str
    md5: str

    def find(self, data_dir: Path | None) -> Path:
        return find_folder(data_dir, self.folder, f"unpacked from {self.url}, md5 {self.md5}")

    def require_file(self, path: Path) -> Path:
        if not path.is_file():
            what = "is not a file" if path.exists() else "is missing"
            raise DataError(f"'{path}' {what}: unpack the archive from {self.url} again")
        return path

    def damaged(self, path: Path, what: str) -> DataError:
        return DataError(f"'{path}': {what}. If the file is damaged, get it again from {self.url} (md5 {self.md5})")
