"""The slow, obvious twins of the batched augmentations: one image, one pixel at a time."""

import math
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate


def crop_flip(image: Any, uniforms: list[float], *, size: int = 32, padding: int = 4) -> Any:
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    top, left = (int(uniform * (2 * padding + 1)) for uniform in uniforms[:2])
    crop = padded[top : top + size, left : left + size]
    return crop[:, ::-1] if uniforms[2] < 0.5 else crop


def rotate(image: Any, degrees: float) -> Any:
    """Counter-clockwise about the centre: each pixel takes the one its middle falls into, or zero."""
    size = len(image)
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turned = np.zeros_like(image)
    for row in range(size):
        for column in range(size):
            down, across = row + 0.5 - size / 2, column + 0.5 - size / 2
            from_row = math.floor(sine * across + cosine * down + size / 2)
            from_column = math.floor(cosine * across - sine * down + size / 2)
            if 0 <= from_row < size and 0 <= from_column < size:
                turned[row, column] = image[from_row, from_column]
    return turned


def crop_box(uniforms: list[float], *, side: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random resized crop."""
    height = width = side
    for area_uniform, shape_uniform in zip(uniforms[:10], uniforms[10:20], strict=True):
        area = (0.08 + 0.92 * area_uniform) * side * side
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * shape_uniform)
        tall, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < tall <= side and 0 < wide <= side:
            height, width = tall, wide
            break
    return int(uniforms[20] * (side - height + 1)), int(uniforms[21] * (side - width + 1)), height, width


def resized_crop(image: torch.Tensor, box: tuple[int, int, int, int], *, size: int, mirrored: bool) -> torch.Tensor:
    top, left, height, width = box
    resized = resize(image[top : top + height, left : left + width], size)
    return resized.flip(1) if mirrored else resized


def resize(image: torch.Tensor, size: int) -> torch.Tensor:
    planes = image.permute(2, 0, 1)[None].double()
    return interpolate(planes, (size, size), mode="bilinear", align_corners=False)[0].permute(1, 2, 0).float()
