"""Noise on the weights after each optimizer step (SGLD)."""

import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from divebatch.data.order import checked_seed, mixed_seed
from divebatch.errors import ArgumentError
from divebatch.estimators.optimizer_events import scale_of_gradients
from divebatch.norms.sharded import is_sharded
from divebatch.state_checks import same, table, whole

DRAWS = 0x53474C44
"""Keeps these draws apart from others that are made from the same seed."""


class LangevinNoise:
    """Adds to each weight, after each step of an optimizer, one normal draw of variance 2 * lr * temperature.

    With plain SGD that is stochastic gradient Langevin dynamics (Welling and Teh 2011): weights wander as if drawn from
    exp(-loss / temperature), up to the noise of the gradients and the length of the steps. `lr` is the one in force in
    each parameter group. One draw a step is enough: noise on each sample's gradient has the same law.

    The draws depend on (seed, step) alone, so all ranks draw alike and keep equal weights. Steps inside recorded or
    compiled code are seen by no hook and get no noise.

    The noise is on the weights and not on the gradients, so estimators that look at one step at a time (`split`,
    `per-sample`, `ranks`, `oracle`) need no correction: at the weights where they look they see the data alone.
    `moments` compares gradients of successive steps, between which the noise moves the weights. With v = 2 * lr *
    temperature * tr(H^2), b the batch size and H the Hessian, tr(Sigma) comes out too large by b * v / 2 where it
    compares pairs, and too small by (1 / m - 1) * b * v where momentum m lets it extrapolate: little, to first order.
    `trajectory` adds up gradients along the way, and the noise makes that way longer, as a higher rate would.

    Args:
        optimizer: Whose steps are followed by noise; with as many parameter groups as you like.
        temperature: The temperature, in units of the loss; 0 adds nothing.
        seed: Decides on the draws.
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
        """Steps that were followed by noise."""
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def close(self) -> None:
        """Add no noise from here on."""
        self._handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if not math.isfinite(scale_of_gradients(optimizer)):  # a GradScaler's overflow: no step was made
            return
        generators: dict[torch.device, torch.Generator] = {}
        for group in optimizer.param_groups:
            deviation = (2 * torch.as_tensor(group["lr"]) * self.temperature) ** 0.5
            for parameter in group["params"]:
                if parameter.grad is not None:  # others are left alone by the step, too
                    parameter.add_(self._draw(parameter, generators) * deviation.to(parameter))
        self.steps += 1

    def _draw(self, parameter: Tensor, generators: dict[torch.device, torch.Generator]) -> Tensor:
        if is_sharded(parameter):
            raise ArgumentError("LangevinNoise needs whole parameters, and FSDP2 has sharded these: use DDP")
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(mixed_seed(self.seed, DRAWS, self.steps))
        return torch.randn(parameter.shape, generator=generators[device], device=device, dtype=parameter.dtype)

    def state_dict(self) -> dict[str, Any]:
        """What the draws to come depend on."""
        return {"seed": self.seed, "temperature": self.temperature, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw from here on what the saved one would have drawn."""
        fields = {"seed": whole(at_most=None), "temperature": same(self.temperature), "steps": whole()}
        table(fields)("LangevinNoise", state)
        self.seed, self.steps = state["seed"], state["steps"]
