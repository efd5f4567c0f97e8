"""The gradients of a step without a GradScaler's scale, and divided by the root of Adam's second moment."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adadelta, Optimizer

from divebatch.errors import ArgumentError
from divebatch.norms.accumulators import addend
from divebatch.norms.sharded import local
from divebatch.norms.sketch import sum_dtype

LARGEST_MOMENT = "max_exp_avg_sq"
"""The key under which AMSGrad keeps the largest second moment so far, by which it divides."""
SECOND_MOMENTS = ("exp_avg_sq", "square_avg")
"""The keys under which torch's optimizers keep the second moment: Adam and its variants, RMSprop."""
CORRECTED = "betas"
"""A setting that only optimizers have that correct the running mean for its start at zero."""


@dataclass(frozen=True, slots=True)
class SecondMoment:
    """An optimizer's second moment of one parameter before a step."""

    mean: Tensor
    """The running mean of squares."""
    largest: Tensor | None
    """The largest mean so far, kept by AMSGrad."""
    step: Tensor
    """Steps so far, on the device where the optimizer counts them."""
    decay: float
    """The fraction of the mean that the step keeps."""
    eps: float
    is_corrected: bool


class Preconditioner:
    """The divisor of an optimizer's gradients: sqrt(v) + eps, with v its second moment and the optimizer's correction.

    `divided` uses the v of the coming step, which includes the gradient's own square. Otherwise rarely used coordinates
    (embeddings of rare tokens) would be divided by almost nothing and dominate the noise. `scales` uses the v before
    the step, for chunks of a batch, which must all have the same divisor.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        require_second_moment(optimizer)
        self._optimizer, self._parameters = optimizer, parameters

    def moments(self) -> dict[str, SecondMoment]:
        """Return the second moments by parameter name; parameters that were never updated have none."""
        # Looked up each time, since loading a state replaces the groups.
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        found = ((name, self._moment(p, groups.get(id(p)))) for name, p in self._parameters.items())
        return {name: moment for name, moment in found if moment is not None}

    def scales(self) -> dict[str, Tensor] | None:
        """Compute 1 / (sqrt(v) + eps) by parameter name; None before the optimizer's first step."""
        scales = {
            name: _divisor_from(_summed(each.mean).clone(), each, 0).reciprocal_()
            for name, each in self.moments().items()
        }
        return scales or None

    def _moment(self, parameter: nn.Parameter, group: Mapping[str, Any] | None) -> SecondMoment | None:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        if not state or group is None:
            return None
        key = next((key for key in SECOND_MOMENTS if key in state), None)
        if key is None:
            raise ArgumentError(
                f"{type(self._optimizer).__name__} keeps no running second moment (it has {', '.join(state)}): "
                f"preconditioned=True is for Adam, AdamW, RMSprop and their kin"
            )
        is_corrected = CORRECTED in group
        decay = float(group[CORRECTED][1] if is_corrected else group["alpha"])
        largest = _real(state[LARGEST_MOMENT]) if LARGEST_MOMENT in state else None
        step = torch.as_tensor(state["step"])
        return SecondMoment(_real(state[key]), largest, step, decay, float(group["eps"]), is_corrected)


class StepGradients:
    """Pairs (name, gradient) of one step, times `scale`; produced one at a time, so that a reader need not hold all.

    Args:
        gradients: The gradients as the optimizer's step finds them, by parameter name.
        scale: The factor that makes them the mean over the batch's samples.
        grad_scale: The remaining scale of a GradScaler.
        preconditioner: The divisor of the gradients; parameters that were never updated are left out.
        offsets: The number of the first entry of each gradient that is a shard of its parameter's.
    """

    def __init__(
        self,
        gradients: Mapping[str, Tensor],
        *,
        scale: float = 1.0,
        grad_scale: float = 1.0,
        preconditioner: Preconditioner | None = None,
        offsets: Mapping[str, int] | None = None,
    ) -> None:
        self.offsets = offsets or {}
        self.moments = None if preconditioner is None else preconditioner.moments()
        """The second moments that divide; None if there is no division."""
        self.gradients = gradients
        if self.moments is not None:
            self.gradients = {name: each for name, each in gradients.items() if name in self.moments}
        # The optimizer squares unscaled gradients, so the scale is removed before the division.
        self.scale = scale / grad_scale if self.moments is None else scale
        """The factor that remains to be applied."""
        self.unscale = 1 / grad_scale
        """The factor applied before a division."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, gradient in self.gradients.items():
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            yield name, dense if self.moments is None else divided(dense, self.moments[name], self.unscale)


def divided(gradient: Tensor, moment: SecondMoment, scale: float) -> Tensor:
    """Divide `scale` times the gradient; `scale` removes a GradScaler's, so that squares are the optimizer's."""
    return _by_parts(gradient, partial(_divided, moment=moment, scale=scale))


def _divided(gradient: Tensor, moment: SecondMoment, scale: float) -> Tensor:
    before = _summed(moment.mean)
    gradient = addend(gradient, before)
    gradient = gradient if scale == 1.0 else gradient * scale
    divisor = _divisor_from(gradient.square().lerp_(before, moment.decay), moment, 1)
    return torch.div(gradient, divisor, out=divisor)


def _divisor_from(mean: Tensor, moment: SecondMoment, steps_more: int) -> Tensor:
    """Compute the divisor in some steps, if `mean` is the second moment then; overwrites `mean`."""
    if moment.largest is not None:
        torch.maximum(mean, moment.largest.to(mean.dtype), out=mean)
    if moment.is_corrected:
        # Adam's own correction: its running mean starts at zero and is too small at first.
        mean.div_(1 - moment.decay ** (moment.step.to(mean) + steps_more))
    return mean.sqrt_().add_(moment.eps)


def rescaled(gradients: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply gradients by scales, leaving out parameters that were never updated."""
    return {
        name: _by_parts(gradient, partial(_multiplied, scale=scales[name]))
        for name, gradient in gradients.items()
        if name in scales
    }


def _multiplied(gradient: Tensor, scale: Tensor) -> Tensor:
    return addend(gradient, scale) * scale


def _by_parts(gradient: Tensor, divide: Callable[[Tensor], Tensor]) -> Tensor:
    """Divide real and imaginary parts separately, as torch's optimizers do."""
    return torch.view_as_complex(divide(_real(gradient))) if gradient.is_complex() else divide(gradient)


def _real(tensor: Tensor) -> Tensor:
    held = local(tensor)
    return torch.view_as_real(held) if held.is_complex() else held


def _summed(tensor: Tensor) -> Tensor:
    return tensor.to(sum_dtype(tensor.dtype))


def require_second_moment(optimizer: Optimizer) -> None:
    """Raise if the optimizer does not divide by a running second moment."""
    if "eps" not in optimizer.defaults or optimizer.defaults.get("centered") or isinstance(optimizer, Adadelta):
        raise ArgumentError(
            f"preconditioned=True is for optimizers that divide by the root of a running second moment (Adam, AdamW, "
            f"RMSprop without centering), got {type(optimizer).__name__}"
        )
