"""The forms in which a rule may state the gradients of a batch's samples for one parameter.

Shapes: B samples, T positions of a sample, O rows and I columns of a weight matrix. A form never needs the whole
(B, *shape) tensor of all gradients unless it is that tensor; what must be formed is formed in chunks of samples.
Gradients of several calls, or of several layers that share the parameter, add up before they are squared: `total`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Upper bound for temporary tensors; samples are taken in chunks that stay below it."""


class Form(Protocol):
    """One parameter's gradients, one a sample."""

    def sq_norms(self) -> Tensor:
        """(B,): each sample's squared norm."""
        ...

    def explicit(self, samples: slice) -> Tensor:
        """(b, *parameter shape): the gradients themselves of some samples."""
        ...

    @property
    def num_samples(self) -> int:
        """B."""
        ...

    @property
    def sample_bytes(self) -> int:
        """What one sample's explicit gradient takes."""
        ...


@dataclass(slots=True)
class Explicit:
    """The gradients themselves: right for parameters that are small beside the activations (biases, norm layers)."""

    gradients: Tensor
    """(B, *parameter shape)."""

    def sq_norms(self) -> Tensor:
        """Of each row."""
        return sq_norms_of_rows(self.gradients.flatten(1))

    def explicit(self, samples: slice) -> Tensor:
        """A slice of what is there."""
        return self.gradients[samples]

    @property
    def num_samples(self) -> int:
        """B."""
        return self.gradients.shape[0]

    @property
    def sample_bytes(self) -> int:
        """One row."""
        return self.gradients[0].numel() * self.gradients.element_size()


@dataclass(slots=True)
class Outer:
    """A weight matrix's gradients as sums over positions of outer products: sum_t left_t right_t^T."""

    left: Tensor
    """(B, O) for a single position, else (B, ..., O)."""
    right: Tensor
    """(B, I) for a single position, else (B, ..., I)."""

    def sq_norms(self) -> Tensor:
        """By the cheapest of three ways that agree."""
        if self.left.ndim == 2:  # rank one: ||left right^T|| = ||left|| ||right||
            return sq_norms_of_rows(self.left).mul_(sq_norms_of_rows(self.right))
        left_BTO, right_BTI = positions(self.left), positions(self.right)
        num_positions, num_entries = left_BTO.shape[1], left_BTO.shape[2] * right_BTI.shape[2]
        # The Gram form costs T^2 (I + O) a sample, the gradient itself T I O.
        if num_positions * (left_BTO.shape[2] + right_BTI.shape[2]) < num_entries:
            return _in_chunks(_by_gram, left_BTO, right_BTI, num_positions**2)
        return _in_chunks(_by_gradient, left_BTO, right_BTI, num_entries)

    def explicit(self, samples: slice) -> Tensor:
        """(b, O, I)."""
        return positions(self.left[samples]).mT @ positions(self.right[samples])

    @property
    def num_samples(self) -> int:
        """B."""
        return self.left.shape[0]

    @property
    def sample_bytes(self) -> int:
        """One matrix."""
        return self.left.shape[-1] * self.right.shape[-1] * self.left.element_size()


def positions(x: Tensor) -> Tensor:
    """(B, I) -> (B, 1, I) and (B, ..., I) -> (B, T, I)."""
    return x[:, None] if x.ndim == 2 else x.flatten(1, -2)


def total(forms: Sequence[Form]) -> Tensor:
    """(B,): squared norms of the sum of several forms of one parameter."""
    if len(forms) == 1:
        return forms[0].sq_norms()
    outers = [form for form in forms if isinstance(form, Outer)]
    if len(outers) == len(forms):  # several calls are one call with more positions
        left = torch.cat([positions(form.left) for form in outers], 1)
        return Outer(left, torch.cat([positions(form.right) for form in outers], 1)).sq_norms()
    parts = [sum(form.explicit(samples) for form in forms) for samples in _sample_chunks(forms)]
    return torch.cat([sq_norms_of_rows(part.flatten(1)) for part in parts if isinstance(part, Tensor)])


def sq_norms_of_rows(x_BD: Tensor) -> Tensor:
    """(B,). vector_norm reads its input once and writes nothing else; x.square().sum(1) would write a copy first."""
    norms: Tensor = torch.linalg.vector_norm(x_BD, dim=1)
    return norms.square_()


def _sample_chunks(forms: Sequence[Form]) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // (2 * forms[0].sample_bytes))
    for start in range(0, forms[0].num_samples, step):
        yield slice(start, start + step)


def _in_chunks(
    kernel: Callable[[Tensor, Tensor], Tensor], left_BTO: Tensor, right_BTI: Tensor, num_entries: int
) -> Tensor:
    chunk = max(1, CHUNK_BYTES // (2 * num_entries * left_BTO.element_size()))
    if chunk >= len(left_BTO):
        return kernel(left_BTO, right_BTI)
    pairs = zip(left_BTO.split(chunk), right_BTI.split(chunk), strict=True)
    return torch.cat([kernel(left, right) for left, right in pairs])


def _by_gram(left_BTO: Tensor, right_BTI: Tensor) -> Tensor:
    """||sum_t left_t right_t^T||^2 = sum over t, s of (left_t . left_s) (right_t . right_s)."""
    return (left_BTO @ left_BTO.mT).mul_(right_BTI @ right_BTI.mT).sum((1, 2))


def _by_gradient(left_BTO: Tensor, right_BTI: Tensor) -> Tensor:
    return sq_norms_of_rows((left_BTO.mT @ right_BTI).flatten(1))
