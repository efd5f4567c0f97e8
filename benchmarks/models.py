"""The networks of the norms benchmark, each with a batch of random data and its loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from divebatch.lab.models import group_norm, resnet18, resnet20


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Like GPT-2 small, with an output matrix of its own."""

    def __init__(self, *, vocabulary: int = 50_304, time: int = 512, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        self.blocks = nn.Sequential(*[Block(width, width // 64) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places)))).flatten(0, 1)


@dataclass(frozen=True)
class Problem:
    build: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output.float(), targets.flatten())


def images(batch_size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))


def vectors(batch_size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, 512), torch.randint(0, 10, (batch_size,))


def sequences(batch_size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 50_000, (batch_size, 512)), torch.randint(0, 50_000, (batch_size, 512))


PROBLEMS = {
    "logistic regression": Problem(lambda: nn.Linear(512, 10), vectors),
    "MLP": Problem(lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)), vectors),
    "ResNet-20 BatchNorm": Problem(lambda: resnet20(10), images),
    "ResNet-20 GroupNorm": Problem(lambda: resnet20(10, norm=group_norm), images),
    "ResNet-18 BatchNorm": Problem(lambda: resnet18(10), images),
    "ResNet-18 GroupNorm": Problem(lambda: resnet18(10, norm=group_norm), images),
    "GPT": Problem(Gpt, sequences),
}
