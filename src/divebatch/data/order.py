"""In which order an epoch visits the samples."""

import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from divebatch.checks import require_count
from divebatch.errors import ArgumentError

MOST_DRAWN = 1_000_000
"""Orders that a sampler may have drawn: a resume may have to draw them all again."""


def checked_seed(seed: int) -> int:
    """`seed` if it can seed anything, else an error."""
    require_count("seed", seed, at_least=0)
    return seed


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """A seed from `generator`, else from torch's default one, so that `torch.manual_seed` decides over it."""
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


def mixed_seed(seed: int, *purpose: int) -> int:
    """One well-mixed seed for each purpose: an epoch's order, its workers, a trial's data.

    A plain sum would give seed 0, epoch 1 the order of seed 1, epoch 0.
    """
    return int(np.random.SeedSequence(seed, spawn_key=purpose).generate_state(1, np.uint64)[0] >> np.uint64(1))


def worker_seed(seed: int, epoch: int, samples: int = 0, rank: int = 0) -> int:
    """Apart from the seed of the epoch's order. Workers that begin within an epoch must not draw what others drew."""
    if samples:
        return mixed_seed(seed, epoch, 1, rank, samples)
    return mixed_seed(seed, epoch, 1, rank) if rank else mixed_seed(seed, epoch, 1)


def state_of(generator: Any) -> str | None:
    """The state of a torch generator, as hexadecimal digits; None where there is none."""
    return generator.get_state().numpy().tobytes().hex() if isinstance(generator, torch.Generator) else None


def restore(generator: Any, state: str | None) -> None:
    """Set a generator to a saved state, where there are both."""
    if state is not None and isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


@contextmanager
def global_states_kept() -> Iterator[None]:
    """Leave the random states of torch, numpy and Python as they are found."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def index_dtype(size: int) -> torch.dtype:
    """The smallest type that numbers `size` samples: an order is kept for as long as its epoch lasts."""
    return torch.int32 if size < 2**31 else torch.int64


class Order(ABC):
    """Draws the sample indices of an epoch."""

    is_reproducible: ClassVar[bool] = True
    """Whether every drawing of an epoch, here or on another rank, gives the same."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    @abstractmethod
    def draw(self, epoch: int) -> Tensor | Sequence[Any]:
        """All indices of `epoch` (from 0), each once."""

    def seeded(self, seed: int) -> "Order":
        """The same order with another seed, where it has one."""
        return self

    def fixed(self) -> Tensor | Sequence[Any]:
        """The indices of an epoch in an order that never changes."""
        return torch.arange(self.size, dtype=index_dtype(self.size))

    def remember(self, order: Any) -> None:
        """Take a saved order for the one that was drawn last."""
        return

    def state_dict(self, *, without_last: bool = False) -> dict[str, Any]:
        """What later drawings depend on, beside the epoch; `without_last` as if the last one had not been made."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw from now on what the saved order would have drawn."""
        return


class Shuffled(Order):
    """A permutation that depends on (seed, epoch) and nothing else."""

    def __init__(self, size: int, seed: int = 0) -> None:
        super().__init__(size)
        self.seed = checked_seed(seed)

    def draw(self, epoch: int) -> Tensor:
        # Mixed and not added: seed + epoch would give trial 1 the orders of trial 0, one epoch later.
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
        return torch.randperm(self.size, generator=generator, dtype=index_dtype(self.size))

    def seeded(self, seed: int) -> Self:
        return type(self)(self.size, seed)


class Sequential(Order):
    """The dataset's own order."""

    def draw(self, epoch: int) -> Tensor | Sequence[Any]:
        return self.fixed()


