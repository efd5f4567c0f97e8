"""The factor between a backward pass's gradients and those of its samples' own losses.

The loss of a pass is a mean or a sum over its samples, times the weights of a micro-batch and of this rank's shard,
times a GradScaler's scale. The weight of a micro-batch is a `LossWeight`, which the loss itself passes on.
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
    """The factor for the loss of one micro-batch; meters learn this factor when the weighted loss is differentiated.

    A tensor multiplied by the weight has a hook, which runs first in its backward pass and records the weight. So
    micro-batches may be drawn in any order.

    >>> import torch
    >>> weight, loss = LossWeight(0.25), torch.ones((), requires_grad=True)
    >>> (loss * weight).backward()
    >>> loss.grad, 2 * weight
    (tensor(0.2500), 0.5)
    """

    num_samples: int | None
    """Samples of the micro-batch; None: all samples that the loader delivered last."""

    def __new__(cls, value: float, num_samples: int | None = None) -> Self:
        weight = super().__new__(cls, value)
        weight.num_samples = num_samples
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function on a tensor and a weight; torch calls this method."""
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
        """Record the weight when the backward pass has reached the loss."""
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
    """The scale of one backward pass's gradients."""

    factor: float | Tensor
    """The factor that turns the pass's gradient into a sum of the samples' own gradients; 0 for a pass to ignore."""
    num_samples: int | Tensor
    """The number of samples that count; dummies do not."""


class LossScale:
    """The scale of the losses in a model's backward passes.

    Args:
        reduction: "mean" or "sum" over the samples of a pass.
        rank_shard: A function that returns this rank's samples of the latest batch, if there is a loader.
        grad_scaler: The GradScaler that multiplies the losses. None: there is none.
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
        # A rank's dummy, or a part of weight zero, is in no sum.
        if not of_rank or not of_loss:
            return PassScale(0.0, 0)
        # In a mean over b samples, each sample's gradient has 1/b of its own length.
        factor: float | Tensor = num_samples if self.reduction == "mean" else 1
        if (known := of_loss * of_rank) != 1.0:  # on a GPU each operation on a number is a launch
            factor = factor / known
        if self.grad_scaler is not None:  # a separate tensor needs no synchronisation
            scale = getattr(self.grad_scaler, "_scale", None)
            factor = factor / (scale if isinstance(scale, Tensor) else float(self.grad_scaler.get_scale()))
        return PassScale(factor, num_samples)

    def of_mean_over_ranks(self) -> float:
        """Return the factor that turns a gradient averaged over ranks, as in FSDP2, into the batch's sum."""
        assert self.rank_shard is not None
        shard = self.rank_shard()
        return shard.num_samples if self.reduction == "mean" else shard.num_ranks
