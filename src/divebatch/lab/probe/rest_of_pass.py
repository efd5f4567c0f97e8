"""What a run over one pass of data had not seen yet at its checkpoint."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from divebatch.data.order import mixed_seed
from divebatch.lab.training.run_length import order_of_pass

REPEAT = (0, 7)
"""The purpose of the random numbers that mix what is left for a repeat."""


class RestOfPass(Sampler[int]):
    """The samples that are left of a pass: an epoch of the loader is a repeat, and each but the first mixes them anew.

    The first goes on as the run itself would. Its length is that of the data, which is what policies must know.

    Args:
        size: Samples of the data.
        seed: The run's, which its orders follow from.
        seen: Samples that the run had seen, of all passes.
    """

    def __init__(self, size: int, seed: int, seen: int) -> None:
        number, start = divmod(seen, size)
        self._left = order_of_pass(size, seed, number)[start:]
        self._size, self._seed, self._repeat = size, seed, 0
        self.window = len(self._left)
        """Samples after which an epoch ends."""

    @property
    def num_left(self) -> int:
        """Samples of the pass that the run had not seen."""
        return len(self._left)

    def __len__(self) -> int:
        return self._size

    def set_epoch(self, epoch: int) -> None:
        """Make it the next repeat, from 0."""
        self._repeat = epoch

    def __iter__(self) -> Iterator[int]:
        order = self._left
        if self._repeat:
            generator = torch.Generator().manual_seed(mixed_seed(self._seed, *REPEAT, self._repeat))
            order = order[torch.randperm(len(order), generator=generator)]
        return iter(order[: self.window].tolist())
