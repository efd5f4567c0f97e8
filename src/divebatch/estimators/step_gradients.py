"""The gradients of one optimizer step, as an estimate takes them: unscaled, and divided as Adam does."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from divebatch.estimators.second_moment import Preconditioner, divided


class StepGradients:
    """Yields (name, gradient), one at a time, so that whoever reads them need not hold them all; times `scale`.

    Args:
        gradients: As the optimizer's step finds them, by parameter name.
        scale: What makes them the mean over the batch's samples.
        grad_scale: What a GradScaler left them multiplied with.
        preconditioner: Divides them; parameters that the optimizer has not moved yet are left out.
        offsets: Where a gradient is a shard of its parameter's, laid out one after the other: the number of its first
            entry there.
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
        """What divides each; None where nothing does."""
        known = gradients if self.moments is None else self.moments
        self.gradients = {name: gradient for name, gradient in gradients.items() if name in known}
        # A division takes gradients as the optimizer will square them, so their own scale must go before.
        self.scale = scale / grad_scale if self.moments is None else scale
        """What is left to multiply by."""
        self.unscale = 1 / grad_scale
        """What a division must multiply by before."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing: before an optimizer's first step nothing divides."""
        return not self.gradients

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, gradient in self.gradients.items():
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            yield name, dense if self.moments is None else divided(dense, self.moments[name], self.unscale)
