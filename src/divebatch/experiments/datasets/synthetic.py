"""The paper's synthetic classification data (its equation for y)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from divebatch.experiments.datasets.split import Split, require_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """y = 1 if w . x + noise > 0, else 0, with x uniform in [-1, 1]^d and w standard normal.

    sigmoid(t) > 0.5 is t > 0, so the paper's sigmoid is left out. Each trial draws its own w, x and noise.
    """

    num_samples: int
    num_features: int
    noise_variance: float
    train_fraction: float

    def load(self, seed: int, device: torch.device) -> Split:
        """Drawn on the CPU, so that a seed means the same data on every device."""
        require_fraction("train_fraction", self.train_fraction)
        features, labels = self._draw(torch.Generator().manual_seed(seed))
        num_train = round(self.num_samples * self.train_fraction)
        features, labels = features.to(device), labels.to(device)
        train = TensorDataset(features[:num_train], labels[:num_train])
        return Split(train, [(features[num_train:], labels[num_train:])], num_features=self.num_features)

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        weights = torch.randn(self.num_features, 1, generator=generator)
        features = torch.rand(self.num_samples, self.num_features, generator=generator) * 2 - 1
        noise = torch.randn(self.num_samples, 1, generator=generator) * self.noise_variance**0.5
        return features, (features @ weights + noise > 0).to(torch.float32)