class InParts(Order):
    """Each pass over another order in equal parts of at most so many samples: one epoch a part, every sample once."""

    def __init__(self, order: Order, most: int) -> None:
        if isinstance(order, FromSampler):
            raise ArgumentError(
                f"epoch_samples={most} cannot be used with a sampler of your own, whose length is the epoch's: set its "
                f"number of samples instead"
            )
        self.order, self.most = order, most
        self.num_parts = -(-len(order) // most)
        super().__init__(len(order) // self.num_parts)

    def draw(self, epoch: int) -> Tensor | Sequence[Any]:
        number, part = divmod(epoch, self.num_parts)
        first, last = (len(self.order) * end // self.num_parts for end in (part, part + 1))
        part_of_pass = self.order.draw(number)[first:last]
        # A view would keep the whole pass in memory.
        return part_of_pass.clone() if isinstance(part_of_pass, Tensor) else part_of_pass

    def seeded(self, seed: int) -> "InParts":
        return InParts(self.order.seeded(seed), self.most)

    def fixed(self) -> Tensor | Sequence[Any]:
        """Every sample of the dataset."""
        return self.order.fixed()


def in_parts(order: Order | None, length: int | None, most: int | None) -> Order | None:
    """`order` in parts of at most so many samples, where that is asked for; None for a stream of `length` samples."""
    if most is None:
        return order
    require_count("epoch_samples", most)
    if length is not None and most > length:
        raise ArgumentError(
            f"epoch_samples={most} is more than the {length} samples of the dataset: leave it out, and an epoch is one "
            f"pass"
        )
    return None if order is None else InParts(order, most)


class FromSampler(Order):
    """The order of a sampler the user brought; told the epoch where it listens (`set_epoch`)."""

    is_reproducible = False

    def __init__(self, sampler: Iterable[Any]) -> None:
        if not isinstance(sampler, Sized):
            raise ArgumentError(f"sampler {type(sampler).__name__} has no length: the epoch's size must be known")
        if len(sampler) == 0:
            raise ArgumentError(f"the dataset is empty: sampler {type(sampler).__name__} has no samples")
        self.sampler: Any = sampler
        self._last_drawn: list[Any] | None = None
        self._num_drawn = 0
        self._before = self._state()

    def __len__(self) -> int:
        return len(self.sampler)

    def draw(self, epoch: int) -> list[Any]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        # A user's sampler cannot be asked twice for the same epoch, so its order is kept and saved.
        self._before = self._state()
        self._last_drawn = list(self.sampler)
        self._num_drawn += 1
        return self._last_drawn

    def fixed(self) -> list[Any]:
        """The latest epoch's: only a drawing tells which samples there are, and another would advance the sampler."""
        return self.draw(0) if self._last_drawn is None else self._last_drawn

    def remember(self, order: Any) -> None:
        self._last_drawn = order

    def state_dict(self, *, without_last: bool = False) -> dict[str, Any]:
        """The state of the sampler's own generator; of a sampler that hides it, how often it has drawn."""
        return self._before if without_last else self._state()

    def _state(self) -> dict[str, Any]:
        return {"num_drawn": self._num_drawn, "generator": state_of(getattr(self.sampler, "generator", None))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["generator"] is not None:
            restore(self.sampler.generator, state["generator"])
        # One that is told the epoch, or draws from torch's default generator, needs nothing of us.
        elif not hasattr(self.sampler, "set_epoch") and not hasattr(self.sampler, "generator"):
            self._catch_up(state["num_drawn"])
        self._num_drawn = state["num_drawn"]

    def _catch_up(self, num_drawn: int) -> None:
        """Draw and discard, so that a sampler with a hidden random state is where the saved one was."""
        if self._num_drawn > num_drawn:
            warnings.warn(
                f"sampler {type(self.sampler).__name__} has drawn {self._num_drawn} orders, and the state that is "
                f"loaded comes from one that had drawn {num_drawn}: its next orders are others than those of the saved "
                f"run. Load the state into a loader with a new sampler, or give the sampler a generator or set_epoch",
                stacklevel=4,
            )
        with global_states_kept():
            for _ in range(num_drawn - self._num_drawn):
                list(self.sampler)


def size_of(dataset: Any) -> int:
    """Its length, which must be at least 1."""
    try:
        size = len(dataset)
    except TypeError as error:
        raise ArgumentError(f"{type(dataset).__name__} has no length; make it an IterableDataset") from error
    if size == 0:
        raise ArgumentError(f"the dataset is empty: len({type(dataset).__name__}) is 0")
    return size


def order_over(dataset: Any, order: Order | None, *, shuffle: bool) -> Order | None:
    """`order` if it was given and covers the dataset, else a shuffled or a plain one; None for a stream."""
    if order is None:
        if isinstance(dataset, IterableDataset):
            return None
        return Shuffled(size_of(dataset)) if shuffle else Sequential(size_of(dataset))
    if not isinstance(order, Order):
        raise ArgumentError(
            f"order must be an Order such as StratifiedBatches(labels), got {type(order).__name__}; for a sampler of "
            f"your own: AdaptiveLoader.wrap(DataLoader(..., sampler=...))"
        )
    if isinstance(dataset, IterableDataset) or not shuffle:
        raise ArgumentError("order cannot be used with an IterableDataset or shuffle=False, which keep the data's own")
    if len(order) != size_of(dataset):
        raise ArgumentError(
            f"{type(order).__name__} is an order of {len(order)} samples, and the dataset has {len(dataset)}: it must "
            f"have one entry for each sample"
        )
    return order


def order_of(sampler: Any) -> Order:
    """Ours for torch's two plain samplers, so that epochs repeat and resume; else the sampler itself."""
    # Exact types: a subclass may draw in an order of its own.
    if type(sampler) is SequentialSampler:
        return Sequential(size_of(sampler.data_source))
    if type(sampler) is RandomSampler and not sampler.replacement:
        size = size_of(sampler.data_source)
        # A RandomSampler of fewer samples draws a subset, which no permutation of all can stand for.
        if sampler.num_samples == size:
            return Shuffled(size)
    return FromSampler(sampler)
