"""The loader that the Trainer iterates over."""

from divebatch.data.loader import AdaptiveLoader


class TrainerLoader(AdaptiveLoader):
    """An `AdaptiveLoader` that stays where it is when the Trainer tells the epoch, also in the middle of one."""

    def set_epoch(self, epoch: int) -> None:
        """Pass the number on to a dataset that shuffles by it; the loader has counted by itself."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
