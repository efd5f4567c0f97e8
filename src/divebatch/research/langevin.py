"""Noise on the weights after each optimizer step (SGLD)."""

import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from divebatch.data.order import checked_seed, mixed_seed
from divebatch.errors import ArgumentError, CheckpointError

DRAWS = 0x53474C44
"""A number that separates these draws from others with the same seed."""


class LangevinNoise:
    """Normal noise of variance 2 * lr * temperature on each weight, after each step of an optimizer.

    With plain SGD this is stochastic gradient Langevin dynamics (Welling and Teh 2011): weights wander as if drawn from
    exp(-loss / temperature), up to gradient noise and step length. `lr` is the learning rate of the step, in each
    parameter group. One draw a step is enough, because noise on each sample's gradient has the same distribution.

    The draws depend only on (seed, step), so all ranks draw alike and keep equal weights. Steps inside recorded or
    compiled code call no hook and get no noise.

    The noise is on the weights, not on the gradients, so estimators that look at one step at a time (`split`,
    `per-sample`, `ranks`, `oracle`) see only the data. `moments` compares gradients of successive steps, between which
    the noise moves the weights. Let v = 2 * lr * temperature * tr(H^2), with batch size b and Hessian H. To first
    order, tr(Sigma) is too large by b * v if `moments` compares pairs. If momentum m lets `moments` extrapolate,
    tr(Sigma) is too small by (1 / m - 1) * b * v. `trajectory` sums gradients along the path, which the noise makes
    longer.

    Args:
        optimizer: The optimizer whose steps are followed by noise; any number of parameter groups.
        temperature: The temperature, in units of the loss; 0 adds no noise.
        seed: The seed of the draws.
    """

    def __init__(self, optimizer: Optimizer, *, temperature: float, seed: int = 0) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
            raise ArgumentError(
                f"temperature must be a finite number of at least 0, got temperature={temperature!r}: "
                f"it is a variance over twice the learning rate"
            )
        self.temperature, self.seed = temperature, checked_seed(seed)
        self.steps = 0
        """Number of steps that were followed by noise."""
        self._handle = optimizer.register_step_post_hook(self._after_step)
        # First of all hooks: a controller's hook restores the schedule's own rate after the step.
        optimizer._optimizer_step_post_hooks.move_to_end(self._handle.id, last=False)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Stop adding noise."""
        self._handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:  # a GradScaler's overflow: no step was made
            return
        generators: dict[torch.device, torch.Generator] = {}
        for group in optimizer.param_groups:
            deviation = (2 * torch.as_tensor(group["lr"]) * self.temperature) ** 0.5
            for parameter in group["params"]:
                if parameter.grad is not None:  # the step leaves the others unchanged, too
                    parameter.add_(self._draw(parameter, generators) * deviation.to(parameter))
        self.steps += 1

    def _draw(self, parameter: Tensor, generators: dict[torch.device, torch.Generator]) -> Tensor:
        if hasattr(parameter, "full_tensor"):  # a DTensor of FSDP2
            raise ArgumentError("LangevinNoise needs whole parameters, and FSDP2 has sharded these: use DDP")
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(mixed_seed(self.seed, DRAWS, self.steps))
        return torch.randn(parameter.shape, generator=generators[device], device=device, dtype=parameter.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the next draws."""
        return {"seed": self.seed, "temperature": self.temperature, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the draws of a saved state."""
        if state["temperature"] != self.temperature:
            raise CheckpointError(
                f"LangevinNoise.temperature is {state['temperature']} in the checkpoint, and {self.temperature} here"
            )
        self.seed, self.steps = state["seed"], state["steps"]
