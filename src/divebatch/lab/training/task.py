"""What a model is trained for: its loss, and how held-out data judges it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from divebatch.metric import Metric


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a model is worth on held-out data.

    Args:
        loss: The mean loss.
        accuracy: The fraction of targets that were predicted right, from 0 to 1; None where a task has none.
        bits_per_byte: The bits that the model needs for a byte; None where targets are no bytes.
    """

    loss: float
    accuracy: float | None = None
    bits_per_byte: float | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """How much held-out data was judged.

    Args:
        samples: Entries of the batch dimension.
        targets: Numbers in their targets; several a sample where each position has its own.
    """

    samples: int
    targets: int


class Task(ABC):
    """A loss to train with, and a judgement of held-out data in two halves: sums of batches, then what they mean.

    A new one is a file in `lab/experiments/tasks/` and a row in its registry.
    """

    metrics: ClassVar[tuple[Metric, ...]]
    """What its runs may be judged by; the first where an experiment names none."""

    # Static: a method of an object would be another function in each run, and be compiled again for each.
    @staticmethod
    @abstractmethod
    def loss_fn(outputs: Any, targets: Any) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def judge(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return sums over a batch, in float64 and left on the device: reading each batch's would wait for it."""

    @abstractmethod
    def conclude(self, sums: Sequence[float], counts: Counts) -> Evaluation:
        """Return what the sums over all batches, of all ranks, amount to."""
