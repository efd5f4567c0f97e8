"""The loader that the Trainer iterates over."""

from typing import Any

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError


class TrainerLoader(AdaptiveLoader):
    """An `AdaptiveLoader` that stays where it is when the Trainer tells the epoch, also in the middle of one."""

    def set_epoch(self, epoch: int) -> None:
        """Pass the number on to a dataset that shuffles by it; the loader has counted by itself."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def is_shuffled(theirs: Any) -> bool:
    """Whether the Trainer's loader shuffles; raises for a sampler that does anything but that or go in order."""
    if isinstance(theirs.dataset, IterableDataset):
        return False
    cutting = getattr(theirs.batch_sampler, "batch_sampler", theirs.batch_sampler)  # inside each process's share
    sampler = getattr(cutting, "sampler", cutting)
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == len(theirs.dataset):
        return True
    raise ArgumentError(
        f"the training loader has a {type(sampler).__name__}, which a BatchSizeTrainer would not ask: it takes every "
        f"sample once an epoch, shuffled or in order. Take out what sets the sampler (_get_train_sampler or "
        f"get_train_dataloader), and let the dataset itself repeat or leave out samples"
    )
