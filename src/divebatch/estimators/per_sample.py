"""An unbiased estimate from each step's per-sample norms."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from torch.nn.modules.batchnorm import _BatchNorm

from divebatch.checks import require_choice
from divebatch.errors import ArgumentError, CoverageError
from divebatch.estimators.average import AveragedEstimator, PairAverage, StepEstimate, unbiased
from divebatch.estimators.estimator import TrainingContext, meter_of
from divebatch.norms.compiled import is_compiled
from divebatch.norms.meter import MODES, PassSums
from divebatch.norms.registry import cover
from divebatch.norms.sharded import is_sharded


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    """Return weight, tr(Sigma) and ||G||^2.

    The values are the sum of ||g_i||^2, ||sum of g_i||^2, samples, and whether all gradients are finite.
    """
    total, of_sum, size, is_finite = values
    if not is_finite:
        return size, math.nan, math.nan
    if size < 2:  # one sample shows no scatter
        return 0.0, 0.0, 0.0
    return (size, *unbiased(total, of_sum / size**2, size, size))


class PerSample(AveragedEstimator):
    """An estimator that compares the gradients of single samples, for each backward pass at its own weights.

    Bias: none. Cost: norms within the normal backward passes, and one copy of the trainable parameters. Of all
    estimators from single steps this one has the least scatter, since a batch of b counts as b chunks. BatchNorm in
    training mode raises an error, since samples then have no gradients of their own: use `split` or `moments`.

    Args:
        decay: Below 1 for an exponential mean over steps; 0.95 looks back some twenty steps.
        preconditioned: Not possible here: the error names the estimators that support it.
        mode: "exact" norms, or "sketch" for unbiased estimates of them at a fraction of the time.
        compiled: Whether the model is compiled with `torch.compile`.
        fallback: "vmap" measures layers that have no norm rule, slowly. None: such layers raise an error.
        grad_scaler: The `torch.amp.GradScaler` that multiplies the losses. None: there is none.
    """

    name = "per-sample"
    nothing_seen = (
        "the epoch has ended, but no backward pass of two or more samples was seen in it. If each pass has one sample, "
        "or is inside compiled code, pass another estimator, such as 'moments'"
    )

    def __init__(
        self,
        *,
        decay: float = 1.0,
        preconditioned: bool = False,
        mode: Literal["exact", "sketch"] = "exact",
        compiled: bool = False,
        fallback: Literal["vmap"] | None = None,
        grad_scaler: Any = None,
    ) -> None:
        if preconditioned:
            raise ArgumentError(
                "per-sample norms come from factors of each layer's gradient, which cannot be divided coordinate by "
                "coordinate: use Split(preconditioned=True) or Moments(preconditioned=True)"
            )
        require_choice("mode", mode, MODES)
        super().__init__(decay=decay)
        self._settings = {"mode": mode, "compiled": compiled, "fallback": fallback, "grad_scaler": grad_scaler}

    def _prepare(self, context: TrainingContext) -> None:
        self.min_batch_size = context.loader.ranks.size + 1  # one rank must have two samples to compare
        self._meter = meter_of(context, on_pass=self._take, **self._settings)
        self._batch_norms = {name: m for name, m in context.model.named_modules() if isinstance(m, _BatchNorm)}

    def _attach(self, context: TrainingContext, average: PairAverage) -> None:
        self._meter.attach()

    def _detach(self) -> None:
        self._meter.detach()

    def _take(self, seen: PassSums) -> None:
        for name, module in self._batch_norms.items():
            if module.training:
                raise CoverageError(
                    f"'{name}' ({type(module).__name__}) is in training mode: samples have no gradients of their own. "
                    f"Use estimator='split' or 'moments'"
                )
        average = self._at_work()
        average.num_samples = average.num_samples + seen.num_samples
        is_finite = 1.0 if seen.is_finite is None else seen.is_finite
        parts = (seen.sum_of_sq_norms, seen.sq_norm_of_sum, seen.num_samples, is_finite)
        average.add_step(StepEstimate(parts, _numbers))


def suits_per_sample(context: TrainingContext, batch_size: int) -> bool:
    """Return whether samples have their own gradients, every layer has a rule, and each pass more than one sample."""
    model = context.model
    if batch_size <= context.loader.ranks.size or is_compiled(model) or any(map(is_sharded, model.parameters())):
        return False
    if any(isinstance(each, _BatchNorm) for each in model.modules()):
        return False
    try:
        cover(model)
    except CoverageError:
        return False
    return True
