"""Feeding data with a batch size that changes: exact coverage, exact resume."""

from divebatch.data.loader import AdaptiveLoader
from divebatch.data.sampler import AdaptiveBatchSampler

__all__ = ["AdaptiveBatchSampler", "AdaptiveLoader"]
