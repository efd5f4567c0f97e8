"""Datasets by kind. A new dataset is a file and a row here."""

from divebatch.lab.data.cifar import Cifar10, Cifar100
from divebatch.lab.data.dataset import DataPlace, DatasetSettings, DataSplit
from divebatch.lab.data.synthetic import LinearSpectrum, Synthetic, TeacherStudent
from divebatch.lab.data.text import Text
from divebatch.lab.data.tiny_imagenet import TinyImageNet

DATASETS: dict[str, type[DatasetSettings]] = {
    "synthetic": Synthetic,
    "linear-spectrum": LinearSpectrum,
    "teacher-student": TeacherStudent,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "tiny-imagenet": TinyImageNet,
    "text": Text,
}

__all__ = ["DATASETS", "DataPlace", "DataSplit", "DatasetSettings"]
