"""Convolutions of one, two and three dimensions, and their transposes.

The gradient of one sample's weight is a sum over output positions of (output gradient) x (input patch)^T, per group.
A transposed convolution is the same with input and output gradient exchanged. Shapes: B samples, G groups, T positions,
P rows and D columns of one group's weight matrix (D: channels of a patch times kernel size).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from divebatch.norms.forms import Explicit, Form, chunk_size, same_dtype, sq_norms_of_products
from divebatch.norms.registry import is_trainable, rule_for
from divebatch.norms.sketch import Estimate, estimate, project


@dataclass(slots=True)
class Patches:
    """Gradients sum_t left_t patch_t(right)^T of a convolution's weight."""

    left: Tensor
    """(B, G * P, *positions)."""
    right: Tensor
    """(B, G * channels, *size), padded."""
    kernel_size: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    groups: int
    shape: torch.Size
    """Of the weight."""

    def sq_norms(self) -> Tensor:
        """In chunks of samples: the patches are copied, kernel size times the input."""
        chunk = chunk_size(self.right, self._patch_entries)
        if chunk >= self.num_samples:
            return self._sq_norms(self.left, self.right)
        pairs = zip(self.left.split(chunk), self.right.split(chunk), strict=True)
        return torch.cat([self._sq_norms(left, right) for left, right in pairs])

    def _sq_norms(self, left: Tensor, right: Tensor) -> Tensor:
        sq_norms = sq_norms_of_products(*self._matrices(left, right))
        return sq_norms.view(len(left), self.groups).sum(1) if self.groups > 1 else sq_norms

    def sketch(self) -> Estimate:
        """No patches of the input: the one-channel projection of `left` is shifted instead, once a kernel entry."""
        left, right = same_dtype(self.left, self.right)
        num_matrices, num_rows = len(left) * self.groups, left.shape[1] // self.groups
        z_NHT = project(left.reshape(num_matrices, num_rows, -1))
        shifts_NXL = self._shifts(z_NHT.view(*z_NHT.shape[:2], *left.shape[2:]))
        u_NXC = torch.bmm(shifts_NXL, right.reshape(num_matrices, right.shape[1] // self.groups, -1).mT)
        return estimate(u_NXC.view(num_matrices, z_NHT.shape[1], -1)).summed(self.groups)

    def _shifts(self, z: Tensor) -> Tensor:
        """(N, H * kernel, L): z at the input positions it meets through each kernel entry, in any order of entries."""
        lengths, amounts = self.right.shape[2:], []
        for dim, (size, stride, dilation) in enumerate(zip(self.kernel_size, self.stride, self.dilation, strict=True)):
            z = _spread(z, dim + 2, stride)
            amounts += [((size - 1) * dilation, lengths[dim] - z.shape[dim + 2])]
        z = pad(z, [amount for ends in reversed(amounts) for amount in ends])
        for dim, (length, dilation) in enumerate(zip(lengths, self.dilation, strict=True)):
            z = z.unfold(dim + 2, length, dilation)  # one window a kernel entry
        return z.reshape(z.shape[0], -1, lengths.numel())

    def explicit(self, samples: slice) -> Tensor:
        """(b, *weight shape)."""
        left, right = self._matrices(self.left[samples], self.right[samples])
        return (left.mT @ right).view(-1, *self.shape)

    @property
    def num_samples(self) -> int:
        """B."""
        return self.left.shape[0]

    @property
    def _patch_entries(self) -> int:
        return self.left[0, 0].numel() * self.right.shape[1] * torch.Size(self.kernel_size).numel()

    def _matrices(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """(B * G, T, P) and (B * G, T, D)."""
        left, right = same_dtype(left, right)
        num_samples, num_groups = len(left), len(left) * self.groups
        left_GPT = left.reshape(num_groups, left.shape[1] // self.groups, -1)
        patches = self._windows(right).reshape(num_groups, right.shape[1] // self.groups, left_GPT.shape[2], -1)
        assert len(patches) == num_samples * self.groups
        return left_GPT.mT, patches.transpose(1, 2).flatten(2)

    def _windows(self, right: Tensor) -> Tensor:
        """(B, channels, *positions, *kernel): a view."""
        dims = range(len(self.kernel_size))
        for dim, size, stride, dilation in zip(dims, self.kernel_size, self.stride, self.dilation, strict=True):
            windows = right.unfold(dim + 2, (size - 1) * dilation + 1, stride)[..., ::dilation]
            right = windows.narrow(dim + 2, 0, self.left.shape[dim + 2])  # output_padding adds windows at the end
        return right


def _spread(z: Tensor, dim: int, stride: int) -> Tensor:
    """Put `stride - 1` zeros between the entries of one dimension."""
    if stride == 1:
        return z
    shape = [*z.shape[:dim], (z.shape[dim] - 1) * stride + 1, *z.shape[dim + 1 :]]
    spread = z.new_zeros(shape)
    spread[(slice(None),) * dim + (slice(None, None, stride),)] = z
    return spread


@rule_for(nn.Conv1d)
@rule_for(nn.Conv2d)
@rule_for(nn.Conv3d)
def conv(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Every stride, dilation, grouping, padding and padding mode."""
    gradients = _bias(layer, dy)
    if is_trainable(layer, "weight"):
        gradients["weight"] = _patches(layer, left=dy, right=_padded(layer, x))
    return gradients


@rule_for(nn.ConvTranspose1d)
@rule_for(nn.ConvTranspose2d)
@rule_for(nn.ConvTranspose3d)
def transposed_conv(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """The roles of input and output gradient are exchanged; output padding adds nothing to the weight's gradient."""
    gradients = _bias(layer, dy)
    if is_trainable(layer, "weight"):
        both_ends = [amount for amount in reversed(layer.padding) for _ in range(2)]
        gradients["weight"] = _patches(layer, left=x, right=pad(dy, both_ends))
    return gradients


def _bias(layer: nn.Module, dy: Tensor) -> dict[str, Form]:
    return {"bias": Explicit(dy.flatten(2).sum(2))} if is_trainable(layer, "bias") else {}


def _patches(layer: Any, *, left: Tensor, right: Tensor) -> Patches:
    return Patches(left, right, layer.kernel_size, layer.stride, layer.dilation, layer.groups, layer.weight.shape)


def _padded(layer: Any, x: Tensor) -> Tensor:
    """As the layer itself pads: `_reversed_padding_repeated_twice` also knows "same", with its uneven ends."""
    amounts = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return pad(x, amounts, mode=mode) if any(amounts) else x
