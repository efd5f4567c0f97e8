"""What one backward pass is worth: the factor between its gradients and those of its samples' own losses.

The loss of a pass is a mean or a sum over its samples, times the weight of a micro-batch, times the weight of this
rank's shard, times a GradScaler's scale. `LossScale` knows the reduction, the shard and the scaler. The weight of a
micro-batch comes with the loss itself: `LossWeight`.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from divebatch.checks import require_choice
from divebatch.errors import UsageError
from divebatch.ranks import RankShard

LossReduction = Literal["mean", "sum"]
LOSS_REDUCTIONS = ("mean", "sum")

PRODUCTS = ("mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__")
"""Names of the torch functions that multiply a loss by its weight."""

NUM_REMEMBERED = 16
"""Passes whose weights are kept: the one under way, with room for threads that run others at the same time."""

# Both are of the process, since `micro_batches` is a function that knows no model and a GPU's backward pass runs in a
# thread of its own. The first is keyed by autograd's number of the pass, which no other pass gets.
_of_pass: dict[int, "LossWeight"] = {}
_unused: "weakref.WeakValueDictionary[int, LossWeight]" = weakref.WeakValueDictionary()


class LossWeight(float):
    """The factor for the loss of one micro-batch. A product of a loss with it tells meters when it is differentiated.

    It is a number like any other, except that a tensor multiplied by it has a hook, which runs first in its backward
    pass and notes the weight for that pass. So it does not matter when and in what order micro-batches are drawn.

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
        """Called by torch for each operation on a tensor and a weight."""
        named = kwargs or {}
        result = func(*map(_plain, args), **{name: _plain(value) for name, value in named.items()})
        if func.__name__ in PRODUCTS:
            next(value for value in (*args, *named.values()) if isinstance(value, LossWeight)).mark(result)
        return result

    def mark(self, loss: Tensor) -> None:
        """Say that `loss` has been multiplied by this weight already."""
        if loss.requires_grad:
            loss.register_hook(self._arrive)

    def expect_use(self) -> None:
        """From here on a measured pass over as many samples without a weight is an error: it forgot this one."""
        if self != 1.0 and torch.is_grad_enabled():  # not where a batch is cut for evaluation
            _unused[id(self)] = self

    def _arrive(self, _: Tensor) -> None:
        """The backward pass has reached the loss."""
        _unused.pop(id(self), None)
        task = torch._C._current_graph_task_id()
        if _of_pass.setdefault(task, self) is not self:
            raise UsageError(
                "one backward pass came through the losses of two micro-batches: call backward() on each of them, "
                "(loss * weight).backward(), and not on their sum"
            )
        if len(_of_pass) > NUM_REMEMBERED:
            del _of_pass[next(iter(_of_pass))]


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, LossWeight) else value


def weight_of_pass(task: int) -> LossWeight | None:
    """The weight of the backward pass that autograd gave this number; None if its loss was multiplied by none."""
    return _of_pass.get(task)


@dataclass(frozen=True, slots=True)
class PassScale:
    """What the gradients of one backward pass are worth."""

    factor: float | Tensor
    """Turns a gradient of the pass into a sum of the samples' own, unaveraged gradients; 0 where it counts not."""
    num_samples: int | Tensor
    """Samples that count: none of a dummy's."""


class LossScale:
    """Knows how the losses of a model's backward passes are scaled.

    Args:
        reduction: "mean" or "sum" over the samples of a pass.
        rank_shard: gives this rank's samples of the batch under way, where ranks train together.
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
        self.reduction, self._rank_shard, self.grad_scaler = reduction, rank_shard, grad_scaler

    def of_pass(self, weight: LossWeight | None, num_samples: int | Tensor) -> PassScale:
        """The scale of a pass over `num_samples` samples whose loss was multiplied by `weight`."""
        if weight is None and _unused:
            _require_none_forgotten(num_samples)
        of_loss = 1.0 if weight is None else float(weight)
        of_rank = 1.0 if self._rank_shard is None else self._rank_shard().weight_for(self.reduction)
        # A rank's stand-in, or a part of weight zero: it is in no sum, and nothing may be divided by its weight.
        if not of_rank or not of_loss:
            return PassScale(0.0, 0)
        # A mean over b samples gives each sample's gradient 1/b of its own length.
        factor: float | Tensor = num_samples if self.reduction == "mean" else 1
        if (known := of_loss * of_rank) != 1.0:  # on a GPU each operation on a number is a launch
            factor = factor / known
        if self.grad_scaler is not None:
            factor = factor / _scale_of(self.grad_scaler)
        return PassScale(factor, num_samples)

    def of_mean_over_ranks(self) -> float:
        """Turns a gradient averaged over ranks, as FSDP2 leaves it, into the sum over the batch's samples."""
        assert self._rank_shard is not None
        shard = self._rank_shard()
        return shard.num_samples if self.reduction == "mean" else shard.num_ranks

    @property
    def knows_rank_shard(self) -> bool:
        """Whether there is a loader to tell how ranks divide a batch."""
        return self._rank_shard is not None


def _require_none_forgotten(num_samples: int | Tensor) -> None:
    """A compiled pass has its samples on the device, where looking would wait: any weight counts for it."""
    sizes = [weight.num_samples for weight in list(_unused.values())]
    size = sizes[0] if isinstance(num_samples, Tensor) else num_samples
    if size in sizes:
        raise UsageError(
            f"a measured backward pass has no weight, but that of a micro-batch of {size} samples was not used: "
            f"multiply the loss of each part by its own weight, (loss_fn(model(x), y) * weight).backward(), and not by "
            f"a number made from it; where you drew micro-batches for something else, do so under torch.no_grad()"
        )


def _scale_of(grad_scaler: Any) -> float | Tensor:
    """What the scaler multiplies losses with now; its tensor where it has one, which needs no synchronisation."""
    scale = getattr(grad_scaler, "_scale", None)
    return scale if isinstance(scale, Tensor) else float(grad_scaler.get_scale())
