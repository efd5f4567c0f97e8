"""The settings of a model, from which an experiment builds it."""

from abc import ABC, abstractmethod

from torch import nn


class ModelSettings(ABC):
    """A dataclass of settings that can build its model."""

    sequence_length: int | None = None
    """The longest sequence it takes, in tokens; None for a model that takes no sequences."""

    @abstractmethod
    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """Return a freshly initialised model; the caller seeds the random state.

        Args:
            num_features: The length of a flat sample; 0 for images and sequences.
            num_classes: The number of classes, or of tokens; 1 for a single logit.
        """
