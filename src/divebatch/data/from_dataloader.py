"""What an AdaptiveLoader takes over from a DataLoader."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from divebatch.data.order import Order, order_of, order_over
from divebatch.errors import ArgumentError

_PASSED_ON = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
"""Settings; its generator too, where it has one of its own."""


@dataclass(frozen=True, slots=True)
class Parts:
    """All that decides which batches come."""

    dataset: Any
    batch_size: int
    order: Order | None
    """None for a stream."""
    drop_last: bool
    settings: dict[str, Any]
    """For a DataLoader that is given its batches."""
    generator: torch.Generator | None = None
    """From which a seed is drawn; None for torch's default one."""


def parts_of(dataloader: Any) -> Parts:
    """The parts of a DataLoader, with an order of ours in the place of torch's plain shuffling."""
    if not isinstance(dataloader, DataLoader):
        raise ArgumentError(f"wrap takes a DataLoader, got {type(dataloader).__name__}")
    cutting = dataloader.batch_sampler
    # A batch sampler of the user's own decides on the batches, so there is no size of ours to set.
    if type(cutting) is not BatchSampler:
        kind = "none (batch_size=None)" if cutting is None else type(cutting).__name__
        raise ArgumentError(f"cannot change the batch size of this DataLoader; its batch sampler is: {kind}")
    settings = {name: getattr(dataloader, name) for name in _PASSED_ON}
    if dataloader.generator is not None:
        settings["generator"] = dataloader.generator
    if isinstance(dataloader.dataset, IterableDataset):
        order = None
    elif isinstance(cutting.sampler, Order):
        order = order_over(dataloader.dataset, cutting.sampler, shuffle=True)
    else:
        order = order_of(cutting.sampler)
    generator = dataloader.generator or getattr(cutting.sampler, "generator", None)
    return Parts(dataloader.dataset, cutting.batch_size, order, cutting.drop_last, settings, generator)
