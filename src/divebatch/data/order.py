"""The order in which an epoch visits the samples, and the progress of an epoch."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from divebatch.checks import require_count
from divebatch.errors import ArgumentError

MOST_OF_SAMPLER = 100_000_000
"""The most indices that a sampler may draw for an epoch: a list of them takes about 4 GB."""


# Seeds


def checked_seed(seed: int) -> int:
    """Return `seed`, or raise if it cannot seed a generator."""
    require_count("seed", seed, at_least=0)
    return seed


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed from `generator`. None: from torch's default generator, which `torch.manual_seed` seeds."""
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


def mixed_seed(seed: int, *purpose: int) -> int:
    """Derive a well-mixed seed for a purpose: an epoch's order, its workers, a trial's data.

    A plain sum would give seed 0, epoch 1 the order of seed 1, epoch 0.
    """
    return int(np.random.SeedSequence(seed, spawn_key=purpose).generate_state(1, np.uint64)[0] >> np.uint64(1))


def worker_seed(seed: int, epoch: int, samples: int = 0, rank: int = 0) -> int:
    """Derive the seed of workers that start in `epoch` after `samples` samples, so that no random numbers repeat."""
    purpose = (rank, samples) if samples else (rank,) if rank else ()
    return mixed_seed(seed, epoch, 1, *purpose)


def state_of(generator: torch.Generator | None) -> str | None:
    """Return the generator's state as hexadecimal digits; None without a generator."""
    return None if generator is None else generator.get_state().numpy().tobytes().hex()


def restore(generator: torch.Generator | None, state: str | None) -> None:
    """Set the generator to a saved state, if both exist."""
    if generator is not None and state is not None:
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


# Orders


def index_dtype(size: int) -> torch.dtype:
    """Return the smallest type for the numbers of `size` samples; an order is kept for a whole epoch."""
    return torch.int32 if size < 2**31 else torch.int64


class Order(ABC):
    """The sample indices of each epoch."""

    is_reproducible: bool = True
    """Whether drawing an epoch again, here or on another rank, gives the same indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    @abstractmethod
    def draw(self, epoch: int) -> Tensor | Sequence[Any]:
        """Return all indices of `epoch` (from 0), each of them once."""

    def seeded(self, seed: int) -> "Order":
        """Return the same order with another seed, if the order has one."""
        return self

    def fixed(self) -> Tensor | Sequence[Any]:
        """Return the indices of an epoch in an order that never changes."""
        return torch.arange(self.size, dtype=index_dtype(self.size))

    def remember(self, order: Any) -> None:
        """Adopt a saved order as the latest drawing."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state of later drawings besides seed and epoch; a reproducible order must find it equal."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, so that later drawings are those of the saved order."""
        return


class Shuffled(Order):
    """A permutation that depends only on (seed, epoch)."""

    def __init__(self, size: int, seed: int = 0) -> None:
        super().__init__(size)
        self.seed = checked_seed(seed)

    def draw(self, epoch: int) -> Tensor:
        # Mixed, not added: seed + epoch would give trial 1 the orders of trial 0, one epoch later.
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
        return torch.randperm(self.size, generator=generator, dtype=index_dtype(self.size))

    def seeded(self, seed: int) -> Self:
        return type(self)(self.size, seed)


class Sequential(Order):
    """The dataset's own order."""

    def draw(self, epoch: int) -> Tensor | Sequence[Any]:
        return self.fixed()


