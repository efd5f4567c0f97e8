"""How long a training is: in samples, since the number of its steps changes."""

import math
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class RunLength:
    """The length of a training that the Trainer counts in steps of the first batch size.

    Args:
        first_steps: Optimizer steps at the first batch size.
        samples: The samples that those steps hold.
        epoch_samples: Samples of an epoch; None for a stream that does not tell.
        pass_samples: Samples of one backward pass on all processes.

    >>> RunLength.of(first_steps=5, first_batch_size=6, epoch_samples=20, pass_samples=2).samples  # 6, 6, 6, 2 and 6
    26
    """

    first_steps: int
    samples: int
    epoch_samples: int | None
    pass_samples: int

    @classmethod
    def of(cls, *, first_steps: int, first_batch_size: int, epoch_samples: int | None, pass_samples: int) -> Self:
        """The length that so many steps at the first batch size have; each epoch ends with what is left of it."""
        samples = first_steps * first_batch_size
        if epoch_samples is not None:
            epochs, steps = divmod(first_steps, math.ceil(epoch_samples / first_batch_size))
            samples = epochs * epoch_samples + steps * first_batch_size
        return cls(first_steps, samples, epoch_samples, pass_samples)

    def schedule_place(self, samples: int) -> float:
        """Where a schedule over `first_steps` stands after so many samples: at its end after all of them."""
        return self.first_steps * samples / self.samples

    def epochs(self, samples: int) -> float:
        """How many epochs so many samples are; of a stream that does not tell, how much of the whole training."""
        return samples / (self.epoch_samples or self.samples)

    def passes(self, batch_size: int) -> int:
        """Backward passes of an optimizer step on so many samples."""
        return math.ceil(batch_size / self.pass_samples)

    def passes_left(self, samples: int) -> int:
        """Backward passes until the end of training after so many samples, in this epoch."""
        return math.ceil((self.samples - samples) / self.pass_samples)

    def steps_left(self, samples: int, batch_size: int) -> int:
        """Optimizer steps until the end of training after so many samples, were the batch size to stay."""
        size = self.passes(batch_size) * self.pass_samples
        left = self.samples - samples
        if self.epoch_samples is None:
            return math.ceil(left / size)
        now = min(left, self.epoch_samples - samples % self.epoch_samples)
        epochs, part = divmod(left - now, self.epoch_samples)
        return math.ceil(now / size) + epochs * math.ceil(self.epoch_samples / size) + math.ceil(part / size)
