"""The factor between the gradients of one backward pass and those of its samples' own losses.

The loss of a pass is a mean or a sum over its samples, times the weights of a micro-batch and of this rank's shard,
times a GradScaler's scale. The weight of a micro-batch comes with the loss itself: `LossWeight`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

from torch import Tensor

from divebatch.checks import require_choice
from divebatch.errors import UsageError
from divebatch.norms.passes import current_pass
from divebatch.ranks import RankShard

LossReduction = Literal["mean", "sum"]
LOSS_REDUCTIONS = ("mean", "sum")

PRODUCTS = ("mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__")
"""Names of the torch functions that multiply a loss by its weight."""


class LossWeight(float):
    """The factor for the loss of one micro-batch. A product of a loss with it tells meters when it is differentiated.

    A tensor multiplied by it has a hook, which runs first in its backward pass and notes the weight for that pass. So
    micro-batches may be drawn in any order.

    >>> import torch
    >>> weight, loss = LossWeight(0.25), torch.ones((), requires_grad=True)
    >>> (loss * weight).backward()
    >>> loss.grad, 2 * weight
    (tensor(0.2500), 0.5)
    """

    num_samples: int | None
    """Samples of the micro-batch; None where it is all that the loader delivered last."""

    def __new__(cls, value: float, num_samples: int | None = None) -> Self:
        weight = super().__new__(cls, value)
        weight.num_samples = num_samples
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on a tensor and a weight, called by torch."""
        named = kwargs or {}
        result = func(*map(_plain, args), **{name: _plain(value) for name, value in named.items()})
        if func.__name__ in PRODUCTS:
            next(value for value in (*args, *named.values()) if isinstance(value, LossWeight)).mark(result)
        return result

    def mark(self, loss: Tensor) -> None:
        """Declare that `loss` has been multiplied by this weight already."""
        if loss.requires_grad:
            loss.register_hook(self._arrive)

    def _arrive(self, _: Tensor) -> None:
        """Note the weight: the backward pass has reached the loss."""
        running = current_pass()
        if running.weight is not None and running.weight is not self:
            raise UsageError(
                "one backward pass came through the losses of two micro-batches: call backward() on each of them, "
                "(loss * weight).backward(), and not on their sum"
            )
        running.weight = self


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, LossWeight) else value


class PassScale(NamedTuple):
    """The worth of one backward pass's gradients."""

    factor: float | Tensor
    """Turns a gradient of the pass into a sum of the samples' own, unaveraged gradients; 0 for a pass in no sum."""
    num_samples: int | Tensor
    """Samples that count: none of a dummy's."""


class LossScale:
    """The scale of the losses of a model's backward passes.

    Args:
        reduction: "mean" or "sum" over the samples of a pass.
        rank_shard: gives this rank's samples of the batch delivered last, where there is a loader.
        grad_scaler: the GradScaler that multiplies the losses, if there is one.
    """

    def __init__(
        self,
        reduction: LossReduction = "mean",
        *,
        rank_shard: Callable[[], RankShard] | None = None,
        grad_scaler: Any = None,
    ) -> None:
        require_choice("loss_reduction", reduction, LOSS_REDUCTIONS)
        self.reduction, self.rank_shard, self.grad_scaler = reduction, rank_shard, grad_scaler

    def of_pass(self, weight: LossWeight | None, num_samples: int | Tensor) -> PassScale:
        """Return the scale of a pass over `num_samples` samples whose loss was multiplied by `weight`."""
        of_loss = 1.0 if weight is None else float(weight)
        of_rank = 1.0 if self.rank_shard is None else self.rank_shard().weight_for(self.reduction)
        # A rank's stand-in, or a part of weight zero, is in no sum.
        if not of_rank or not of_loss:
            return PassScale(0.0, 0)
        # A mean over b samples gives each sample's gradient 1/b of its own length.
        factor: float | Tensor = num_samples if self.reduction == "mean" else 1
        if (known := of_loss * of_rank) != 1.0:  # on a GPU each operation on a number is a launch
            factor = factor / known
        if self.grad_scaler is not None:  # a tensor of its own needs no synchronisation
            scale = getattr(self.grad_scaler, "_scale", None)
            factor = factor / (scale if isinstance(scale, Tensor) else float(self.grad_scaler.get_scale()))
        return PassScale(factor, num_samples)

    def of_mean_over_ranks(self) -> float:
        """Return the factor that turns a gradient averaged over ranks, as FSDP2 leaves it, into the batch's sum."""
        assert self.rank_shard is not None
        shard = self.rank_shard()
        return shard.num_samples if self.reduction == "mean" else shard.num_ranks
