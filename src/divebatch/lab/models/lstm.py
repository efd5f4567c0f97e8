"""A recurrent network over tokens."""

from dataclasses import dataclass

from torch import Tensor, nn

from divebatch.checks import require_count
from divebatch.lab.models.model import ModelSettings


class LstmNetwork(nn.Module):
    """Scores of the next token, of shape (samples, positions, tokens), from tokens of shape (samples, positions)."""

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
    """An LSTM over the tokens of a sequence, with PyTorch's default initialisation.

    Args:
        width: Numbers of a token's vector and of the hidden state.
        layers: LSTMs on top of each other.
        sequence_length: The longest sequence, in tokens.
    """

    width: int = 128
    layers: int = 1
    sequence_length: int = 32

    def __post_init__(self) -> None:
        for name in ("width", "layers", "sequence_length"):
            require_count(name, getattr(self, name))

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return LstmNetwork(num_classes, width=self.width, layers=self.layers)
