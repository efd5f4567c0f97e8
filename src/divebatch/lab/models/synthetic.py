"""The models of drawn data, with PyTorch's default initialisation where nothing else is said."""

from dataclasses import dataclass

from torch import nn

from divebatch.checks import require_count
from divebatch.lab.models.model import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LogisticRegression(ModelSettings):
    """One logit, weight and bias: 513 parameters for 512 features."""

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return nn.Linear(num_features, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModel(ModelSettings):
    """One number for each sample, from weights that start at zero, without bias."""

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        layer = nn.Linear(num_features, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(ModelSettings):
    """Two layers with ReLU. Width 1 has the parameter count the paper states (515 for 512 features)."""

    hidden_width: int = 1

    def __post_init__(self) -> None:
        require_count("hidden_width", self.hidden_width)

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(num_features, self.hidden_width), nn.ReLU(), nn.Linear(self.hidden_width, 1))
