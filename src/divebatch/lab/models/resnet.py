"""Residual networks (He et al. 2016), and their settings in an experiment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import relu

from divebatch.checks import require_choice
from divebatch.lab.models.model import ModelSettings

Norm = Callable[[int], nn.Module]
Stem = Callable[[int, Norm], nn.Module]


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
        out = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of basic blocks that halve the size, mean pooling, one linear layer."""

    def __init__(self, stem: nn.Module, widths: Sequence[int], blocks: int, num_classes: int, norm: Norm) -> None:
        super().__init__()
        self.stem = stem
        stages, in_channels = [], widths[0]
        for number, channels in enumerate(widths):
            for block in range(blocks):
                stride = 2 if block == 0 and number > 0 else 1
                stages.append(BasicBlock(in_channels, channels, stride, norm))
                in_channels = channels
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


def group_norm(channels: int) -> nn.Module:
    """Normalise groups of at least eight channels: per-sample statistics in the place of BatchNorm."""
    return nn.GroupNorm(max(1, channels // 8), channels)


def small_stem(channels: int, norm: Norm) -> nn.Module:
    """Keep the size of images of 32 x 32: a 3x3 convolution."""
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False), norm(channels), nn.ReLU())


def imagenet_stem(channels: int, norm: Norm) -> nn.Module:
    """Make images of 224 x 224 a quarter as wide: a 7x7 convolution and a pooling, each of which halves the size."""
    conv = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(conv, norm(channels), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))


def resnet18(num_classes: int, *, norm: Norm = nn.BatchNorm2d, stem: Stem = small_stem) -> ResNet:
    """Build 64-128-256-512 channels, two blocks a stage: 11 173 962 parameters for small images of 10 classes."""
    return ResNet(stem(64, norm), (64, 128, 256, 512), 2, num_classes, norm)


def resnet20(num_classes: int, *, norm: Norm = nn.BatchNorm2d) -> ResNet:
    """Build 16-32-64 channels, three blocks a stage, for small images: 272 474 parameters for 10 classes."""
    return ResNet(small_stem(16, norm), (16, 32, 64), 3, num_classes, norm)


# As settings

NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": group_norm}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModel(ModelSettings):
    """A residual network. `norm` is "batch", as in the paper, or "group" (no statistics over the batch)."""

    network: ClassVar[partial[ResNet]]
    norm: str = "batch"

    def __post_init__(self) -> None:
        require_choice("norm", self.norm, tuple(NORMS))

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return self.network(num_classes, norm=NORMS[self.norm])


class ResNet18(ImageModel):
    """ResNet-18 with the stem for small images."""

    network = partial(resnet18)


class ResNet18ImageNet(ImageModel):
    """ResNet-18 with ImageNet's stem."""

    network = partial(resnet18, stem=imagenet_stem)


class ResNet20(ImageModel):
    """ResNet-20, which the original paper has for CIFAR-10."""

    network = partial(resnet20)
