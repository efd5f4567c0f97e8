"""Batches that hold each class in proportion (stratified sampling)."""

import hashlib
from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from divebatch.data.order import Order, checked_seed, index_dtype, mixed_seed
from divebatch.errors import ArgumentError


class StratifiedBatches(Order):
    """An order that spreads each class evenly over the epoch: `AdaptiveLoader(..., order=StratifiedBatches(labels))`.

    Any samples that follow one another, so any batch of any size and any rank's shard, hold each class in proportion
    up to rounding: of a class with the share w among C classes, L samples in a row hold w L, give or take less than
    1 + w (C - 2). Within a class the order is random, and so is where in the epoch the first of each class comes:
    every sample is as likely to be in any batch. It is a permutation that depends on (seed, epoch) alone, so that
    changes of size, ranks and resuming work as with plain shuffling.

    The gradient of a batch then scatters by the scatter within classes alone: sum_k w_k tr(Sigma_k) / b in the place of
    tr(Sigma) / b. Estimators that compare batches or parts of them (`moments`, `split`, `ranks`) measure just that,
    which is what matters for choosing b, but is not tr(Sigma); those that compare samples (`per-sample`, `oracle`,
    `trajectory`) still measure tr(Sigma).

    Args:
        labels: The class of each sample of the dataset, in its order: a sequence or a tensor of numbers.
        seed: Decides on the orders; a loader puts its own in its place.
    """

    def __init__(self, labels: Sequence[Any] | Tensor, *, seed: int = 0) -> None:
        self._strata = _numbered(labels)
        super().__init__(len(self._strata))
        self.seed = checked_seed(seed)

    def draw(self, epoch: int) -> Tensor:
        """Draw the order of `epoch` (from 0)."""
        random = np.random.default_rng(mixed_seed(self.seed, epoch))
        counts = np.bincount(self._strata)
        shuffled = random.permutation(self.size).astype(np.int32 if self.size < 2**31 else np.int64)
        # Grouped by class, each in the shuffled order.
        grouped = shuffled[np.argsort(self._strata[shuffled], kind="stable")]
        classes = self._strata[grouped]
        place = np.arange(self.size) - (np.cumsum(counts) - counts)[classes]
        # The j-th of a class of c samples comes at (j + u) / c of the epoch, with one u for each class.
        when = (place + random.random(len(counts))[classes]) / counts[classes]
        return torch.from_numpy(grouped[np.argsort(when, kind="stable")]).to(index_dtype(self.size))

    def seeded(self, seed: int) -> Self:
        """Return the same classes with another seed."""
        other = copy(self)
        other.seed = checked_seed(seed)
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return a mark of the labels, on which the order depends beside seed and epoch."""
        return {"labels": hashlib.sha256(self._strata.tobytes()).hexdigest()}


def _numbered(labels: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Number the classes 0, 1, ... in the order of their names."""
    values = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if values.ndim != 1 or values.size == 0:
        raise ArgumentError(
            f"labels must be one class for each sample, got an array of shape {values.shape}: for a dataset without "
            f"classes leave StratifiedBatches out"
        )
    return np.unique(values, return_inverse=True)[1].astype(np.int32)
