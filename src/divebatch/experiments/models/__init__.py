"""Models by kind. A new one is one file and one row here."""

from typing import Protocol

from torch import nn

from divebatch.experiments.models.synthetic import LogisticRegression, Mlp
from divebatch.training import LossFn


class ModelSettings(Protocol):
    """A dataclass of settings that can build its model and knows its loss."""

    @property
    def loss_fn(self) -> LossFn:
        """Mean-reduced loss of (outputs, targets)."""
        ...

    def build(self, num_features: int) -> nn.Module:
        """A freshly initialised model; the caller seeds the random state."""
        ...


MODELS: dict[str, type[ModelSettings]] = {"logistic-regression": LogisticRegression, "mlp": Mlp}

__all__ = ["MODELS", "ModelSettings"]
