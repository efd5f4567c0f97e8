"""Models by kind. A new one is one file and one row here."""

from typing import Protocol

from torch import nn

from divebatch.lab.experiments.models.resnet import ResNet18, ResNet18ImageNet, ResNet20
from divebatch.lab.experiments.models.synthetic import LogisticRegression, Mlp
from divebatch.lab.training import LossFn


class ModelSettings(Protocol):
    """A dataclass of settings that can build its model and knows its loss."""

    @property
    def loss_fn(self) -> LossFn:
        """Mean-reduced loss of (outputs, targets)."""
        ...

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """A freshly initialised model; the caller seeds the random state."""
        ...


MODELS: dict[str, type[ModelSettings]] = {
    "logistic-regression": LogisticRegression,
    "mlp": Mlp,
    "resnet18": ResNet18,
    "resnet18-imagenet": ResNet18ImageNet,
    "resnet20": ResNet20,
}

__all__ = ["MODELS", "ModelSettings"]
