"""Copies to measure on, and batches where they are needed: the user's own objects stay as they are."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from divebatch.data import AdaptiveLoader
from divebatch.data.micro_batches import batch_length
from divebatch.errors import ArgumentError
from divebatch.norms.diversity import batch_pair


def copied(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> tuple[nn.Module, Optimizer]:
    """Model and optimizer anew, on the device, in training mode; without an optimizer one that leaves the weights."""
    try:
        twin, driver = copy.deepcopy((model, optimizer))  # in one go: the copy's optimizer has the copy's parameters
    except Exception as error:  # a model of the user's own may refuse in any way
        raise ArgumentError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and measuring must not change "
            f"your own: pass a model that copy.deepcopy takes"
        ) from error
    twin.to(device).train()
    if driver is None:
        return twin, torch.optim.SGD(twin.parameters(), lr=0.0)
    driver.load_state_dict(driver.state_dict())  # moves its memory to the device
    return twin, driver


def make_loader(data: Any, batch_size: int | None, seed: int) -> AdaptiveLoader:
    """A loader for a Dataset, a DataLoader or an AdaptiveLoader, at `batch_size` or its own."""
    if isinstance(data, AdaptiveLoader):
        loader = data
    elif isinstance(data, DataLoader):
        loader = AdaptiveLoader.wrap(data, seed=seed)
    else:
        if batch_size is None:
            raise ArgumentError("batch_size is missing: which batch does your learning rate belong to?")
        loader = AdaptiveLoader(data, batch_size, seed=seed)
    if batch_size is not None:
        loader.batch_size = batch_size
    if loader.batch_size < 2:
        raise ArgumentError("batch_size must be at least 2: noise is seen where parts of a batch differ")
    if loader.dataset_size is not None and loader.batch_size > loader.dataset_size:
        raise ArgumentError(f"batch_size={loader.batch_size} is more than the {loader.dataset_size} samples there are")
    return loader


def endless(loader: AdaptiveLoader, device: torch.device) -> Iterator[Any]:
    """Pairs (inputs, targets) on the device, epoch after epoch."""
    while True:
        for batch in loader:
            yield mapped(batch_pair(batch), lambda tensor: tensor.to(device, non_blocking=True))


def tiled(batch: Any, size: int) -> Any:
    """A batch of `size` samples from those of another, over and over: good enough to time."""
    present = batch_length(batch)
    return mapped(batch, lambda tensor: tensor[torch.arange(size, device=tensor.device) % present])


def mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting with every tensor changed."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, function) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        items = [mapped(value, function) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
