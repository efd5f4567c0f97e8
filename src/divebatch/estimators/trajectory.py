"""The paper's estimate: sums along the epoch's trajectory."""

import math
from dataclasses import replace
from typing import Any, Literal

from divebatch.checks import require_choice
from divebatch.errors import UsageError
from divebatch.estimators.estimator import Estimator, TrainingContext
from divebatch.measurement import Diversity
from divebatch.norms import DiversityMeter
from divebatch.norms.accumulators import are_finite
from divebatch.norms.meter import MODES
from divebatch.norms.sharded import is_sharded


class Trajectory(Estimator):
    """Delta-hat of the paper's Definition 2: each sample's gradient at the weights it met during the epoch.

    Cost: the norms within the normal backward passes, and one copy of the trainable parameters for the gradient sum.
    Bias: the weights move while the sums grow, gradients of early and late steps cancel, and the estimate comes out
    too large, often tenfold and more. It is the paper's rule, not an estimate at fixed weights.

    A backward pass whose gradients are not finite is in neither sum: a loop may skip a batch. Training has diverged,
    and the diversity is undefined, where that is more than half of the samples, or the weights are not finite when the
    epoch ends.

    Args:
        mode: "exact" norms, or "sketch" for unbiased estimates of them at a fraction of the time.
        compiled: Whether the model is compiled with `torch.compile`.
        fallback: "vmap" measures layers that have no norm rule, slowly; None raises an error that names them.
        grad_scaler: The `torch.amp.GradScaler` that multiplies the losses, where there is one.
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
        self._settings: dict[str, Any] = {
            "mode": mode,
            "compiled": compiled,
            "fallback": fallback,
            "grad_scaler": grad_scaler,
        }
        self._meter: DiversityMeter | None = None
        self._context: TrainingContext | None = None

    def bind(self, context: TrainingContext) -> None:
        if self._meter is not None:
            raise UsageError("this estimator belongs to another controller already: make one for each")
        self._context = context
        self._meter = DiversityMeter(
            context.model,
            ranks=context.loader.ranks,
            rank_shard=lambda: context.loader.rank_shard,
            delivered=lambda: context.loader.local_samples_delivered,
            loss_reduction=context.loss_reduction,
            skip_nonfinite=True,
            **self._settings,
        )

    @property
    def replay_token(self) -> object:
        """A recorded backward pass adds to the right sums for as long as this is the same."""
        return self._bound().token

    def start(self) -> None:
        self._bound().attach()

    def finish(self) -> Diversity:
        meter = self._bound()
        diversity = meter.diversity()
        if diversity.num_samples + diversity.skipped_samples == 0:
            raise UsageError("the epoch has ended, but no backward pass through the model was seen in it")
        meter.detach()
        return diversity if self._has_finite_weights() else replace(diversity, sq_norm_of_sum=math.nan)

    def _has_finite_weights(self) -> bool:
        assert self._context is not None
        # Sharded ones need no look: FSDP2's gradients are all in the sums, and those of such weights are not finite.
        whole = [p.detach() for p in self._context.model.parameters() if not is_sharded(p)]
        return not whole or bool(are_finite(whole))

    def close(self) -> None:
        if self._meter is not None:
            self._meter.detach()

    def state_dict(self) -> dict[str, Any]:
        return self._bound().state_dict() if self._bound().is_attached else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._bound().load_state_dict(state)

    def _bound(self) -> DiversityMeter:
        if self._meter is None:
            raise UsageError("this estimator belongs to no controller yet: bind() comes first")
        return self._meter
