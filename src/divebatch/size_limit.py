"""The batch size that memory allows, once a larger one has failed."""

from dataclasses import dataclass, replace

from divebatch.measurement import Decision


@dataclass(slots=True)
class SizeLimit:
    """No limit until a batch did not fit; from then on decisions stay below it, and the next one says why.

    Args:
        most: The most samples of a batch; None while every size has fitted.
        is_news: Whether no decision has told of it yet.
    """

    most: int | None = None
    is_news: bool = False

    def set(self, most: int) -> None:
        """Allow batches of so many samples at most."""
        self.most, self.is_news = most, True

    def applied(self, decision: Decision) -> Decision:
        """Return the decision within the limit; its reason tells of it where it matters, and once where it is new."""
        if self.most is None or (decision.batch_size <= self.most and not self.is_news):
            return decision
        reason = f"{decision.reason}; at most {self.most}: larger batches did not fit into memory".lstrip("; ")
        return replace(decision, batch_size=min(decision.batch_size, self.most), reason=reason)
