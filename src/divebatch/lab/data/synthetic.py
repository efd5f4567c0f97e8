"""Drawn data: the paper's classification problems, and regression problems with a known solution."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from divebatch.data import AdaptiveLoader
from divebatch.errors import ArgumentError
from divebatch.lab.data.dataset import DataPlace, DatasetSettings, DataSplit, LabelledSamples, Parts
from divebatch.lab.tables import Count, Fraction, NotNegative
from divebatch.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnData(DatasetSettings):
    """Drawn feature vectors in memory, each with a target.

    Args:
        num_samples: Number of samples to draw.
        num_features: Length of a feature vector.
        noise_variance: Variance of the noise in the targets, or before their threshold.
    """

    num_samples: Count
    num_features: Count
    noise_variance: NotNegative

    @staticmethod
    def split(train: LabelledSamples, validation: LabelledSamples) -> DataSplit:
        """Train on all training samples, and validate each rank on its own part of the validation samples."""
        ranks = Ranks.here()
        if len(validation) < ranks.size:
            raise ArgumentError(f"{len(validation)} samples for validation cannot be shared by {ranks.size} ranks")
        # Without padding: a sample seen by two ranks would count twice.
        judged = tuple(each.tensor_split(ranks.size)[ranks.rank] for each in validation.content())
        return DataSplit(
            loader=partial(AdaptiveLoader, TensorDataset(train.inputs, train.labels)),
            has_parts=True,
            validation=[judged],
            num_features=train.inputs.shape[1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic(DrawnData):
    """The problem y = 1 if w . x + noise > 0, else 0, with x uniform in [-1, 1]^d and w standard normal.

    The paper's sigmoid is left out because sigmoid(t) > 0.5 means t > 0. Each trial draws its own w, x and noise.
    """

    train_fraction: Fraction

    def __post_init__(self) -> None:
        if not 0 < self._num_train < self.num_samples:
            raise ArgumentError(
                f"num_samples={self.num_samples} with train_fraction={self.train_fraction} leaves a part empty"
            )

    @property
    def _num_train(self) -> int:
        return round(self.num_samples * self.train_fraction)

    def parts(self, seed: int, place: DataPlace) -> Parts:
        """Draw the samples on the CPU, so that a seed gives the same data on every device."""
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(self.num_features, 1, generator=generator)
        features = torch.rand(self.num_samples, self.num_features, generator=generator) * 2 - 1
        noise = torch.randn(self.num_samples, 1, generator=generator) * self.noise_variance**0.5
        labels = (features @ weights + noise > 0).to(features.dtype)
        samples = LabelledSamples(features.to(place.device), labels.to(place.device))
        train, test = torch.arange(self.num_samples).split([self._num_train, self.num_samples - self._num_train])
        return samples.select(train), lambda: samples.select(test), self.split


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRegression(DrawnData):
    """A regression problem whose target is a hidden function of the features plus noise; each sample is used once.

    Validation targets have no noise, so the validation loss is the excess over the best possible loss.
    """

    def parts(self, seed: int, place: DataPlace) -> Parts:
        generator = torch.Generator().manual_seed(seed)
        truth = self._truth(generator)
        with torch.no_grad():
            features = self._features(self.num_samples, generator)
            noise = torch.randn(self.num_samples, generator=generator) * self.noise_variance**0.5
            train = LabelledSamples(features.to(place.device), (truth(features) + noise).to(place.device))
            judged = self._judged_features(generator)
            validation = LabelledSamples(judged.to(place.device), truth(judged).to(place.device))
        return train, lambda: validation, self.split

    @abstractmethod
    def _truth(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """Draw the hidden function."""

    @abstractmethod
    def _features(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw features, of shape (count, num_features)."""

    @abstractmethod
    def _judged_features(self, generator: torch.Generator) -> Tensor:
        """Return the features of the validation samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpectrum(DrawnRegression):
    """The problem y = w . x + noise with w standard normal; feature j of x is normal with variance 1 / j.

    Optimization has slow and fast directions, as in networks, and its exact course is known.
    """

    def _truth(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        weights = torch.randn(self.num_features, generator=generator)
        return lambda features: features @ weights

    def _features(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, self.num_features, generator=generator).mul_(self._deviations())

    def _judged_features(self, generator: torch.Generator) -> Tensor:
        # One sample per direction, scaled so that the mean of squares is the exact expectation over x.
        return torch.diag(self._deviations() * self.num_features**0.5)

    def _deviations(self) -> Tensor:
        return torch.arange(1, self.num_features + 1).rsqrt()


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherStudent(DrawnRegression):
    """The problem y = output of a drawn two-layer network, the teacher, on standard normal features, plus noise.

    Args:
        teacher_width: Number of the teacher's hidden units.
        num_judged: Number of validation samples.
    """

    teacher_width: Count
    num_judged: Count = 8192

    def _truth(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        hidden = torch.randn(self.num_features, self.teacher_width, generator=generator) / self.num_features**0.5
        out = torch.randn(self.teacher_width, generator=generator) / self.teacher_width**0.5
        return lambda features: nn.functional.relu(features @ hidden) @ out

    def _features(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, self.num_features, generator=generator)

    def _judged_features(self, generator: torch.Generator) -> Tensor:
        return self._features(self.num_judged, generator)
