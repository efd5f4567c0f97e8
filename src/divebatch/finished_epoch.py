"""The epoch that has just ended, as the loader knows it."""

from divebatch.data.loader import AdaptiveLoader
from divebatch.data.order import EpochProgress


def finished_epoch(loader: AdaptiveLoader, epoch: int) -> EpochProgress:
    """Return the pass that ended after so many complete epochs, or an error where it is not the one that is due."""
    return loader.finished_pass(since=epoch)


def loss_of_all_ranks(loader: AdaptiveLoader, loss: float | None, finished: EpochProgress) -> float | None:
    """Return the mean training loss over the samples of all ranks that told one."""
    if loader.ranks.is_alone:
        return loss
    return loader.ranks.mean(loss, finished.local_samples if loss is not None else 0)
