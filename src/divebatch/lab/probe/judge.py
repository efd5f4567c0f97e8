"""What branches are compared by, and in which unit it is told. No torch in here."""

from dataclasses import dataclass
from typing import Any

from divebatch.checks import require_choice
from divebatch.metric import Metric

JUDGES = ("train", "validation", "metric")


@dataclass(frozen=True, slots=True)
class Judge:
    """What branches are compared by.

    Args:
        kind: "train" for the smoothed training loss, "validation" for the held-out loss at a branch's end, "metric" for
            what the run is judged by there. Lower must be better, so an accuracy becomes the share of wrong answers.
        metric: What the run is judged by: a loss is told in its unit.
    """

    kind: str
    metric: Metric

    def __post_init__(self) -> None:
        require_choice("judge", self.kind, JUDGES)

    @property
    def is_held_out(self) -> bool:
        """Whether held-out data decides."""
        return self.kind != "train"

    @property
    def word(self) -> str:
        """What its numbers are."""
        return "wrong answers" if self._counts_errors else self.metric.loss_word

    def of_loss(self, loss: float) -> float:
        """A training loss in the unit of the run's metric."""
        return loss * self.metric.loss_factor

    def of(self, seen: Any) -> float:
        """What the `Evaluation` of held-out data is worth; lower is better."""
        return 1 - seen.accuracy if self._counts_errors else self.of_loss(seen.loss)

    @property
    def _counts_errors(self) -> bool:
        return self.kind == "metric" and self.metric.is_accuracy
