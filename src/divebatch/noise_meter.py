"""The gradient noise scale in any training loop, from the optimizer or from the gradients of each step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from torch import nn
from torch.optim import SGD, Optimizer

from divebatch.checks import require_count, warn_user
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators.average import PairAverage
from divebatch.estimators.moments import SuccessiveGradients, extrapolation, require_settings
from divebatch.estimators.step_hooks import before_step, is_recorded


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """A reading of the noise scale with its 95 % interval, in samples.

    >>> print(NoiseScale(812.4, 640.1, 990.2, steps=100))
    noise scale 812 (640-990) samples

    Args:
        value: The estimate. NaN: the noise hides the gradient, or the steps were too few.
        low: The lower end; 0 if there is no lower bound, as without momentum.
        high: The upper end; infinite if the gradient cannot be distinguished from zero.
        steps: Optimizer steps since the previous reading.
    """

    value: float
    low: float
    high: float
    steps: int

    def known(self) -> dict[str, float]:
        """Return those of `noise_scale`, `noise_scale_low` and `noise_scale_high` that are finite, for loggers."""
        values = {"noise_scale": self.value, "noise_scale_low": self.low, "noise_scale_high": self.high}
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def __str__(self) -> str:
        if math.isnan(self.value) or self.high == math.inf:
            # Without an upper end, ||G||^2 cannot be distinguished from zero, and the value may be anything.
            return f"noise scale at least {self.low:.0f} samples" if self.low > 0 else "noise scale not known"
        if self.low == 0:
            return f"noise scale at most {self.high:.0f} samples"
        return f"noise scale {self.value:.0f} ({self.low:.0f}-{self.high:.0f}) samples"


class NoiseMeter:
    """A meter of the gradient noise scale tr(Sigma) / ||G||^2 for any training loop.

        meter = NoiseMeter(optimizer)
        ...
        print(meter.read(batch_size=256))  # every few hundred steps: noise scale 812 (640-990) samples

    The meter compares the gradients of successive optimizer steps, as the estimator `moments` does (see
    `estimators.Moments`). Large models' gradients are kept as sketches, in at most 1 % of the parameters' memory.
    Nothing changes in training, and only `read` waits for the device.

    The meter sees only steps. Accumulated gradients count as one step, and a step that a GradScaler skips counts as
    none. Gradients are read as `optimizer.step()` finds them. So under DDP they are averaged, and `batch_size` must
    be that of all processes together; after clipping they are clipped. The loss may be a mean or a sum if all steps
    between two readings have the same number of samples. A step inside compiled code cannot be seen.

    Under FSDP2 each process holds shards of gradients, and `read` adds the numbers of all processes. So all processes
    must read after the same steps; one that reads alone waits until the process group's timeout.

    If the momentum is too low (below 0.4; Nesterov's below 0.87), only an upper bound is known: `low` is then 0.

    Without a torch optimizer, call `NoiseMeter(momentum=0.9).observe(parameters)` before each update.

    Args:
        optimizer: The optimizer to watch, whose parameters' gradients are measured. None: `observe` sees each step.
        preconditioned: Whether to measure gradients as an Adam-like optimizer sees them: divided by the root of its
            second moment.
        every_steps: Compare gradients once every N steps, or at the smallest interval that works.
        sketch: Whether to keep gradients as sketches or whole. None: sketches if the model is large.
        momentum: The momentum of your own update (for an Adam-like one: beta1), if there is no torch optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        *,
        preconditioned: bool = False,
        every_steps: int = 1,
        sketch: bool | None = None,
        momentum: float = 0.0,
    ) -> None:
        if optimizer is None and preconditioned:
            raise ArgumentError("preconditioned=True divides by an optimizer's second moment: pass the torch optimizer")
        if optimizer is not None and momentum:
            raise ArgumentError(f"the optimizer's own momentum counts: leave momentum={momentum} out")
        self._is_told, self._is_closed = optimizer is None, False
        # Without an optimizer, a dummy that never steps holds the momentum and, from `observe` on, the parameters.
        self._momentum = momentum
        self._optimizer = _unwrapped(optimizer) if optimizer is not None else self._stand_in([nn.Parameter()])
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
            whose, way = (
                ("your own update", "If it has momentum, pass it: NoiseMeter(momentum=0.9)")
                if self._is_told
                else (
                    type(self._optimizer).__name__,
                    "Give the optimizer momentum, or use a Controller with estimator='split' or 'per-sample'",
                )
            )
            warn_user(
                f"NoiseMeter can only say how large the noise scale is at most: {whose} has a momentum below 0.4 "
                f"(Nesterov's below 0.87), and the interval goes down to zero. {way}"
            )
        self._handle = None if self._is_told else before_step(self._optimizer, self._on_step)

    def observe(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take in the gradients of a step that no torch optimizer makes; call this right before your own update.

        Args:
            parameters: The parameters that the update changes, with their gradients; the same at each step.
        """
        self._require_open()
        if not self._is_told:
            raise UsageError("this meter watches an optimizer and sees its steps: leave observe() out")
        trained = [p for p in parameters if p.requires_grad]
        if not trained:
            raise ArgumentError(
                "observe() got no parameter that is trained: pass model.parameters() itself at each step, or a list; "
                "an iterator yields them only once"
            )
        if list(map(id, trained)) != list(map(id, self._parameters.values())):
            self._optimizer = self._stand_in(trained)
        self._on_step()

    def read(self, batch_size: int) -> NoiseScale:
        """Return the noise scale over the steps since the last reading, or since the meter was made.

        This waits for the device, and under FSDP2 for the other processes, which must read too. All steps between two
        readings should have the same number of samples.

        Args:
            batch_size: Samples of an optimizer step, over all processes and accumulated passes.
        """
        require_count("batch_size", batch_size)
        self._require_open()
        if not self._steps and self._is_told:
            raise UsageError(
                "no gradient was seen since the last reading: call meter.observe(parameters) before each update, while "
                "the gradients are there"
            )
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
        """Stop watching and free the memory. No reading is possible afterwards."""
        if not self._is_closed:
            if self._handle is not None:
                self._handle.remove()
            del self._gradients
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError("this meter is closed: make a new one")

    def _stand_in(self, parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.0, momentum=self._momentum)

    def _reading(self, batch_size: int) -> NoiseScale:
        average = self._average
        found = average.unknown() if average.is_empty else average.diversity()
        low, high = (batch_size * end for end in found.noise_scale_interval())
        value = batch_size * found.noise_scale if found.is_defined else math.nan
        return NoiseScale(value, low, high, self._steps)

    def _begin(self) -> None:
        """Start comparing the gradients of the optimizer's current parameters."""
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
        # Each step counts as one sample, so the noise scale comes out in batches.
        self._steps += self._gradients.add(self._optimizer, 1)


def _unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer inside the wrappers of Lightning and Accelerate."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    return optimizer
