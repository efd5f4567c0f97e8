"""Datasets by kind. A new one is one file and one row here."""

from typing import Protocol

import torch

from divebatch.experiments.datasets.split import Split
from divebatch.experiments.datasets.synthetic import Synthetic


class DatasetSettings(Protocol):
    """A dataclass of settings that can load its data."""

    def load(self, seed: int, device: torch.device) -> Split:
        """The data of the trial with this seed."""
        ...


DATASETS: dict[str, type[DatasetSettings]] = {"synthetic": Synthetic}

__all__ = ["DATASETS", "DatasetSettings", "Split"]
