"""The noise scale of optimizers that go by signs: Adam's."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from divebatch.estimators.gradient_sketch import LONGEST_NORM
from divebatch.estimators.lagged_duals import DualWay, Pairs
from divebatch.estimators.sketch_choice import SketchChoice
from divebatch.estimators.stepwise import Stepwise, require_settings
from divebatch.estimators.successive_steps import SuccessiveSteps
from divebatch.norms.sketch import sum_dtype

STRIDE = 509
"""Of large models one coordinate in so many tells the noise. A prime, so that rows of a matrix are met everywhere."""


class L1(Stepwise):
    """(sum_j s_j)^2 / |G|_1^2, s_j the per-sample s.d. of coordinate j: the noise scale of steps that go by signs.

    An optimizer such as Adam moves each coordinate by about its learning rate, so what a step gains goes by |G|_1 and
    not by ||G||^2 (Naganuma et al. 2026). The plug-in estimate of that ratio is b pi / 2 on pure noise at batch size b,
    and a rule that follows it grows by itself. Here the signs of one gradient are multiplied with the next one, whose
    noise they do not share (`lagged_duals`): on pure noise the estimate says nothing.

    Bias: the noise of a batch's gradient is taken to be normal; heavy tails make the noise, and B, too small. What the
    gradient itself changes from one step to the next counts as noise. Where G_j / s_j is not normal over the
    coordinates, B may be too large by up to pi / 2, and too small by much more, where a few coordinates hold most of
    |G|_1. The interval has both: from above it is narrow only where batches are not small against B. Cost: as
    `moments`, and a second reading of the gradients; under FSDP2 as there, of the shards.

    Args:
        decay: below 1 for an exponential mean over steps; 0.95 looks back some twenty.
        every_steps: makes one estimate in so many steps, or in as few as it takes.
        sketch: whether gradients are kept as sketches or whole; None for sketches where the model is large.
    """

    name = "l1"
    undoes_grad_scale = True
    sees_all_ranks = True
    needs_whole_gradients = False

    def __init__(self, *, decay: float = 1.0, every_steps: int = 1, sketch: bool | None = None) -> None:
        require_settings(preconditioned=False, every_steps=every_steps)
        way = DualWay(self.name, SumOfAbsolutes(1), SumOfAbsolutes(STRIDE), SketchChoice(sketch))
        super().__init__(SuccessiveSteps(way, every_steps=every_steps), decay=decay)


@dataclass(frozen=True, slots=True)
class SumOfAbsolutes:
    """|a|_1 = sum_j |a_j|, which signs reach."""

    stride: int
    """Between the coordinates that tell the noise."""

    noise_factor = math.sqrt(math.pi / 2)
    """One over the mean of |z| for a standard normal z."""

    def takes(self, parameter: Tensor) -> bool:
        """See `DualNorm`."""
        return not parameter.is_complex()

    dual = staticmethod(torch.sign)
    """The function itself: a kernel knows it."""

    def size(self, gradient: Tensor) -> Tensor:
        """See `DualNorm`."""
        parts = gradient.reshape(-1).split(LONGEST_NORM)
        return torch.stack(torch._foreach_norm(parts, 1, dtype=sum_dtype(gradient.dtype))).sum()

    def sample(self, gradient: Tensor, place: int) -> Tensor:
        """See `DualNorm`."""
        entries = gradient.reshape(-1)[-place % self.stride :: self.stride]
        return entries.to(sum_dtype(entries.dtype), copy=True)

    def distance(self, pairs: Pairs, entries_per_sample: float) -> Tensor:
        """See `DualNorm`."""
        return torch.stack([torch.dist(*both, p=1) for both in pairs]).sum(dtype=torch.float64) * entries_per_sample
