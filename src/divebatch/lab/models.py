"""Models by kind. A new model is a class with `build` and a row of `MODELS`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention

from divebatch.errors import ArgumentError
from divebatch.lab.tables import Count


class ModelSettings(ABC):
    """A dataclass of settings that can build its model."""

    sequence_length: int | None = None
    """The model's longest sequence, in tokens. None: the model takes no sequences."""

    @abstractmethod
    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """Build a freshly initialised model; the caller seeds the random state.

        Args:
            num_features: The length of a flat sample; 0 for images and sequences.
            num_classes: The number of classes, or of tokens; 1 for a single logit.
        """


# Flat samples


@dataclass(frozen=True, slots=True, kw_only=True)
class LogisticRegression(ModelSettings):
    """Logistic regression: one logit from weights and a bias, 513 parameters for 512 features."""

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return nn.Linear(num_features, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModel(ModelSettings):
    """A linear model without bias, whose weights start at zero."""

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        layer = nn.Linear(num_features, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(ModelSettings):
    """Two layers with a ReLU. Width 1 has the parameter count of the paper (515 for 512 features)."""

    hidden_width: Count = 1

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(num_features, self.hidden_width), nn.ReLU(), nn.Linear(self.hidden_width, 1))


# Images: residual networks (He et al. 2016), and a network that a CPU trains in minutes

Norm = Callable[[int], nn.Module]
Stem = Callable[[int, Norm], nn.Module]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

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
    """Return a GroupNorm of at least eight channels a group, whose statistics are per sample."""
    return nn.GroupNorm(max(1, channels // 8), channels)


def small_stem(channels: int, norm: Norm) -> nn.Module:
    """Return a 3x3 convolution, which keeps the size of small images."""
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False), norm(channels), nn.ReLU())


def imagenet_stem(channels: int, norm: Norm) -> nn.Module:
    """Return a 7x7 convolution and a pooling, each of which halves the size of the image."""
    conv = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(conv, norm(channels), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))


def resnet18(num_classes: int, *, norm: Norm = nn.BatchNorm2d, stem: Stem = small_stem) -> ResNet:
    """Build a ResNet with 64 to 512 channels, two blocks a stage: 11 173 962 parameters for 10 classes."""
    return ResNet(stem(64, norm), (64, 128, 256, 512), 2, num_classes, norm)


def resnet20(num_classes: int, *, norm: Norm = nn.BatchNorm2d) -> ResNet:
    """Build a ResNet for small images with 16 to 64 channels, three blocks a stage: 272 474 parameters, 10 classes."""
    return ResNet(small_stem(16, norm), (16, 32, 64), 3, num_classes, norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModel(ModelSettings):
    """A residual network whose `norm` is "batch", as in the paper, or "group", without statistics over the batch."""

    network: ClassVar[partial[ResNet]]
    norm: Literal["batch", "group"] = "batch"

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return self.network(num_classes, norm=nn.BatchNorm2d if self.norm == "batch" else group_norm)


class ResNet18(ImageModel):
    """ResNet-18 with the stem for small images."""

    network = partial(resnet18)


class ResNet18ImageNet(ImageModel):
    """ResNet-18 with ImageNet's stem."""

    network = partial(resnet18, stem=imagenet_stem)


class ResNet20(ImageModel):
    """ResNet-20, which He et al. train on CIFAR-10."""

    network = partial(resnet20)


class CnnNetwork(nn.Module):
    """Stages of two 3x3 convolutions, the first of which halves the image, then mean pooling and one linear layer."""

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
    """A small network with two convolutions and GroupNorm in each stage; `widths` are the stages' channels."""

    widths: list[Count] = field(default_factory=lambda: [16, 32, 64])

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return CnnNetwork(self.widths, num_classes)


# Text: tokens of shape (samples, positions) give scores of the next token, of shape (samples, positions, tokens)

INIT_STD = 0.02


class CausalAttention(nn.Module):
    """Attention in several heads, from each position to itself and earlier positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.all_three = nn.Linear(width, 3 * width, bias=False)
        """Queries, keys and values at once."""
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        by_head = self.all_three(x).view(samples, length, 3, self.heads, width // self.heads)
        queries, keys, values = by_head.permute(2, 0, 3, 1, 4)
        # torch uses flash attention here if the device and the number format allow it.
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        mixed: Tensor = self.out(seen.transpose(1, 2).reshape(samples, length, width))
        return mixed


class Block(nn.Module):
    """Attention, then a two-layer network on each position, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        x = x + self.down(gelu(self.up(self.before_network(x))))
        return x


class GptNetwork(nn.Module):
    """A GPT with learned positions and normalisation before each attention and network."""

    def __init__(self, num_tokens: int, length: int, *, layers: int, width: int, heads: int, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(num_tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens, bias=False)
        self._initialise(layers)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        # Expanded per sample: per-sample norms count the samples of every layer's input.
        places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.tokens(tokens) + self.positions(places)
        scores: Tensor = self.head(self.last_norm(self.blocks(x)))
        return scores

    def _initialise(self, layers: int) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
        for block in self.blocks.children():
            assert isinstance(block, Block)
            for last in (block.attention.out, block.down):
                # Each block adds twice to the residual stream: smaller weights keep its size independent of depth.
                nn.init.normal_(last.weight, std=INIT_STD / (2 * layers) ** 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt(ModelSettings):
    """A GPT, by default with about 25 million parameters.

    Args:
        layers: Number of blocks of attention and network.
        width: Length of a position's vector between blocks.
        heads: Number of attention heads, which share the width.
        sequence_length: The longest sequence, in tokens; each position has a learned vector.
        tied: Whether the last layer shares the embedding's weights.
    """

    layers: Count = 8
    width: Count = 512
    heads: Count = 8
    sequence_length: Count = 512
    tied: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ArgumentError(f"heads must divide width={self.width}, got heads={self.heads}")

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        settings = asdict(self)
        return GptNetwork(num_classes, settings.pop("sequence_length"), **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptTiny(Gpt):
    """A small GPT for CPUs: two layers of width 64, sequences of 64, 0.14 million parameters."""

    layers: Count = 2
    width: Count = 64
    heads: Count = 2
    sequence_length: Count = 64


class LstmNetwork(nn.Module):
    """LSTMs between an embedding and a linear layer."""

    def __init__(self, num_tokens: int, *, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.recurrent = nn.LSTM(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.tokens(tokens))
        scores: Tensor = self.head(states)
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Lstm(ModelSettings):
    """A stack of LSTMs with PyTorch's default initialisation.

    Args:
        width: Length of a token's vector and of the hidden state.
        layers: The number of LSTMs.
        sequence_length: The longest sequence, in tokens.
    """

    width: Count = 128
    layers: Count = 1
    sequence_length: Count = 32

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return LstmNetwork(num_classes, width=self.width, layers=self.layers)


MODELS: dict[str, type[ModelSettings]] = {
    "logistic-regression": LogisticRegression,
    "linear": LinearModel,
    "mlp": Mlp,
    "cnn": Cnn,
    "lstm": Lstm,
    "resnet18": ResNet18,
    "resnet18-imagenet": ResNet18ImageNet,
    "resnet20": ResNet20,
    "gpt": Gpt,
    "gpt-tiny": GptTiny,
}
