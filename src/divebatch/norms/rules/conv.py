"""Convolutions of one, two and three dimensions, and transposed convolutions.

Per group, the gradient of one sample's weight is a sum over output positions of (output gradient) x (input patch)^T. A
transposed convolution exchanges input and output gradient. Shapes: B samples, G groups, T positions, P rows and D
columns of one group's weight matrix (D: channels of a patch times kernel size).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from divebatch.norms import triton
from divebatch.norms.forms import (
    Explicit,
    Form,
    cached_chunk,
    chunk_size,
    in_chunks,
    same_dtype,
    sq_norms_of_products,
    sq_norms_of_rows,
    with_room,
)
from divebatch.norms.registry import is_trainable, require_batch, rule_for
from divebatch.norms.sketch import Estimate, estimate, project, sum_dtype


@dataclass(slots=True)
class Patches(Form):
    """The gradients sum_t left_t patch_t(right)^T of a convolution's weight."""

    left: Tensor
    """The left factors, (B, G * P, *positions)."""
    unpadded: Tensor
    """The input without padding, (B, G * channels, *size)."""
    padding: Sequence[int]
    """The zeros around the input, as for `torch.nn.functional.pad`: before and after, last dimension first."""
    kernel_size: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    groups: int
    shape: torch.Size
    """The shape of the weight."""

    _padded: Tensor | None = None

    @property
    def right(self) -> Tensor:
        """The padded input: a copy, made once, which sketches do not need."""
        if self._padded is None:
            self._padded = pad(self.unpadded, self.padding) if any(self.padding) else self.unpadded
        return self._padded

    def sq_norms(self) -> Tensor:
        """Return squared norms by the kernel that suits shape and device, in chunks of samples."""
        is_compiling = torch.compiler.is_compiling()
        if self._suits_triton() and (
            triton.applies_exactly(self.left, self.unpadded)
            or (not is_compiling and triton.may_apply(self.left, self.unpadded))
        ):
            return triton.conv2d_sq_norms(*same_dtype(self.left, self.unpadded), *self._geometry)
        if self._has_few_positions():
            kernel, entries = self._by_positions, self._padded_size.numel() ** 2
        else:  # entries of the largest temporary tensor
            patches = self.left.shape[2:].numel() * self.unpadded.shape[1] * self._kernel_entries
            entries = max(patches, self.shape.numel())
            # A CPU's own kernel reads no copies; on a GPU a convolution with so large a number of groups is slow.
            on_cpu = self.left.device.type == "cpu" and self._kernel_entries > 1
            kernel = self._by_grouped_convolution if on_cpu and not is_compiling else self._by_patches
        chunk = chunk_size(self.unpadded, entries)
        if chunk >= self.num_samples:
            return kernel(slice(0, self.num_samples))
        return torch.cat([kernel(slice(at, at + chunk)) for at in range(0, self.num_samples, chunk)])

    def _suits_triton(self) -> bool:
        """Return whether there are GPU kernels for this convolution. A single row is its own exact sketch."""
        is_plain = self.groups == 1 and self.left.ndim == 4 and self.left.shape[1] > 1
        return is_plain and self._kernel_entries <= triton.MOST_KERNEL_ENTRIES

    def _has_few_positions(self) -> bool:
        """Return whether inner products of positions need fewer multiplications than the gradient."""
        num_positions, num_inputs = self.left.shape[2:].numel(), self.unpadded.shape[2:].numel()
        rows, columns = self.left.shape[1], self.unpadded.shape[1] * self._kernel_entries
        by_inner_products = num_positions**2 * rows + num_inputs**2 * self.unpadded.shape[1]
        return self.groups == 1 and by_inner_products < num_positions * rows * columns

    def _by_positions(self, samples: slice) -> Tensor:
        """Use the Gram form, the sum over t, s of (left_t . left_s) (patch_t . patch_s), without patches.

        The product of two patches is a sum of products of single input positions, one per kernel entry.
        """
        left, right = map(with_room, same_dtype(self.left[samples], self.unpadded[samples]))
        left_NPT, right_NCL, size = self._flat(left), self._flat(right), right.shape[2:]
        patches_NTT = self._over_kernel((right_NCL.mT @ right_NCL).view(-1, *size, *size)).flatten(1)
        return self._over_groups(patches_NTT.mul_((left_NPT.mT @ left_NPT).flatten(1)).sum(1))

    def _over_kernel(self, products: Tensor) -> Tensor:
        """Turn products of pairs of positions, (N, *input size twice), into those of patches, (N, *positions twice)."""
        products = pad(products.to(sum_dtype(products.dtype)), [*self.padding, *self.padding])
        for dim, size in enumerate(self.kernel_size):
            axes = (dim + 1, dim + 1 + len(self.kernel_size))
            met = [self._met(self._met(products, axes[0], dim, k), axes[1], dim, k) for k in range(size)]
            products = torch.add(met[0], met[1]) if size > 1 else met[0].clone()
            for more in met[2:]:
                products += more
        return products

    def _by_patches(self, samples: slice) -> Tensor:
        """Copy the patches, then use one product per sample: the cheaper of the gradient and its Gram form."""
        return self._over_groups(sq_norms_of_products(*self._matrices(samples)))

    def _met(self, x: Tensor, axis: int, dim: int, entry: int) -> Tensor:
        """Return a view of the positions that one kernel entry meets along an axis, `dim` of the padded input."""
        stride = self.stride[dim]
        span = (self.left.shape[dim + 2] - 1) * stride + 1
        return x.narrow(axis, entry * self.dilation[dim], span)[(slice(None),) * axis + (slice(None, None, stride),)]

    def _by_grouped_convolution(self, samples: slice) -> Tensor:
        """Compute all samples' weight gradients by one convolution with a group for each sample."""
        padding, right = self._reached(samples)
        left, right = same_dtype(self.left[samples], right)
        as_one = [each.reshape(1, -1, *each.shape[2:]) for each in (left, right)]
        return sq_norms_of_rows(self._weight_gradient(as_one[0], as_one[1], padding, len(left)).reshape(len(left), -1))

    def summed(self) -> Tensor:
        """Return the weight gradient of the convolution itself."""
        padding, right = self._reached(slice(None))
        return self._weight_gradient(*same_dtype(self.left, right), padding, 1)

    def _weight_gradient(self, left: Tensor, right: Tensor, padding: Sequence[int], copies: int) -> Tensor:
        """Compute the gradient by torch's own kernel, for a convolution with `copies` times all groups."""
        weight = left.new_empty(()).expand(copies * self.shape[0], *self.shape[1:])
        geometry = (self.stride, padding, self.dilation, False, [0] * len(padding), copies * self.groups)
        gradient: Tensor = torch.ops.aten.convolution_backward(
            left, right, weight, None, *geometry, [False, True, False]
        )[1]
        return gradient

    def _reached(self, samples: slice) -> tuple[Sequence[int], Tensor]:
        """Return the padding and the input; if a convolution cannot pad so, no padding and the padded input."""
        before, after = self.padding[-2::-2], self.padding[-1::-2]
        sizes = zip(self.kernel_size, self.dilation, self.left.shape[2:], self.stride, strict=True)
        spans = [(size - 1) * dilation + (num - 1) * stride + 1 for size, dilation, num, stride in sizes]
        rests = [length - span for length, span in zip(self._padded_size, spans, strict=True)]
        if before == after and all(0 <= rest < stride for rest, stride in zip(rests, self.stride, strict=True)):
            return before, self.unpadded[samples]
        right = self.right[samples]
        for dim, span in enumerate(spans):
            right = right.narrow(dim + 2, 0, span)  # positions that no window reaches would add a window
        return [0] * len(spans), right

    def sketch(self, *, seed: Tensor | None = None) -> Estimate:
        """Shift the one-channel projection of `left`, once per kernel entry, instead of copying input patches."""
        left, right = same_dtype(self.left, self.unpadded)
        if self._suits_triton() and triton.applies(left, right):
            return triton.conv2d_sketch(left, right, *self._geometry, seed=seed)
        z_NHT = project(self._flat(left))
        shifts, right_NLC = self._shifts(z_NHT.view(*z_NHT.shape[:2], *left.shape[2:])), self._flat(right).mT
        u_NXC = in_chunks(_product, shifts, right_NLC, cached_chunk(shifts, shifts.shape[1:].numel()))
        return estimate(u_NXC.view(*z_NHT.shape[:2], -1)).of_groups(self.groups)

    def _shifts(self, z: Tensor) -> Tensor:
        """Return a view of z at the input positions of each kernel entry: (N, H, *kernel, *input size)."""
        lengths, amounts = self.unpadded.shape[2:], []
        for dim, (size, stride, dilation) in enumerate(zip(self.kernel_size, self.stride, self.dilation, strict=True)):
            z, zeros = _spread(z, dim + 2, stride), self.padding[-2 * (dim + 1)]
            amounts += [((size - 1) * dilation - zeros, lengths[dim] + zeros - z.shape[dim + 2])]
        z = pad(z, [amount for ends in reversed(amounts) for amount in ends])
        for dim, (length, dilation) in enumerate(zip(lengths, self.dilation, strict=True)):
            z = z.unfold(dim + 2, length, dilation)  # one window per kernel entry
        return z

    def explicit(self, samples: slice) -> Tensor:
        """Return the gradients of some samples, (b, *weight shape)."""
        left, right = self._matrices(samples)
        return (left.mT @ right).view(-1, *self.shape)

    @property
    def _geometry(self) -> tuple[Sequence[int], ...]:
        """Return kernel size, stride, zeros before each dimension, and dilation."""
        return self.kernel_size, self.stride, self.padding[-2::-2], self.dilation

    @property
    def _kernel_entries(self) -> int:
        return torch.Size(self.kernel_size).numel()

    @property
    def _padded_size(self) -> torch.Size:
        zeros = map(sum, zip(self.padding[-2::-2], self.padding[-1::-2], strict=True))
        return torch.Size(map(sum, zip(self.unpadded.shape[2:], zeros, strict=True)))

    def _flat(self, x: Tensor) -> Tensor:
        """Reshape (b, G * channels, *positions) to (b * G, channels, T)."""
        return x.reshape(len(x) * self.groups, x.shape[1] // self.groups, -1)

    def _over_groups(self, sq_norms: Tensor) -> Tensor:
        """Add up the groups of each sample: (b * G,) to (b,)."""
        return sq_norms.view(-1, self.groups).sum(1) if self.groups > 1 else sq_norms

    def _matrices(self, samples: slice) -> tuple[Tensor, Tensor]:
        """Return the output gradients (b * G, T, P) and the patches (b * G, T, D)."""
        left, right = same_dtype(self.left[samples], self.right[samples])
        left_NTP = self._flat(left).mT
        windows = self._windows(right).unflatten(1, (self.groups, -1))  # (b, G, channels, *positions, *kernel)
        patches = windows.movedim(2, 2 + len(self.kernel_size)).reshape(*left_NTP.shape[:2], -1)  # the one copy
        return left_NTP, patches

    def _windows(self, right: Tensor) -> Tensor:
        """Return a view of the patches, (B, channels, *positions, *kernel)."""
        dims = range(len(self.kernel_size))
        for dim, size, stride, dilation in zip(dims, self.kernel_size, self.stride, self.dilation, strict=True):
            windows = right.unfold(dim + 2, (size - 1) * dilation + 1, stride)[..., ::dilation]
            right = windows.narrow(dim + 2, 0, self.left.shape[dim + 2])  # output_padding adds windows at the end
        return right


def _product(shifts: Tensor, right_NLC: Tensor) -> Tensor:
    """Return the sketch (N, H * kernel, C), from shifts that are copied for the product."""
    return torch.bmm(shifts.reshape(len(shifts), -1, right_NLC.shape[1]), right_NLC)


def _spread(z: Tensor, dim: int, stride: int) -> Tensor:
    """Insert `stride - 1` zeros between the entries of one dimension."""
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
    """Measure a convolution with any stride, dilation, grouping, padding and padding mode."""
    require_batch(layer, x, layer.weight.ndim)
    gradients = _bias(layer, dy)
    if is_trainable(layer, "weight"):
        amounts = list(layer._reversed_padding_repeated_twice)  # includes "same", with its uneven ends
        if layer.padding_mode != "zeros":
            x, amounts = pad(x, amounts, mode=layer.padding_mode), [0] * len(amounts)
        gradients["weight"] = _patches(layer, left=dy, unpadded=x, padding=amounts)
    return gradients


@rule_for(nn.ConvTranspose1d)
@rule_for(nn.ConvTranspose2d)
@rule_for(nn.ConvTranspose3d)
def transposed_conv(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Exchange input and output gradient of a convolution; output padding does not affect the weight's gradient."""
    require_batch(layer, x, layer.weight.ndim)
    gradients = _bias(layer, dy)
    if is_trainable(layer, "weight"):
        both_ends = [amount for amount in reversed(layer.padding) for _ in range(2)]
        gradients["weight"] = _patches(layer, left=x, unpadded=dy, padding=both_ends)
    return gradients


def _bias(layer: nn.Module, dy: Tensor) -> dict[str, Form]:
    return {"bias": Explicit(dy.flatten(2).sum(2, dtype=sum_dtype(dy.dtype)))} if is_trainable(layer, "bias") else {}


def _patches(layer: Any, *, left: Tensor, unpadded: Tensor, padding: Sequence[int]) -> Patches:
    sizes = (layer.kernel_size, layer.stride, layer.dilation, layer.groups)
    return Patches(left, unpadded, padding, *sizes, layer.weight.shape)
