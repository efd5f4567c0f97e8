"""Random crops, flips, rotations and resized crops of whole batches of images.

A transform works in two steps. `plan` turns an epoch's uniform numbers, one row a sample, into whole numbers that give
the origin of each sample's pixels. `plan` runs once an epoch on the CPU, so that every device gets the same plan.
`apply` carries out the plan for a batch. Images are uint8 of shape (samples, height, width, 3).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

FIXED_POINT = 32
"""Fractional bits of a sine as a whole number, which picks the same pixel on every device."""
TRIES = 10
"""Number of random boxes that are tried before the whole image is used."""
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Bounds of a box's fraction of the image, and of its width over its height."""


class Transform(ABC):
    """A transform of stored images into a model's inputs, before normalisation."""

    num_uniforms: int = 0
    """Number of random numbers for a sample in an epoch."""
    padding: int = 0
    """Width of the margin of zero pixels that `apply` expects around images."""

    def plan(self, uniforms: Tensor) -> Tensor:
        """Turn (samples, num_uniforms) numbers in [0, 1) into a row for `apply` per sample."""
        return uniforms

    @abstractmethod
    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        """Return the images numbered `which`, transformed by their rows of `plan`: (batch, height, width, 3)."""


@dataclass(frozen=True)
class Whole(Transform):
    """A transform that leaves images unchanged."""

    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        return images.index_select(0, which)


@dataclass(frozen=True)
class CropFlip(Transform):
    """A random crop of `size` x `size` pixels from the image with its zero margin, mirrored half of the time."""

    size: int = 32
    padding: int = 4
    num_uniforms: int = 3

    def plan(self, uniforms: Tensor) -> Tensor:
        """Return the first row, the first column, and the step between columns, -1 if mirrored."""
        top, left = (whole_below(2 * self.padding + 1, uniforms[:, k]) for k in (0, 1))
        mirrored = uniforms[:, 2] < 0.5
        first = torch.where(mirrored, left + self.size - 1, left)
        return torch.stack([top, first, 1 - 2 * mirrored.long()], dim=1)

    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        places = torch.arange(self.size, device=plan.device)
        top, first, step = plan[:, :, None, None].unbind(1)
        return images[which[:, None, None], top + places[:, None], torch.addcmul(first, step, places)]


@dataclass(frozen=True)
class CropFlipRotate(Transform):
    """A `CropFlip` rotated about its centre by at most `degrees`, with nearest pixels and zeros from outside."""

    size: int = 32
    padding: int = 4
    degrees: float = 15.0
    num_uniforms: int = 4

    def plan(self, uniforms: Tensor) -> Tensor:
        """Return CropFlip's columns, then cosine, sine and the origin of the first pixel's centre in fixed point."""
        upright = CropFlip(self.size, self.padding).plan(uniforms)
        angles = torch.deg2rad((2 * uniforms[:, 3].double() - 1) * self.degrees)
        cosine, sine = angles.cos(), angles.sin()
        centre = self.size / 2
        row = centre - (centre - 0.5) * (cosine + sine)
        column = centre - (centre - 0.5) * (cosine - sine)
        turn = torch.stack([cosine, sine, row, column], dim=1)
        # Whole numbers, because floats may round differently on another device and pick another pixel.
        return torch.cat([upright, (turn * 2**FIXED_POINT).round().long()], dim=1)

    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        # Pixels from outside the crop come from the corner of the margin, which is zero.
        top, first, step, cosine, sine, row, column = plan[:, :, None, None].unbind(1)
        across = torch.arange(self.size, device=plan.device)
        down = across[:, None]
        rows = torch.addcmul(torch.addcmul(row, cosine, down), sine, across) >> FIXED_POINT
        columns = torch.addcmul(torch.addcmul(column, cosine, across), sine, down, value=-1) >> FIXED_POINT
        inside = (rows == rows.clamp(0, self.size - 1)) & (columns == columns.clamp(0, self.size - 1))
        return images[which[:, None, None], (top + rows) * inside, torch.addcmul(first, step, columns) * inside]


