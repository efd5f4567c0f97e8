"""The samples of measured backward passes against those that a loader delivered: more of the former is an error."""

from collections.abc import Callable

from torch import Tensor

from divebatch.errors import CoverageError


class Deliveries:
    """Knows how many samples came to this rank since measuring began.

    Args:
        delivered: gives how many came so far; None where there is no loader and every pass is as meant.
    """

    def __init__(self, delivered: Callable[[], int] | None) -> None:
        self._delivered = delivered
        self.begin()

    def begin(self) -> None:
        """Measuring begins."""
        self._before = self._delivered() if self._delivered is not None else 0
        self._seen = 0

    def count(self, num_samples: int | Tensor) -> None:
        """A measured pass is over. What is on the device is not looked at here, which would wait for it."""
        if isinstance(num_samples, int):
            self._seen += num_samples
            self.require(self._seen)

    def require(self, seen: int) -> None:
        """Raise if so many samples cannot have come from the loader."""
        if self._delivered is None:
            return
        delivered = self._delivered() - self._before
        # Fewer are right: loops skip batches, and frameworks ask for the next one early.
        if seen > delivered:
            raise CoverageError(
                f"{seen} samples went through measured backward passes, but the loader delivered {delivered}: a batch "
                f"had a second backward pass (one for each of several losses, an attack, a generator's loss through "
                f"this model, a closure that runs again), or the model sees more entries than samples (several views "
                f"of each, time steps merged into the batch)",
                "call backward() once a batch, on the sum of its losses",
            )
