"""Residual networks (He et al. 2016) for small images."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.functional import relu

Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = norm(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), norm(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Residual plus shortcut."""
        out = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """A 3x3 stem without pooling, stages of basic blocks that halve the size, mean pooling, one linear layer."""

    def __init__(self, widths: Sequence[int], blocks: int, num_classes: int, norm: Norm) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, padding=1, bias=False), norm(widths[0]))
        stages, in_channels = [], widths[0]
        for number, channels in enumerate(widths):
            for block in range(blocks):
                stride = 2 if block == 0 and number > 0 else 1
                stages.append(BasicBlock(in_channels, channels, stride, norm))
                in_channels = channels
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.stages(relu(self.stem(x)))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


def group_norm(channels: int) -> nn.Module:
    """Groups of at least eight channels: per-sample statistics in the place of BatchNorm."""
    return nn.GroupNorm(max(1, channels // 8), channels)


def resnet18(num_classes: int, *, norm: Norm = nn.BatchNorm2d) -> ResNet:
    """64-128-256-512 channels, two blocks a stage: 11 173 962 parameters for 10 classes."""
    return ResNet((64, 128, 256, 512), 2, num_classes, norm)


def resnet20(num_classes: int, *, norm: Norm = nn.BatchNorm2d) -> ResNet:
    """16-32-64 channels, three blocks a stage."""
    return ResNet((16, 32, 64), 3, num_classes, norm)