def with_margin(images: Tensor, padding: int) -> Tensor:
    """Return `images` with `padding` zero pixels on each side."""
    return pad(images, (0, 0, padding, padding, padding, padding)) if padding else images


def whole_below(count: int | Tensor, uniforms: Tensor) -> Tensor:
    """Return whole numbers 0 .. count - 1, each equally likely."""
    # In float64: a float32 just below 1 times `count` may round up to `count`.
    return (uniforms.double() * count).long()


# Crops that are resized to the model's input, bilinearly


@dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """A random box of random area and shape, resized to `size` x `size`, mirrored half of the time.

    The image is a square of `side` pixels. Resizing does not average, so `size` should be at least `side`.
    """

    side: int
    size: int
    num_uniforms: int = 2 * TRIES + 3

    def plan(self, uniforms: Tensor) -> Tensor:
        """Return top, left, height and width of the box in pixels, then 1 if mirrored."""
        areas, shapes, (down, across, mirror) = uniforms[:, :TRIES], uniforms[:, TRIES:-3], uniforms[:, -3:].unbind(1)
        height, width = self._first_that_fits(areas.double(), shapes.double())
        top = whole_below(self.side - height + 1, down)
        left = whole_below(self.side - width + 1, across)
        return torch.stack([top, left, height, width, mirror < 0.5], dim=1).float()

    def _first_that_fits(self, areas: Tensor, shapes: Tensor) -> tuple[Tensor, Tensor]:
        """Return height and width of each sample's first box that fits into the image, or else of the whole image."""
        area = (SCALE[0] + (SCALE[1] - SCALE[0]) * areas) * self.side**2
        log_low, log_high = map(math.log, RATIO)
        ratio = torch.exp(log_low + (log_high - log_low) * shapes)
        sizes = torch.stack([area / ratio, area * ratio]).sqrt().round().long()  # (2, samples, tries)
        fits = ((sizes > 0) & (sizes <= self.side)).all(0)
        chosen = sizes.gather(2, fits.int().argmax(1).expand(2, -1)[:, :, None])[:, :, 0]
        height, width = torch.where(fits.any(1), chosen, self.side)
        return height, width

    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        top, left, height, width, mirrored = plan[:, :, None].unbind(1)
        along = _middles(self.size, plan.device)
        across = torch.where(mirrored > 0, 1 - along, along)
        rows = top + _inside(along * height, height)
        columns = left + _inside(across * width, width)
        return _sample(images.index_select(0, which), rows, columns)


@dataclass(frozen=True)
class ResizeCentreCrop(Transform):
    """A crop of the middle `size` x `size` pixels from the square image resized to `resize` pixels a side."""

    size: int
    resize: int

    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        side = images.shape[1]
        margin = round((self.resize - self.size) / 2)
        along = (margin + self.size * _middles(self.size, images.device)) / self.resize
        places = _inside(along * side, torch.tensor(side)).expand(len(which), -1)
        return _sample(images.index_select(0, which), places, places)


def _middles(size: int, device: torch.device) -> Tensor:
    """Return the centres of `size` pixels on a line of length 1."""
    return (torch.arange(size, device=device) + 0.5) / size


def _inside(places: Tensor, length: Tensor) -> Tensor:
    """Turn distances from an edge into pixel coordinates inside the box; 0 is the first pixel's centre."""
    return (places - 0.5).clamp(min=0).minimum(length - 1)


def _sample(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Sample each image at all pairs of its `rows` and `columns`, in pixel coordinates."""
    side = images.shape[1]
    grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), dim=-1)
    grid = (2 * grid + 1) / side - 1  # -1 and 1 are the outer edges
    channels_first = images.permute(0, 3, 1, 2).float()
    return grid_sample(channels_first, grid, padding_mode="border", align_corners=False).permute(0, 2, 3, 1)
