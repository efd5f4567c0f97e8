"""The paper's estimate: sums over the epoch's trajectory."""

import math
from dataclasses import replace
from typing import Any, Literal

from divebatch.checks import require_choice
from divebatch.errors import UsageError
from divebatch.estimators.estimator import Estimator, TrainingContext, meter_of
from divebatch.measurement import Diversity
from divebatch.norms.accumulators import are_finite
from divebatch.norms.meter import MODES
from divebatch.norms.sharded import is_sharded


class Trajectory(Estimator):
    """Delta-hat of the paper's Definition 2: each sample's gradient at the weights of its own step in the epoch.

    Cost: the norms within the normal backward passes, and one copy of the trainable parameters for the gradient sum.
    Bias: the weights move during the epoch, so gradients of early and late steps cancel. The estimate is then
    too large, often tenfold or more. This is the paper's rule, not an estimate at fixed weights.

    Backward passes whose gradients are not finite are in neither sum. If these are more than half of the samples, or
    the weights are not finite at the end of the epoch, training has diverged, and the diversity is undefined.

    Args:
        mode: "exact" norms, or "sketch" for unbiased estimates of them at a fraction of the time.
        compiled: Whether the model is compiled with `torch.compile`.
        fallback: "vmap" measures layers that have no norm rule, slowly. None: such layers raise an error.
        grad_scaler: The `torch.amp.GradScaler` that multiplies the losses. None: there is none.
    """

    name = "trajectory"
    at_fixed_weights = False
    works_on_shards = True
    has_window = False

    def __init__(
        self,
        *,
        mode: Literal["exact", "sketch"] = "exact",
        compiled: bool = False,
        fallback: Literal["vmap"] | None = None,
        grad_scaler: Any = None,
    ) -> None:
        require_choice("mode", mode, MODES)
        self._settings = {"mode": mode, "compiled": compiled, "fallback": fallback, "grad_scaler": grad_scaler}

    def _prepare(self, context: TrainingContext) -> None:
        self._meter = meter_of(context, ranks=context.loader.ranks, **self._settings)

    @property
    def replay_token(self) -> object:
        """A value that changes when replayed backward passes would add to outdated sums."""
        return self._meter.token

    def start(self) -> None:
        self._meter.attach()

    def finish(self) -> Diversity:
        context, meter = self.context, self._meter
        diversity = meter.diversity()
        if diversity.num_samples + diversity.skipped_samples == 0:
            raise UsageError("the epoch has ended, but no backward pass through the model was seen in it")
        meter.detach()
        # Sharded weights need no check: FSDP2's gradients are all in the sums, and bad weights spoil them.
        weights = [p.detach() for p in context.model.parameters() if not is_sharded(p)]
        has_diverged = weights and not are_finite(weights)
        return replace(diversity, sq_norm_of_sum=math.nan) if has_diverged else diversity

    def close(self) -> None:
        if self._context is not None:
            self._meter.detach()

    def state_dict(self) -> dict[str, Any]:
        return self._meter.state_dict() if self._meter.is_attached else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._meter.load_state_dict(state)
