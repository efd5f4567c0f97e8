"""Feeding data with a batch size that changes: exact coverage, exact resume."""

from divebatch.data.loader import AdaptiveLoader

__all__ = ["AdaptiveLoader"]
