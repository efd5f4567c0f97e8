"""A residual network of nine layers for small images that learns in few epochs."""

from torch import Tensor, nn

from divebatch.lab.experiments.models.resnet import ImageModel, Norm

SCORE_SCALE = 1 / 8
"""The largest activations of an image give large scores, at which softmax would be sure before it has learned."""


def conv_block(in_channels: int, channels: int, norm: Norm, *, pool: bool = False) -> nn.Module:
    """A 3x3 convolution, which may be followed by a pooling that halves the size."""
    parts = [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False), norm(channels), nn.ReLU()]
    return nn.Sequential(*parts, nn.MaxPool2d(2)) if pool else nn.Sequential(*parts)


class Residual(nn.Module):
    """Two convolutions whose result is added to what goes in."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.first, self.second = (conv_block(channels, channels, norm) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))  # type: ignore[no-any-return]


class ResNet9Network(nn.Module):
    """64-128-256-512 channels, residual blocks at 128 and at 512, the largest value of each channel, one linear layer.

    6 573 120 parameters for 10 classes.
    """

    def __init__(self, num_classes: int, *, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            conv_block(3, 64, norm),
            conv_block(64, 128, norm, pool=True),
            Residual(128, norm),
            conv_block(128, 256, norm, pool=True),
            conv_block(256, 512, norm, pool=True),
            Residual(512, norm),
        )
        self.head = nn.Linear(512, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        largest = self.layers(x).amax((2, 3))
        scores: Tensor = SCORE_SCALE * self.head(largest)
        return scores


class ResNet9(ImageModel):
    """The small, fast one."""

    network = ResNet9Network
