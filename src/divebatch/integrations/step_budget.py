"""`max_steps` by samples: as many as so many steps of the first batch size hold."""

import math
from collections.abc import Callable

from divebatch.data.loader import AdaptiveLoader
from divebatch.data.order import num_batches


class StepBudget:
    """How many samples are left of a training whose length is a number of steps.

    Args:
        steps: So many steps of the first batch size.
        first_batch_size: Tells that size, which a resume may bring.
        loader: Delivers the samples.
    """

    def __init__(self, steps: int, first_batch_size: Callable[[], int], loader: AdaptiveLoader) -> None:
        self.steps, self._first, self._loader = steps, first_batch_size, loader

    def samples_left(self) -> float:
        """Samples left in the epoch under way, or in the next one where none is; infinite before the last epoch."""
        epochs, steps = self._length()
        current = self._loader.current
        is_over = current is not None and current.is_used_up
        epoch, samples = self._loader.epoch + is_over, 0 if current is None or is_over else current.samples
        if epoch != epochs:
            return math.inf if epoch < epochs else 0
        return max(0, steps * self._first() - samples)

    def _length(self) -> tuple[int, int]:
        """Whole epochs, and steps of one more."""
        size, first = self._loader.dataset_size, self._first()
        if size is None:
            return self._loader.epoch, self.steps  # of a stream in its first pass
        passes = num_batches(size, self._loader.delivery_size or first, drop_last=self._loader.drop_last)
        return divmod(self.steps, math.ceil(passes / math.ceil(first / (self._loader.delivery_size or first))))
