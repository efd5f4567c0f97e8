"""Data loading with a batch size that changes, exact coverage and exact resume."""

from divebatch.data.loader import AdaptiveLoader

__all__ = ["AdaptiveLoader"]
