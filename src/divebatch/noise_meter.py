"""The gradient noise scale in any training loop: all it needs is the optimizer."""

import math
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from divebatch.checks import require_count, warn_user
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators.average import PairAverage
from divebatch.estimators.moments import SuccessiveGradients, extrapolation, require_settings
from divebatch.estimators.step_hooks import before_step, is_recorded


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """A reading: the noise scale and its 95 % interval, all in samples.

    >>> print(NoiseScale(812.4, 640.1, 990.2, steps=100))
    noise scale 812 (640-990) samples

    Args:
        value: The estimate; NaN where the noise hides the gradient or the steps were too few.
        low: The lower end; 0 where nothing bounds it from below, as without momentum.
        high: The upper end; infinite where the gradient cannot be told from zero.
        steps: Optimizer steps since the reading before.
    """

    value: float
    low: float
    high: float
    steps: int

    def __str__(self) -> str:
        if math.isnan(self.value) or self.high == math.inf:
            # Without an upper end ||G||^2 cannot be told from zero, and the value may be anything.
            return f"noise scale at least {self.low:.0f} samples" if self.low > 0 else "noise scale not known"
        if self.low == 0:
            return f"noise scale at most {self.high:.0f} samples"
        return f"noise scale {self.value:.0f} ({self.low:.0f}-{self.high:.0f}) samples"


class NoiseMeter:
    """Tells the gradient noise scale tr(Sigma) / ||G||^2 of a training, whatever its loop looks like.

        meter = NoiseMeter(optimizer)
        ...
        print(meter.read(batch_size=256))  # every few hundred steps: noise scale 812 (640-990) samples

    It compares the gradients of successive optimizer steps, as the estimator `moments` does (`estimators.Moments` tells
    how exact that is), and keeps sketches of large models' gradients: at most 1 % of the parameters' memory. It changes
    nothing and waits for the device only in `read`.

    It sees steps and nothing else: accumulated gradients are those of one step, and a step that a GradScaler skips is
    none. Gradients are read as `optimizer.step()` finds them: under DDP averaged, so that `batch_size` is that of all
    processes together; with clipping before the step, clipped. Whether the loss is a mean or a sum does not matter as
    long as all steps since the last reading have equally many samples. A step inside compiled code is seen by nobody.

    Under FSDP2 a process holds shards of gradients, and `read` adds its numbers to the others': all processes must read
    after the same steps. One that reads alone waits for the others until the process group's timeout.

    With too little momentum (below 0.4; Nesterov's below 0.87) only an upper bound can be told: `low` is then 0.

    Args:
        optimizer: The optimizer whose steps are watched, and whose parameters' gradients are measured.
        preconditioned: Whether to measure gradients as an Adam-like optimizer sees them: divided by the root of its
            second moment.
        every_steps: Compares gradients once in so many steps, or in as few as it takes; the others cost nothing.
        sketch: Whether gradients are kept as sketches or whole; None for sketches where the model is large.
    """

    def __init__(
        self, optimizer: Optimizer, *, preconditioned: bool = False, every_steps: int = 1, sketch: bool | None = None
    ) -> None:
        self._optimizer = _unwrapped(optimizer)
        require_settings(preconditioned, sketch, None)
        require_count("every_steps", every_steps)
        self._settings: dict[str, Any] = {
            "preconditioned": preconditioned,
            "every_steps": every_steps,
            "sketch": sketch,
        }
        # The weights move between the compared steps, and that bias can carry ||G||^2 below zero.
        self._average = PairAverage(trusts_negative=False)
        self._steps = 0
        self._begin()
        if not self._average.bounds_below:
            warn_user(
                f"NoiseMeter can only say how large the noise scale is at most: {type(self._optimizer).__name__} has a "
                f"momentum below 0.4 (Nesterov's below 0.87), and the interval goes down to zero. Give the optimizer "
                f"momentum, or use a Controller with estimator='split' or 'per-sample'"
            )
        self._handle: Any = before_step(self._optimizer, self._on_step)

    def read(self, batch_size: int) -> NoiseScale:
        """Return the noise scale over the steps since the last reading, or since the meter was made.

        Waits for the device, and under FSDP2 for the other processes, which must read too. All these steps should have
        had equally many samples; between readings their number may change.

        Args:
            batch_size: Samples of an optimizer step, those of all processes and accumulated passes together.
        """
        require_count("batch_size", batch_size)
        if self._handle is None:
            raise UsageError("this meter is closed: make a new one")
        if not self._steps:
            raise UsageError(
                f"no step of this {type(self._optimizer).__name__} was seen since the last reading: read after steps, "
                f"and leave optimizer.step() out of torch.compile and CUDA graphs, where no hook sees it"
            )
        reading = self._reading(batch_size)
        self._average.forget()
        self._average.bounds_below = extrapolation(self._optimizer) > 0
        self._steps = 0
        return reading

    def close(self) -> None:
        """Stop watching and free the memory. Nothing can be read any more."""
        if self._handle is not None:
            self._handle.remove()
            del self._gradients
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reading(self, batch_size: int) -> NoiseScale:
        average = self._average
        found = average.unknown() if average.is_empty else average.diversity()
        low, high = (batch_size * end for end in found.noise_scale_interval())
        value = batch_size * found.noise_scale if found.is_defined else math.nan
        return NoiseScale(value, low, high, self._steps)

    def _begin(self) -> None:
        """Compare what follows, for the parameters that the optimizer has now."""
        self._parameters = self._trained()
        if not self._parameters:
            raise ArgumentError(f"{type(self._optimizer).__name__} has no parameter that is trained: all are frozen")
        self._gradients = SuccessiveGradients(self._parameters, self._optimizer, self._average, **self._settings)

    def _trained(self) -> dict[str, nn.Parameter]:
        every = (p for group in self._optimizer.param_groups for p in group["params"])
        return {str(number): p for number, p in enumerate(every) if p.requires_grad}

    def _on_step(self) -> None:
        if list(map(id, self._trained().values())) != list(map(id, self._parameters.values())):
            self._begin()  # parameters were added, frozen or unfrozen
        if is_recorded(next(iter(self._parameters.values()))):
            return
        # Steps count as one sample each, so the noise scale comes out in batches.
        self._steps += self._gradients.add(self._optimizer, 1)


def _unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer inside those that Lightning and Accelerate put around it; raises for what is none."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    return optimizer
