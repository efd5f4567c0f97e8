"""The epoch that has just ended, as the loader knows it."""

from divebatch.data.epoch_progress import EpochProgress
from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import UsageError


def finished_epoch(loader: AdaptiveLoader, epoch: int) -> EpochProgress:
    """Return the pass that ended after so many complete epochs, or an error where it is not the one that is due."""
    finished = loader._finished_pass(since=epoch)
    if finished.epoch != epoch:
        raise UsageError(
            f"step() must be called once after each epoch: {finished.epoch + 1 - epoch} epochs have ended "
            f"since the last call. A complete pass for evaluation counts as one: use loader.full_pass() instead"
        )
    return finished


def loss_of_all_ranks(loader: AdaptiveLoader, loss: float | None, finished: EpochProgress) -> float | None:
    """Return the mean training loss over the samples of all ranks that told one."""
    if loader.ranks.is_alone:
        return loss
    return loader.ranks.mean(loss, finished.local_samples if loss is not None else 0)
