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

    Successive samples, and so any batch and any rank's shard, hold each class in proportion up to rounding. Of a class
    with share w among C classes, L successive samples hold w L, give or take less than 1 + w (C - 2). The order within
    a class and the place of its first sample are random, so each sample is equally likely in every batch. The order is
    a permutation that depends only on (seed, epoch), so changes of size, ranks and resuming work as with plain
    shuffling.

    A batch's gradient then varies only by the variance within classes: sum_k w_k tr(Sigma_k) / b replaces
    tr(Sigma) / b. Estimators that compare batches or their parts (`moments`, `split`, `ranks`) measure this smaller
    variance, which matters for choosing b but is not tr(Sigma). Estimators that compare samples (`per-sample`,
    `oracle`, `trajectory`) still measure tr(Sigma).

    Args:
        labels: The class of each sample of the dataset, in its order: a sequence or a tensor of numbers.
        seed: The seed of the orders; a loader replaces it by its own seed.
    """

    def __init__(self, labels: Sequence[Any] | Tensor, *, seed: int = 0) -> None:
        self._strata = _numbered(labels)
        super().__init__(len(self._strata))
        self.seed = checked_seed(seed)

    def draw(self, epoch: int) -> Tensor:
        """Draw the order of an epoch, counted from 0."""
        random = np.random.default_rng(mixed_seed(self.seed, epoch))
        counts = np.bincount(self._strata)
        shuffled = random.permutation(self.size).astype(np.int32 if self.size < 2**31 else np.int64)
        # Grouped by class, in shuffled order within each.
        grouped = shuffled[np.argsort(self._strata[shuffled], kind="stable")]
        classes = self._strata[grouped]
        place = np.arange(self.size) - (np.cumsum(counts) - counts)[classes]
        # The j-th sample of a class of c samples comes at (j + u) / c of the epoch, with one u for each class.
        when = (place + random.random(len(counts))[classes]) / counts[classes]
        return torch.from_numpy(grouped[np.argsort(when, kind="stable")]).to(index_dtype(self.size))

    def seeded(self, seed: int) -> Self:
        """Return a copy with the same classes and another seed."""
        other = copy(self)
        other.seed = checked_seed(seed)
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return a fingerprint of the labels, on which the order depends besides seed and epoch."""
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
