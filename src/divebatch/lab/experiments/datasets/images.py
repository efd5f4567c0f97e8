"""Image data in batches: stored on the device or fetched from the host, augmented on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from divebatch.data import AdaptiveLoader
from divebatch.data.order import mixed_seed
from divebatch.data.source import Numbers
from divebatch.lab.experiments.datasets.augment import Transform, with_margin
from divebatch.lab.experiments.datasets.dataset import DataPlace, DataSplit, FixedOrder, Samples
from divebatch.lab.training.forward import MOST_VARIANTS
from divebatch.lab.training.stop_signals import leave_to_parent, worker_context

AUGMENTATION = 4
"""The purpose of an epoch's augmentation seed, apart from its order, its workers, and a trial's data and model."""
Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""
COMPILED_WITH = 256
"""Samples the compiler is shown: its code serves any number, but is laid out for the one it saw."""


class ImageSet(Samples, Protocol):
    """Images with their labels, in memory or on disk."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Images (uint8, NHWC), labels and numbers of the samples asked for, in one go."""
        ...

    def in_memory(self) -> "HostImages":
        """All of them at once."""
        ...


class HostImages(Dataset[Any]):
    """Images (uint8, NHWC) and labels (int64) in host memory."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.tensor(indices)
        return self.images[index], self.labels[index], index

    def select(self, numbers: Tensor) -> "HostImages":
        return HostImages(self.images[numbers], self.labels[numbers])

    def content(self) -> tuple[Tensor, Tensor]:
        return self.images, self.labels

    def in_memory(self) -> "HostImages":
        return self


# From stored pixels to what a model sees: operator by operator, or compiled into few kernels


@dataclass(frozen=True, slots=True)
class Fetched:
    """The stored images and labels a batch is made from, on the device."""

    images: Tensor
    """With their margin."""
    labels: Tensor
    """Of `images`."""
    which: Tensor
    """The batch's places in `images`."""
    index: Tensor
    """The batch's sample numbers."""
    holds_all: bool
    """Whether `images` are all there are, the same for every batch, and not this batch's alone."""


def prepare(fetched: Fetched, plan: Tensor, transform: Transform, normalise: Callable[[Tensor], Tensor]) -> Batch:
    """The batch's images, changed by their rows of `plan` and normalised, and its labels."""
    pixels = transform.apply(fetched.images, fetched.which, plan.index_select(0, fetched.index))
    return normalise(pixels), fetched.labels.index_select(0, fetched.which)


@cache
def _compiled() -> Callable[..., Batch]:
    """One for all loaders of a process: a second one of the same transform and layout takes what is there."""
    import torch._dynamo  # takes a second to import, and only compiled runs need it

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    return torch.compile(prepare, dynamic=False, fullgraph=True)


def prepare_compiled(
    fetched: Fetched, plan: Tensor, transform: Transform, normalise: Callable[[Tensor], Tensor]
) -> Batch:
    """The result of `prepare`, to the last bit or so, in few kernels, which keep places and pixels out of memory.

    The compiler makes code once for a transform, a layout and a store; only the number of samples stays open. It takes
    1 for a constant, so a single sample goes without it.
    """
    if len(fetched.which) == 1:
        return prepare(fetched, plan, transform, normalise)
    of_this_batch = [fetched.which, fetched.index]
    if not fetched.holds_all:
        of_this_batch += [fetched.images, fetched.labels]
    for tensor in of_this_batch:
        # This code hardly gains from a known number of samples, so it is compiled once for all.
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    with torch.no_grad():  # whatever the caller does: the compiler makes code for either mode
        inputs, targets = _compiled()(fetched, plan, transform, normalise)
    return inputs.detach(), targets.detach()  # what comes out is marked too: a model would be compiled for any size


# Where images are stored, and the loader


class Store(Protocol):
    """Holds images until they are batched."""

    dataset: Any
    """What an AdaptiveLoader cuts into batches."""
    loader_settings: dict[str, Any]

    def fetch(self, batch: Any) -> Fetched:
        """Bring a batch of `dataset` to the device."""
        ...

    def first(self, count: int) -> Any:
        """The batch of the first `count` samples."""
        ...


class DeviceStore:
    """All images on the device: a batch is a list of sample numbers, and nothing is copied to it."""

    def __init__(self, images: ImageSet, padding: int, device: torch.device) -> None:
        held = images.in_memory()
        self.images = with_margin(held.images.to(device), padding)
        self.labels = held.labels.to(device)
        self.dataset: Any = Numbers(len(held), device)
        self.loader_settings: dict[str, Any] = {}

    def fetch(self, batch: Any) -> Fetched:
        (index,) = batch
        return Fetched(self.images, self.labels, index, index, holds_all=True)

    def first(self, count: int) -> Any:
        return self.dataset[:count]


