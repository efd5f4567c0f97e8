"""Datasets by kind. A new one is one file and one row here."""

from typing import Protocol

from divebatch.lab.experiments.datasets.cifar import Cifar10, Cifar100
from divebatch.lab.experiments.datasets.split import DataPlace, Split
from divebatch.lab.experiments.datasets.synthetic import Synthetic
from divebatch.lab.experiments.datasets.tiny_imagenet import TinyImageNet


class DatasetSettings(Protocol):
    """A dataclass of settings that can load its data."""

    def load(self, seed: int, place: DataPlace) -> Split:
        """The data of the trial with this seed."""
        ...


DATASETS: dict[str, type[DatasetSettings]] = {
    "synthetic": Synthetic,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "tiny-imagenet": TinyImageNet,
}

__all__ = ["DATASETS", "DataPlace", "DatasetSettings", "Split"]
