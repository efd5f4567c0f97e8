"""Crops that are resized to the model's input, bilinearly, for whole batches."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from divebatch.lab.experiments.datasets.augment import whole_below

TRIES = 10
"""Random boxes drawn before the whole image is taken."""


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A box of random area and shape, resized to `size` x `size`, mirrored half of the time.

    The box covers 8 to 100 % of the square image of `side` pixels, its width is 3/4 to 4/3 of its height. Nothing is
    averaged, so `size` should not be smaller than `side`.
    """

    side: int
    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: int = 0
    num_uniforms: int = 2 * TRIES + 3

    def plan(self, uniforms: Tensor) -> Tensor:
        """Columns: top, left, height, width of the box in pixels, 1 where mirrored."""
        areas, shapes, (down, across, mirror) = uniforms[:, :TRIES], uniforms[:, TRIES:-3], uniforms[:, -3:].unbind(1)
        height, width = self._first_that_fits(areas.double(), shapes.double())
        top = whole_below(self.side - height + 1, down)
        left = whole_below(self.side - width + 1, across)
        return torch.stack([top, left, height, width, mirror < 0.5], dim=1).float()

    def _first_that_fits(self, areas: Tensor, shapes: Tensor) -> tuple[Tensor, Tensor]:
        """Height and width of each sample's first box inside the image; of the whole image where none is."""
        low, high = self.scale
        area = (low + (high - low) * areas) * self.side**2
        log_low, log_high = map(math.log, self.ratio)
        ratio = torch.exp(log_low + (log_high - log_low) * shapes)
        sizes = torch.stack([area / ratio, area * ratio]).sqrt().round().long()  # (2, samples, tries)
        fits = ((sizes > 0) & (sizes <= self.side)).all(0)
        chosen = sizes.gather(2, fits.int().argmax(1).expand(2, -1)[:, :, None])[:, :, 0]
        height, width = torch.where(fits.any(1), chosen, self.side)
        return height, width

    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        """One gather and one interpolation."""
        top, left, height, width, mirrored = plan[:, :, None].unbind(1)
        along = _middles(self.size, plan.device)
        across = torch.where(mirrored > 0, 1 - along, along)
        rows = top + _inside(along * height, height)
        columns = left + _inside(across * width, width)
        return _sample(images.index_select(0, which), rows, columns)


@dataclass(frozen=True, slots=True)
class ResizeCentreCrop:
    """The square image resized to `resize` pixels a side, of which the middle `size` x `size` remain."""

    size: int
    resize: int
    num_uniforms: int = 0
    padding: int = 0

    def plan(self, uniforms: Tensor) -> Tensor:
        """Nothing is left to chance."""
        return uniforms

    def apply(self, images: Tensor, which: Tensor, plan: Tensor) -> Tensor:
        """One gather and one interpolation."""
        side = images.shape[1]
        margin = round((self.resize - self.size) / 2)
        along = (margin + self.size * _middles(self.size, images.device)) / self.resize
        places = _inside(along * side, torch.tensor(side)).expand(len(which), -1)
        return _sample(images.index_select(0, which), places, places)


def _middles(size: int, device: torch.device) -> Tensor:
    """The middles of `size` pixels on a line of length 1."""
    return (torch.arange(size, device=device) + 0.5) / size


def _inside(places: Tensor, length: Tensor) -> Tensor:
    """Distances from an edge as pixel coordinates (0 is the first pixel's middle), none outside the box."""
    return (places - 0.5).clamp(min=0).minimum(length - 1)


def _sample(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`images` at all pairs of each sample's `rows` and `columns`, in pixel coordinates."""
    side = images.shape[1]
    grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), dim=-1)
    grid = (2 * grid + 1) / side - 1  # -1 and 1 are the outer edges
    channels_first = images.permute(0, 3, 1, 2).float()
    return grid_sample(channels_first, grid, padding_mode="border", align_corners=False).permute(0, 2, 3, 1)