class HostStore:
    """Images on the host, brought over batch by batch through a DataLoader."""

    def __init__(self, images: ImageSet, padding: int, place: DataPlace) -> None:
        self.dataset: Any = images
        self.padding, self.device = padding, place.device
        self.loader_settings: dict[str, Any] = {
            "num_workers": place.num_workers,
            "persistent_workers": place.num_workers > 0,
            "pin_memory": place.device.type == "cuda",
            "collate_fn": _as_it_is,
            "worker_init_fn": leave_to_parent,
            "multiprocessing_context": worker_context() if place.num_workers else None,
        }

    def fetch(self, batch: Any) -> Fetched:
        images, labels, index = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        which = torch.arange(len(index), device=self.device)
        return Fetched(with_margin(images, self.padding), labels, which, index, holds_all=False)

    def first(self, count: int) -> Any:
        """Read here, without starting a worker process."""
        return self.dataset.__getitems__(range(count))


def _as_it_is(batch: Any) -> Any:
    """The collate function for datasets that give whole batches."""
    return batch


@dataclass(frozen=True, slots=True)
class Colours:
    """Mean and standard deviation of the three channels, of values from 0 to 1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class Normaliser:
    """From pixel values 0 .. 255 in NHWC to what the model sees: (value / 255 - mean) / std, float32, NCHW."""

    def __init__(self, colours: Colours, place: DataPlace) -> None:
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (colours.mean, colours.std))
        self.shift = (-mean / std).float().to(place.device)
        self.scale = (1 / (255 * std)).float().to(place.device)
        self.memory_format = torch.channels_last if place.channels_last else torch.contiguous_format

    def __call__(self, pixels: Tensor) -> Tensor:
        """In one kernel, and one more where the layout must change."""
        normal = torch.addcmul(self.shift, pixels, self.scale)
        return normal.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)


class ImageLoader(AdaptiveLoader):
    """An AdaptiveLoader of image batches: (inputs float32 NCHW, targets int64), on the device.

    What happens to sample i in epoch e depends on (seed, e, i) alone: not on batch size, order, device, workers or a
    resume. `full_pass` sees the samples as the epoch to come will.
    """

    def __init__(
        self,
        store: Store,
        transform: Transform,
        normalise: Normaliser,
        batch_size: int,
        *,
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        super().__init__(store.dataset, batch_size, seed=seed, transform=self._prepare, **store.loader_settings)
        self._store, self._augment, self._normalise = store, transform, normalise
        self._make = prepare_compiled if compile else prepare
        self._planned: tuple[int, int] | None = None
        if compile:  # now, where nobody's training time runs
            self._prepare(store.first(min(COMPILED_WITH, len(store.dataset))))

    def _prepare(self, batch: Any) -> Batch:
        """Turn a batch of sample numbers into images; all that is random is drawn at an epoch's first batch."""
        if self._planned != (self.seed, self.epoch):
            self._planned = (self.seed, self.epoch)
            self._plan = self._augment.plan(self._uniforms()).to(self._normalise.shift.device)
        return self._make(self._store.fetch(batch), self._plan, self._augment, self._normalise)

    def _uniforms(self) -> Tensor:
        # For all samples at once: what happens to one must not depend on the batch it comes in.
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch, AUGMENTATION))
        return torch.rand(len(self.dataset), self._augment.num_uniforms, generator=generator)


def image_split(
    train: tuple[ImageSet, Transform],
    validation: tuple[ImageSet, Transform],
    colours: Colours,
    num_classes: int,
    eval_batch_size: int,
    place: DataPlace,
) -> DataSplit:
    """Both sets where `place` wants them."""
    normalise = Normaliser(colours, place)
    make_loader = partial(ImageLoader, compile=place.compile)
    held_out = make_loader(_store(*validation, place), validation[1], normalise, eval_batch_size)
    return DataSplit(
        loader=partial(make_loader, _store(*train, place), train[1], normalise),
        validation=FixedOrder(held_out),
        num_classes=num_classes,
    )


def _store(images: ImageSet, transform: Transform, place: DataPlace) -> Store:
    if place.on_device:
        return DeviceStore(images, transform.padding, place.device)
    return HostStore(images, transform.padding, place)
