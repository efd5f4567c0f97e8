"""The paper's synthetic classification data (its equation for y)."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from divebatch.checks import require_count, require_positive
from divebatch.data import AdaptiveLoader
from divebatch.errors import ArgumentError
from divebatch.lab.data.dataset import (
    DataParts,
    DataPlace,
    DatasetSettings,
    DataSplit,
    InParts,
    require_fraction,
    shard_for_rank,
)


@dataclass(frozen=True, slots=True)
class FlatSamples:
    """Feature vectors and labels, on one device."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, numbers: Tensor) -> "FlatSamples":
        numbers = numbers.to(self.labels.device)
        return FlatSamples(self.features[numbers], self.labels[numbers])

    def content(self) -> tuple[Tensor, Tensor]:
        return self.features, self.labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic(DatasetSettings):
    """y = 1 if w . x + noise > 0, else 0, with x uniform in [-1, 1]^d and w standard normal.

    sigmoid(t) > 0.5 is t > 0, so the paper's sigmoid is left out. Each trial draws its own w, x and noise.
    """

    num_samples: int
    num_features: int
    noise_variance: float
    train_fraction: float

    def __post_init__(self) -> None:
        require_count("num_samples", self.num_samples)
        require_count("num_features", self.num_features)
        require_fraction("train_fraction", self.train_fraction)
        if self.noise_variance != 0:
            require_positive("noise_variance", self.noise_variance)
        if not 0 < self._num_train < self.num_samples:
            raise ArgumentError(
                f"num_samples={self.num_samples} with train_fraction={self.train_fraction} leaves a part empty"
            )

    @property
    def _num_train(self) -> int:
        return round(self.num_samples * self.train_fraction)

    def parts(self, seed: int, place: DataPlace) -> DataParts["FlatSamples"]:
        """Drawn on the CPU, so that a seed means the same data on every device."""
        features, labels = self._draw(torch.Generator().manual_seed(seed))
        samples = FlatSamples(features.to(place.device), labels.to(place.device))
        train, test = torch.arange(self.num_samples).split([self._num_train, self.num_samples - self._num_train])
        return DataParts(samples.select(train), lambda: samples.select(test), self._split)

    def _split(self, train: "FlatSamples", validation: "FlatSamples") -> DataSplit:
        samples = TensorDataset(train.features, train.labels)
        return DataSplit(
            loader=partial(AdaptiveLoader, samples),
            in_parts=InParts(samples),
            validation=[shard_for_rank(validation.features, validation.labels)],
            num_features=self.num_features,
        )

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        weights = torch.randn(self.num_features, 1, generator=generator)
        features = torch.rand(self.num_samples, self.num_features, generator=generator) * 2 - 1
        noise = torch.randn(self.num_samples, 1, generator=generator) * self.noise_variance**0.5
        return features, (features @ weights + noise > 0).to(torch.float32)