class InParts(Order):
    """Another order, with each drawing cut into equal epochs of at most `most` samples."""

    def __init__(self, order: Order, most: int) -> None:
        if isinstance(order, FromSampler):
            raise ArgumentError(
                f"epoch_samples={most} cannot be used with a sampler of your own: set its number of samples instead"
            )
        self.order, self.most = order, most
        self.num_parts = -(-len(order) // most)
        super().__init__(len(order) // self.num_parts)
        self.is_reproducible = order.is_reproducible
        self._drawn: tuple[int, Any] | None = None
        """The number and indices of the current drawing, if it cannot be repeated."""

    def draw(self, epoch: int) -> Tensor | Sequence[Any]:
        number, part = divmod(epoch, self.num_parts)
        first, last = (len(self.order) * end // self.num_parts for end in (part, part + 1))
        indices = self._whole(number)[first:last]
        # A view would keep the whole drawing in memory.
        return indices.clone() if isinstance(indices, Tensor) else indices

    def _whole(self, number: int) -> Any:
        if self.is_reproducible:
            return self.order.draw(number)
        if self._drawn is None or self._drawn[0] != number:
            self._drawn = number, self.order.draw(number)
        return self._drawn[1]

    def seeded(self, seed: int) -> "InParts":
        return InParts(self.order.seeded(seed), self.most)

    def fixed(self) -> Tensor | Sequence[Any]:
        """Return every sample of the dataset."""
        return self.order.fixed()

    def state_dict(self) -> dict[str, Any]:
        drawn = None if self._drawn is None else [self._drawn[0], list(self._drawn[1])]
        return {"inner": self.order.state_dict(), "drawn": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.load_state_dict(state["inner"])
        self._drawn = None
        if state["drawn"] is not None:
            self._drawn = state["drawn"][0], state["drawn"][1]
            self.order.remember(self._drawn[1])


class FromSampler(Order):
    """The order of a user's sampler, which receives the epoch if it has `set_epoch`."""

    is_reproducible = False

    def __init__(self, sampler: Iterable[Any]) -> None:
        name = type(sampler).__name__
        if not isinstance(sampler, Sized):
            raise ArgumentError(f"sampler {name} has no length: the epoch's size must be known")
        if len(sampler) == 0:
            raise ArgumentError(f"the dataset is empty: sampler {name} has no samples")
        if len(sampler) > MOST_OF_SAMPLER:
            raise ArgumentError(
                f"sampler {name} draws {len(sampler)} samples for an epoch, more than {MOST_OF_SAMPLER}: use fewer, or "
                f"AdaptiveLoader(dataset, batch_size, epoch_samples=N), which shuffles, without it"
            )
        self.sampler: Any = sampler
        self._last_drawn: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def draw(self, epoch: int) -> list[Any]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        # A user's sampler cannot repeat an epoch, so its order is kept and saved.
        self._last_drawn = list(self.sampler)
        return self._last_drawn

    def fixed(self) -> list[Any]:
        """Return the latest drawing: only drawing shows the samples, and another would advance the sampler."""
        return self.draw(0) if self._last_drawn is None else self._last_drawn

    def remember(self, order: Any) -> None:
        self._last_drawn = order

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler's own generator."""
        return {"generator": state_of(getattr(self.sampler, "generator", None))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(getattr(self.sampler, "generator", None), state["generator"])


def order_over(dataset: Any, order: Order | None, *, shuffle: bool) -> Order | None:
    """Return `order` if it covers the dataset. None: a shuffled or plain order, or None for a stream."""
    if order is None:
        if isinstance(dataset, IterableDataset):
            return None
        return Shuffled(_size_of(dataset)) if shuffle else Sequential(_size_of(dataset))
    if not isinstance(order, Order):
        raise ArgumentError(
            f"order must be an Order such as StratifiedBatches(labels), got {type(order).__name__}; a sampler of your "
            f"own: AdaptiveLoader.wrap(DataLoader(..., sampler=...))"
        )
    if isinstance(dataset, IterableDataset) or not shuffle:
        raise ArgumentError("order cannot be used with an IterableDataset or shuffle=False, which keep the data's own")
    if len(order) != _size_of(dataset):
        raise ArgumentError(
            f"{type(order).__name__} is an order of {len(order)} samples, and the dataset has {len(dataset)}"
        )
    return order


def order_of(sampler: Any) -> Order:
    """Replace torch's two plain samplers by orders that repeat and resume; keep any other sampler."""
    # Exact types: a subclass may draw in its own way.
    if type(sampler) is SequentialSampler:
        return Sequential(_size_of(sampler.data_source))
    if type(sampler) is RandomSampler and not sampler.replacement:
        size = _size_of(sampler.data_source)
        # A RandomSampler of fewer samples draws a subset, which no permutation can replace.
        if sampler.num_samples == size:
            return Shuffled(size)
    return FromSampler(sampler)


def _size_of(dataset: Any) -> int:
    try:
        size = len(dataset)
    except TypeError as error:
        raise ArgumentError(f"{type(dataset).__name__} has no length; make it an IterableDataset") from error
    if size == 0:
        raise ArgumentError(f"the dataset is empty: len({type(dataset).__name__}) is 0")
    return size


# One epoch


def num_batches(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of batches in `num_samples` samples."""
    return num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)


@dataclass(slots=True)
class EpochProgress:
    """An epoch and its progress.

    Batches count when the loop receives them, not when a worker fetches them. So a state saved in the loop resumes at
    the next batch.
    """

    epoch: int
    """The epoch's number, from 0."""
    batch_size: int
    """The current size; after the epoch, its last size."""
    order: Tensor | Sequence[Any] | None
    """The indices of all samples; None for a stream, and after the epoch."""
    drop_last: bool
    delivery_size: int | None = None
    """Samples in a delivered batch. None: the batch size."""
    end_at: int | None = None
    """The number of samples after which the epoch ends, if it is part of a stream."""
    num_batches: int | None = None
    """Batches in the whole epoch; None for a stream of unknown length."""
    batches: int = 0
    """Batches delivered."""
    samples: int = 0
    """Samples delivered, on all ranks."""
    local_samples: int = field(default=0, compare=False)
    """Samples that this process delivered to this rank, without those before a resume."""
    is_open: bool = True
    """Whether the epoch's iterator can deliver more: it is neither used up nor left."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds from the first request for a batch, or from the resume, to the end; 0 before the end."""
    _begun_at: float = field(default=0.0, compare=False)
    _samples_before: int = field(default=0, compare=False)

    @property
    def samples_left(self) -> int:
        """Samples still to be delivered; 0 for a stream."""
        # Counted in samples, not in batches: exact however often the size has changed.
        return 0 if self.order is None else len(self.order) - self.samples

    @property
    def cut_size(self) -> int:
        """Samples of a delivered batch."""
        return self.delivery_size or self.batch_size

    @property
    def is_used_up(self) -> bool:
        """Whether all batches were delivered, even if the loop stopped before the iterator ended."""
        return self.batches == self.num_batches if self.end_at is None else self.samples >= self.end_at

    @property
    def samples_per_second(self) -> float | None:
        """The speed of loading and training together; None if no time was taken."""
        return (self.samples - self._samples_before) / self.seconds if self.seconds > 0 else None

    def resize(self, batch_size: int) -> None:
        """Cut the rest of the epoch with another size. A stream's workers may still hold batches of the old size."""
        self.batch_size, self.num_batches = batch_size, None
        if self.order is not None:
            self.num_batches = self.batches + num_batches(self.samples_left, self.cut_size, drop_last=self.drop_last)
        elif self.end_at is not None:
            self.num_batches = self.batches + max(0, -(-(self.end_at - self.samples) // self.cut_size))

    def begin(self) -> None:
        """Start the clock when the loop requests its first batch, or the first after a resume."""
        self._begun_at, self._samples_before = time.perf_counter(), self.samples

    def end(self) -> None:
        """Stop the clock and release the order, so that two orders need not be held at a time."""
        self.seconds, self.order = time.perf_counter() - self._begun_at, None

    def state_dict(self, *, with_order: bool) -> dict[str, Any]:
        """Return the epoch's progress; `with_order` if the order cannot be drawn again."""
        order = list(self.order) if with_order and self.order is not None else None
        return {"batch_size": self.batch_size, "batches": self.batches, "samples": self.samples, "order": order}
