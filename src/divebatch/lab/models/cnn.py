"""A small convolutional network for images of 32 x 32 pixels, which a CPU trains in minutes."""

from dataclasses import dataclass, field

from torch import Tensor, nn

from divebatch.checks import require_count
from divebatch.lab.models.model import ModelSettings
from divebatch.lab.models.resnet import group_norm


class CnnNetwork(nn.Module):
    """Stages of two 3x3 convolutions, the first of which halves the image; mean pooling, one linear layer."""

    def __init__(self, widths: list[int], num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in zip([3, *widths], widths, strict=False):
            layers += [nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False), group_norm(width), nn.ReLU()]
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), group_norm(width), nn.ReLU()]
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.stages(x).mean((2, 3)))
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Cnn(ModelSettings):
    """Two convolutions a stage, with GroupNorm.

    Args:
        widths: Channels of each stage.
    """

    widths: list[int] = field(default_factory=lambda: [16, 32, 64])

    def __post_init__(self) -> None:
        for width in self.widths:
            require_count("widths", width)

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return CnnNetwork(self.widths, num_classes)
