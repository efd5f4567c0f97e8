"""Where a loader stands: the passes that are over, and the one under way."""

from typing import Any

from divebatch.data.epoch_progress import EpochProgress, not_finished
from divebatch.errors import ArgumentError


class Passes:
    """Counts complete passes over the data, and what they held. A pass that was left early does not count."""

    def __init__(self) -> None:
        self.epoch = 0
        """Complete passes so far."""
        self.current: EpochProgress | None = None
        """The pass that began last, until it is closed."""
        self.finished: EpochProgress | None = None
        """The pass that was closed last."""
        self.is_resumed = False
        """Whether `current` comes from a state and nobody has asked for its batches yet."""
        self._batches_before, self._samples_before = 0, 0

    @property
    def batches(self) -> int:
        """Batches of all passes, the one under way included."""
        return self._batches_before + (self.current.batches if self.current else 0)

    @property
    def samples(self) -> int:
        """Samples of all passes, the one under way included."""
        return self._samples_before + (self.current.samples if self.current else 0)

    @property
    def under_way(self) -> EpochProgress | None:
        """The pass whose iterator is neither used up nor left."""
        return self.current if self.current is not None and (self.current.is_open or self.is_resumed) else None

    @property
    def is_at_end(self) -> bool:
        """Whether no batch is left of the pass under way, or none is under way."""
        return self.current is None or self.current.is_used_up

    @property
    def is_untouched(self) -> bool:
        """Whether a pass has begun that has delivered nothing yet."""
        return self.current is not None and self.current.batches == 0

    @property
    def has_begun(self) -> bool:
        """Whether a pass has delivered something and is not closed."""
        return self.current is not None and self.current.batches > 0

    def jump(self, epoch: int) -> None:
        """Make `epoch` (from 0) the next one, from its beginning."""
        self.epoch, self.current, self.is_resumed = epoch, None, False

    def close(self, current: EpochProgress) -> None:
        """The pass is over: its counts become final."""
        if current.batches == 0:
            raise ArgumentError(
                f"epoch {current.epoch + 1} had no batch of {current.batch_size} samples: "
                f"the stream is empty, or shorter than one batch with drop_last=True"
            )
        current.end()
        self._batches_before += current.batches
        self._samples_before += current.samples
        self.epoch, self.current, self.finished = current.epoch + 1, None, current

    def close_if_used_up(self) -> None:
        """A loop that counts batches stops at the last one, before the iterator could say that it is."""
        if self.current is not None and not self.is_resumed and self.current.is_used_up:
            self.close(self.current)

    def has_finished(self, *, since: int) -> bool:
        """Whether a pass has ended whose epoch is `since` (from 0) or later."""
        return self.finished is not None and self.finished.epoch >= since

    def finished_since(self, epoch: int) -> EpochProgress:
        """The last pass that has ended, if its epoch is `epoch` (from 0) or later; else an error says how far it is."""
        if self.current is not None and self.current.is_used_up:
            self.close(self.current)
        if self.finished is None or self.finished.epoch < epoch:
            raise not_finished(self.current)
        return self.finished

    def state_dict(self, *, with_order: bool) -> dict[str, Any]:
        """All counts; `with_order` where the order of the pass under way cannot be drawn again."""
        return {
            "epoch": self.epoch,
            "batches_before": self._batches_before,
            "samples_before": self._samples_before,
            "pass": self.current.state_dict(with_order=with_order) if self.current and self.has_begun else None,
        }

    def load_counts(self, state: dict[str, Any]) -> None:
        """Take over all counts but the pass under way, which is the loader's to make."""
        self.epoch, self.current, self.finished = state["epoch"], None, None
        self._batches_before, self._samples_before = state["batches_before"], state["samples_before"]
        self.is_resumed = state["pass"] is not None
