"""The networks of the experiments on images, as settings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn.functional import cross_entropy

from divebatch.errors import ArgumentError
from divebatch.lab.experiments.models.resnet import Norm, group_norm, resnet18, resnet18_imagenet, resnet20
from divebatch.lab.training import LossFn

NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": group_norm}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModel:
    """A network of `network`'s kind. `norm` is "batch", as in the paper, or "group" (no statistics over the batch)."""

    network: ClassVar[Callable[..., nn.Module]]
    norm: str = "batch"

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise ArgumentError(f"unknown norm {self.norm!r}; known: {', '.join(NORMS)}")

    @property
    def loss_fn(self) -> LossFn:
        """Mean cross-entropy over samples."""
        return cross_entropy

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """A fresh network for images of three channels."""
        return type(self).network(num_classes, norm=NORMS[self.norm])


class ResNet18(ImageModel):
    """With the stem for small images."""

    network = staticmethod(resnet18)


class ResNet18ImageNet(ImageModel):
    """With ImageNet's stem."""

    network = staticmethod(resnet18_imagenet)


class ResNet20(ImageModel):
    """The small one of the original paper for CIFAR-10."""

    network = staticmethod(resnet20)
