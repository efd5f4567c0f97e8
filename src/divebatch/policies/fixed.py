"""The baseline: never change anything."""

from collections.abc import Collection
from dataclasses import dataclass

from divebatch.measurement import Decision, Measurement
from divebatch.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Fixed(Policy):
    """Keep the batch size, as ordinary mini-batch SGD does. Costs nothing and takes no argument.

    >>> Fixed().next(Measurement(epoch=1, batch_size=128, dataset_size=50_000)).batch_size
    128
    """

    decides_within_epochs = True

    def reachable(self, seen: Measurement) -> Collection[int]:
        return (seen.batch_size,)

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=seen.batch_size)
