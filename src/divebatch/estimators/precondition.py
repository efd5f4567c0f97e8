"""Gradients as an Adam-like optimizer sees them: each coordinate over the root of its running second moment."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adadelta, Optimizer

from divebatch.errors import ArgumentError
from divebatch.norms.accumulators import addend

SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")
"""Where torch's optimizers keep it: AMSGrad, Adam and its kin, RMSprop. The first there is counts."""
CORRECTED = "betas"
"""Optimizers with these correct the running mean for its start at zero."""


class Preconditioner:
    """1 / (sqrt(v) + eps) for each parameter, v the optimizer's second moment, corrected as the optimizer does."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        require_second_moment(optimizer)
        self._optimizer, self._parameters = optimizer, parameters
        groups = ((p, group) for group in optimizer.param_groups for p in group["params"])
        self._groups: dict[Tensor, dict[str, Any]] = dict(groups)

    def scales(self) -> dict[str, Tensor] | None:
        """By parameter name; None before the optimizer's first step, when there is no second moment yet."""
        found = {name: self._scale(p) for name, p in self._parameters.items()}
        scales = {name: scale for name, scale in found.items() if scale is not None}
        return scales or None

    def _scale(self, parameter: nn.Parameter) -> Tensor | None:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        key = next((key for key in SECOND_MOMENTS if key in state), None)
        if key is None:
            if state:
                raise ArgumentError(
                    f"{type(self._optimizer).__name__} keeps no running second moment (it has {', '.join(state)}): "
                    f"preconditioned=True is for Adam, AdamW, RMSprop and their kin"
                )
            return None
        group = self._groups[parameter]
        moment: Tensor = state[key].detach()
        if CORRECTED in group:
            moment = moment / (1 - group[CORRECTED][1] ** torch.as_tensor(state["step"], device=moment.device))
        return (moment.sqrt() + float(group["eps"])).reciprocal()


def rescaled(gradients: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Coordinate by coordinate. A parameter that the optimizer has not moved yet has no scale and is left out."""
    return {name: addend(g, scales[name]) * scales[name] for name, g in gradients.items() if name in scales}


def require_second_moment(optimizer: Optimizer) -> None:
    """Raise for an optimizer that divides by nothing."""
    if "eps" not in optimizer.defaults or optimizer.defaults.get("centered") or isinstance(optimizer, Adadelta):
        raise ArgumentError(
            f"preconditioned=True is for optimizers that divide by the root of a running second moment (Adam, AdamW, "
            f"RMSprop without centering), got {type(optimizer).__name__}"
        )
