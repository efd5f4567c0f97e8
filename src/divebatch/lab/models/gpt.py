"""A GPT: a stack of causal attention and two-layer networks over learned positions, normalised before each part."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from divebatch.checks import require_count
from divebatch.errors import ArgumentError
from divebatch.lab.models.model import ModelSettings

INIT_STD = 0.02


class CausalAttention(nn.Module):
    """Each position looks at itself and at those before it, in several heads."""

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
        # torch takes flash attention here where the device and the number format allow it.
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        mixed: Tensor = self.out(seen.transpose(1, 2).reshape(samples, length, width))
        return mixed


class Block(nn.Module):
    """Attention, then a network on each position, each added to what was there."""

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
    """Scores of the next token, of shape (samples, positions, tokens), from tokens of shape (samples, positions)."""

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
        # Positions for each sample, and not once for all: per-sample norms count the samples of every layer's input.
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
                # Each block adds twice to the same stream: smaller, so that its size does not grow with the depth.
                nn.init.normal_(last.weight, std=INIT_STD / (2 * layers) ** 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt(ModelSettings):
    """About 25 million parameters.

    Args:
        layers: Blocks of attention and network.
        width: Numbers that stand for a position between blocks.
        heads: Heads of attention; they share the width.
        sequence_length: The longest sequence, in tokens: there is a learned vector for each position.
        tied: Whether the last layer has the weights of the first one.
    """

    layers: int = 8
    width: int = 512
    heads: int = 8
    sequence_length: int = 512
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "sequence_length"):
            require_count(name, getattr(self, name))
        if self.width % self.heads:
            raise ArgumentError(f"heads must divide width={self.width}, got heads={self.heads}")

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        settings = asdict(self)
        return GptNetwork(num_classes, settings.pop("sequence_length"), **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptTiny(Gpt):
    """For CPUs: two layers of width 64, sequences of 64, 0.14 million parameters."""

    layers: int = 2
    width: int = 64
    heads: int = 2
    sequence_length: int = 64
