"""Image data in batches: stored and augmented on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from divebatch.data import AdaptiveLoader
from divebatch.data.order import mixed_seed
from divebatch.data.source import Numbers
from divebatch.lab.data.augment import Transform, with_margin
from divebatch.lab.data.dataset import DataPlace, DataSplit, FixedOrder, LabelledSamples
from divebatch.lab.step import compiled

AUGMENTATION = 4
"""The purpose of augmentation's random numbers, different from all other purposes."""
Batch = tuple[Tensor, Tensor]
"""A pair of inputs and targets."""
COMPILED_WITH = 256
"""Number of samples in the compiled example; the code serves any number, but is optimised for this one."""


# From stored pixels to a model's inputs: operator by operator, or compiled into few kernels


def prepare(
    index: Tensor, stored: LabelledSamples, plan: Tensor, transform: Transform, normalise: Callable[[Tensor], Tensor]
) -> Batch:
    """Return the images with these numbers, transformed by their rows of `plan` and normalised, and their labels."""
    pixels = transform.apply(stored.inputs, index, plan.index_select(0, index))
    return normalise(pixels), stored.labels.index_select(0, index)


def prepare_compiled(
    index: Tensor, stored: LabelledSamples, plan: Tensor, transform: Transform, normalise: Callable[[Tensor], Tensor]
) -> Batch:
    """Do what `prepare` does, up to rounding, in few kernels without intermediate results in memory.

    Code is compiled once for a transform, a layout and a store, and serves any number of samples except 1, which the
    compiler would treat as a constant.
    """
    if len(index) == 1:
        return prepare(index, stored, plan, transform, normalise)
    # A known number of samples hardly makes this code faster, so one compilation serves all.
    torch._dynamo.maybe_mark_dynamic(index, 0)
    with torch.no_grad():  # always: the compiler would make code for both modes
        inputs, targets = compiled(prepare)(index, stored, plan, transform, normalise)
    return inputs.detach(), targets.detach()  # removes the mark, or a model would be compiled for any size


# The loader


@dataclass(frozen=True, slots=True)
class Colours:
    """Mean and standard deviation of the three channels, for values from 0 to 1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class Normaliser:
    """A function from pixels 0 .. 255 in NHWC to (value / 255 - mean) / std in float32, NCHW."""

    def __init__(self, colours: Colours, place: DataPlace) -> None:
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (colours.mean, colours.std))
        self.shift = (-mean / std).float().to(place.device)
        self.scale = (1 / (255 * std)).float().to(place.device)
        self.memory_format = torch.channels_last if place.channels_last else torch.contiguous_format

    def __call__(self, pixels: Tensor) -> Tensor:
        # One kernel, plus another if the layout must change.
        normal = torch.addcmul(self.shift, pixels, self.scale)
        return normal.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)


class ImageLoader(AdaptiveLoader):
    """An AdaptiveLoader of image batches: (inputs float32 NCHW, targets int64), on the device.

    The augmentation of sample i in epoch e depends only on (seed, e, i), not on batch size, order, device or a resume.
    `full_pass` yields the samples as the next epoch will.
    """

    def __init__(
        self,
        stored: LabelledSamples,
        transform: Transform,
        normalise: Normaliser,
        batch_size: int,
        *,
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        numbers = Numbers(len(stored), stored.labels.device)
        super().__init__(numbers, batch_size, seed=seed, transform=self._prepare)
        self._stored, self._augment, self._normalise = stored, transform, normalise
        self._make = prepare_compiled if compile else prepare
        self._planned: tuple[int, int] | None = None
        if compile:  # compiles now, outside training time
            self._prepare(numbers[: min(COMPILED_WITH, len(numbers))])

    def _prepare(self, batch: Any) -> Batch:
        """Turn a batch of sample numbers into images; draw all random numbers of an epoch at its first batch."""
        if self._planned != (self.seed, self.epoch):
            self._planned = (self.seed, self.epoch)
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch, AUGMENTATION))
            # For all samples at once: a sample's augmentation must not depend on its batch.
            uniforms = torch.rand(len(self.dataset), self._augment.num_uniforms, generator=generator)
            self._plan = self._augment.plan(uniforms).to(self._normalise.shift.device)
        (index,) = batch
        return self._make(index, self._stored, self._plan, self._augment, self._normalise)


def image_split(
    train: tuple[LabelledSamples, Transform],
    validation: tuple[LabelledSamples, Transform],
    colours: Colours,
    num_classes: int,
    eval_batch_size: int,
    place: DataPlace,
) -> DataSplit:
    """Put both sets on the device with their margins, so that batches need no copies from the host."""
    normalise = Normaliser(colours, place)
    make_loader = partial(ImageLoader, compile=place.compile)
    stored, judged = (
        LabelledSamples(with_margin(each.inputs.to(place.device), transform.padding), each.labels.to(place.device))
        for each, transform in (train, validation)
    )
    return DataSplit(
        loader=partial(make_loader, stored, train[1], normalise),
        validation=FixedOrder(make_loader(judged, validation[1], normalise, eval_batch_size)),
        num_classes=num_classes,
    )
