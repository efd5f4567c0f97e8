"""The noise scale of optimizers that go by polar factors: Muon's. An experiment."""

import math

import torch
from torch import Tensor

from divebatch.estimators.lagged_duals import DualWay, Pairs
from divebatch.estimators.sketch_choice import SketchChoice
from divebatch.estimators.stepwise import Stepwise, require_settings
from divebatch.estimators.successive_steps import SuccessiveSteps
from divebatch.norms.sketch import sum_dtype

LEAST_EIGENVALUE = 1e-10
"""Of the largest: directions below it are rounding."""


class Nuclear(Stepwise):
    """(sum_l tr C_l^(1/2))^2 / (sum_l |G_l|_*)^2 over the matrices l of the optimizer. An experiment.

    |.|_* is the nuclear norm, the sum of singular values, and C_l the covariance of the rows of a sample's gradient
    (Naganuma et al. 2026). As `L1`, with polar factors in the place of signs; says nothing on pure noise either. The
    noise is the nuclear norm of the difference of two gradients, which is too small for matrices about as wide as high,
    by up to 15 %, and B by up to 28 %. Where batches are small and |G|_* lies in few singular values, B is too small;
    the interval has that. That B is at most pi / 2 times too large is carried over from `L1`, not derived.

    Costs three eigenvalue problems of the shorter side of each matrix and a copy of the matrices: look at few steps.
    Of several optimizers the one with most parameters is measured, which should be Muon. Not for FSDP2: a shard does
    not tell the singular values of its matrix.

    Args:
        decay: below 1 for an exponential mean over steps; 0.95 looks back some twenty.
        every_steps: makes one estimate in so many steps, or in as few as it takes.
        sketch: whether polar factors are kept as sketches or whole; None for sketches where the model is large.
    """

    name = "nuclear"
    undoes_grad_scale = True
    sees_all_ranks = True

    def __init__(self, *, decay: float = 1.0, every_steps: int = 16, sketch: bool | None = None) -> None:
        require_settings(preconditioned=False, every_steps=every_steps)
        norm = SumOfSingularValues()
        way = DualWay(self.name, norm, norm, SketchChoice(sketch))
        super().__init__(SuccessiveSteps(way, every_steps=every_steps), decay=decay)


class SumOfSingularValues:
    """The nuclear norm, which the polar factor (a a')^(-1/2) a reaches."""

    noise_factor = 1.0

    def takes(self, parameter: Tensor) -> bool:
        """See `DualNorm`."""
        return parameter.ndim == 2 and not parameter.is_complex()

    def dual(self, gradient: Tensor) -> Tensor:
        """See `DualNorm`."""
        matrix = _wide(gradient)
        values, vectors = torch.linalg.eigh(_gram(matrix))
        is_there = values > LEAST_EIGENVALUE * values[-1]
        inverse = torch.where(is_there, values.clamp(min=torch.finfo(values.dtype).tiny).rsqrt(), 0.0)
        polar: Tensor = vectors @ (inverse[:, None] * (vectors.mT @ matrix))  # NaN where the gradient has any
        return polar if matrix.shape == gradient.shape else polar.mT

    def size(self, gradient: Tensor) -> Tensor:
        """See `DualNorm`."""
        matrix = _wide(gradient)
        values: Tensor = torch.linalg.eigvalsh(_gram(matrix))
        return torch.where(matrix.isfinite().all(), values.clamp(min=0).sqrt().sum(), math.nan)

    def sample(self, gradient: Tensor, place: int) -> Tensor:
        """See `DualNorm`."""
        return gradient.clone()

    def distance(self, pairs: Pairs, entries_per_sample: float) -> Tensor:
        """See `DualNorm`."""
        return torch.stack([self.size(own - before) for own, before in pairs]).sum(dtype=torch.float64)


def _gram(matrix: Tensor) -> Tensor:
    """The products of its rows. Zeros where not all are finite, for which there are no eigenvalues but an error."""
    products = matrix @ matrix.mT
    return torch.where(products.isfinite().all(), products, 0.0)


def _wide(matrix: Tensor) -> Tensor:
    """With the shorter side first, in a type that eigenvalues are computed in."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    return wide.to(sum_dtype(wide.dtype))
