"""What a policy is."""

from typing import ClassVar, Protocol

from divebatch.measurement import Decision, Measurement


class Policy(Protocol):
    """A frozen configuration plus one pure method. State lives elsewhere; equal inputs give equal decisions.

    A new policy is one file in this folder and one row in `catalog.py`. Its `repr` is compared when a checkpoint is
    loaded, so it must show every setting (a frozen dataclass does).
    """

    lr_coupling: ClassVar[str | None] = None
    """How the learning rate must follow the batch size for the rule to be what it says; None where any will do."""
    estimator: ClassVar[str | None] = None
    """Which one the controller takes where it is given none; None for its own default."""
    decides_within_epochs: ClassVar[bool] = False
    """Whether `next` makes sense every so many steps. Not where it counts epochs, or reads an epoch's loss or speed."""

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Measurement` and `History` that `next` reads and that cost something: nothing else is measured."""
        ...

    def next(self, seen: Measurement) -> Decision:
        """The batch size to use from now on."""
        ...

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Whether `epoch` (from 1), run at `batch_size`, must be measured. Unmeasured epochs cost nothing."""
        return True

    def check_start(self, batch_size: int) -> None:
        """Raise if training cannot start at `batch_size`."""
        return None
