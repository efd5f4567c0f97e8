"""The paper's Oracle: the exact diversity of the whole dataset at the weights at the end of an epoch."""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from divebatch.errors import ArgumentError
from divebatch.estimators.estimator import Estimator, TrainingContext
from divebatch.measurement import Diversity
from divebatch.norms import NormMeter, gradient_diversity
from divebatch.norms.compiled import uncompiled


class Oracle(Estimator):
    """The exact diversity of all data; costs one more forward and backward pass after each measured epoch.

    Batches must be `(inputs, targets)`. Nothing is attached to the model during training. Ranks share the pass. Batches
    whose gradients are not finite are in neither sum.

    Args:
        loss_fn: The loss, called as `loss_fn(model(inputs), targets)`.
        fallback: "vmap" measures layers that have no norm rule, slowly. None: such layers raise an error.
    """

    name = "oracle"

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor], *, fallback: Literal["vmap"] | None = None) -> None:
        if not callable(loss_fn):
            raise ArgumentError(f"loss_fn must be a function of outputs and targets, got loss_fn={loss_fn!r}")
        self._loss_fn, self._fallback = loss_fn, fallback

    def _prepare(self, context: TrainingContext) -> None:
        NormMeter(uncompiled(context.model), fallback=self._fallback)  # not attached: only checks the coverage

    def window(self) -> Diversity:
        """Measure at the current weights, like `finish`, since nothing is attached."""
        return self.finish()

    def finish(self) -> Diversity:
        context = self.context
        return gradient_diversity(
            context.model,
            self._loss_fn,
            context.loader.full_pass(),
            loss_reduction=context.loss_reduction,
            fallback=self._fallback,
            ranks=context.loader.ranks,
            skip_nonfinite=True,
        )
