"""Random crops, flips and rotations of whole batches of images, each as one gather.

A transform works in two steps. `plan` turns the uniform numbers of an epoch, one row a sample, into whole numbers that
say where each sample's pixels come from; it runs once an epoch on the CPU, so that every device gets the same plan.
`apply` carries out the rows of one batch. Images are uint8 of shape (samples, height, width, 3).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

FIXED_POINT = 32
"""Bits behind the point of a sine: whole numbers pick the same pixel on every device."""


class Transform(Protocol):
    """Turns stored images into those a model sees, before normalisation."""

    @property
    def num_uniforms(self) -> int:
        """Random numbers one sample needs an epoch."""
        ...

    @property
    def padding(self) -> int:
        """Zero pixels that must surround the images `apply` gets."""
        ...

    def plan(self, uniforms: Tensor) -> Tensor:
        """From (samples, num_uniforms) in [0, 1) to one row a sample for `apply`."""
        ...

    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        """The images numbered `which`, changed by their rows of `plan`: (batch, height, width, 3)."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Images as they are."""

    num_uniforms: int = 0
    padding: int = 0

    def plan(self, uniforms: Tensor) -> Tensor:
        """Nothing is left to chance."""
        return uniforms

    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        """One look-up."""
        return images.index_select(0, which)


@dataclass(frozen=True, slots=True)
class CropFlip:
    """A crop of `size` x `size` pixels from the image with its zero margin, mirrored half of the time."""

    size: int = 32
    padding: int = 4
    num_uniforms: int = 3

    def plan(self, uniforms: Tensor) -> Tensor:
        """Columns: first row, first column, step from column to column (-1 where mirrored)."""
        top, left = (whole_below(2 * self.padding + 1, uniforms[:, k]) for k in (0, 1))
        mirrored = uniforms[:, 2] < 0.5
        first = torch.where(mirrored, left + self.size - 1, left)
        return torch.stack([top, first, 1 - 2 * mirrored.long()], dim=1)

    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        """One gather, crop and mirror in its indices."""
        places = torch.arange(self.size, device=plan.device)
        top, first, step = plan[:, :, None, None].unbind(1)
        return images[which[:, None, None], top + places[:, None], torch.addcmul(first, step, places)]


@dataclass(frozen=True, slots=True)
class CropFlipRotate:
    """The same, then turned about its centre by at most `degrees`: nearest pixel, zeros from outside the crop."""

    size: int = 32
    padding: int = 4
    degrees: float = 15.0
    num_uniforms: int = 4

    def plan(self, uniforms: Tensor) -> Tensor:
        """The columns of CropFlip, then in fixed point: cosine, sine, and where the first pixel's middle comes from."""
        upright = CropFlip(self.size, self.padding).plan(uniforms)
        angles = torch.deg2rad((2 * uniforms[:, 3].double() - 1) * self.degrees)
        cosine, sine = angles.cos(), angles.sin()
        centre = self.size / 2
        row = centre - (centre - 0.5) * (cosine + sine)
        column = centre - (centre - 0.5) * (cosine - sine)
        turn = torch.stack([cosine, sine, row, column], dim=1)
        return torch.cat([upright, (turn * 2**FIXED_POINT).round().long()], dim=1)

    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        """One gather; what lies outside the crop points at the corner of the margin, which is zero."""
        top, first, step, cosine, sine, row, column = plan[:, :, None, None].unbind(1)
        across = torch.arange(self.size, device=plan.device)
        down = across[:, None]
        rows = torch.addcmul(torch.addcmul(row, cosine, down), sine, across) >> FIXED_POINT
        columns = torch.addcmul(torch.addcmul(column, cosine, across), sine, down, value=-1) >> FIXED_POINT
        inside = (rows == rows.clamp(0, self.size - 1)) & (columns == columns.clamp(0, self.size - 1))
        return images[which[:, None, None], (top + rows) * inside, torch.addcmul(first, step, columns) * inside]


def with_margin(images: Tensor, padding: int) -> Tensor:
    """`images` with `padding` zero pixels on each side."""
    return pad(images, (0, 0, padding, padding, padding, padding)) if padding else images


def whole_below(count: int | Tensor, uniforms: Tensor) -> Tensor:
    """Whole numbers 0 .. count - 1, each equally likely."""
    return (uniforms.double() * count).long()
