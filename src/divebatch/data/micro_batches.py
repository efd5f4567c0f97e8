"""Large batches in several backward passes, with the memory of a small batch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from divebatch.checks import require_choice, require_count
from divebatch.errors import ArgumentError
from divebatch.norms.loss_scale import LOSS_REDUCTIONS, LossReduction, LossWeight
from divebatch.ranks import RankShard


def micro_batches(batch: Any, size: int, *, loss_reduction: LossReduction = "mean") -> Iterator[tuple[Any, LossWeight]]:
    """Cut `batch` into micro-batches of at most `size` samples, each with the weight for its loss.

    Multiply each micro-batch's loss by its weight and call `backward()`: the gradients add up to those of one backward
    pass over the whole batch. The product also passes the weight, a float, to meters and controllers; a measured pass
    without the weight raises an error. BatchNorm's statistics are those of a micro-batch.

    Args:
        batch: A tensor, or any nesting of tuples, lists and mappings (dicts, Hugging Face's BatchEncoding) of tensors
            with the batch dimension first. Other objects go to every micro-batch; mappings become dicts.
        size: The most samples in a micro-batch; the last one may have fewer.
        loss_reduction: How your loss is reduced over its samples. For a "mean" the weight is the micro-batch's fraction
            of the batch, for a "sum" 1.

    >>> import torch
    >>> x, w = torch.arange(5.0), torch.ones((), requires_grad=True)
    >>> for part, weight in micro_batches(x, 2):
    ...     ((w * part).mean() * weight).backward()
    >>> w.grad == x.mean()
    tensor(True)
    """
    require_count("size", size)
    require_choice("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
    num_samples = batch_length(batch)
    for start in range(0, num_samples, size):
        stop = min(start + size, num_samples)
        weight = LossWeight((stop - start) / num_samples if loss_reduction == "mean" else 1.0, stop - start)
        yield (batch if stop - start == num_samples else cut(batch, start, stop)), weight


def batch_length(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension that all its tensors share."""
    lengths = {len(tensor) if tensor.ndim else None for tensor in _tensors(batch)}
    if len(lengths) != 1 or None in lengths:
        found = ", ".join(sorted(map(str, lengths))) or "no tensor"
        raise ArgumentError(f"the tensors of a batch must have one and the same first dimension, found: {found}")
    return int(next(iter(lengths)) or 0)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def cut(batch: Any, start: int, stop: int) -> Any:
    """Return the samples from `start` up to, not including, `stop`."""
    if isinstance(batch, Tensor):
        return batch[start:stop]
    if isinstance(batch, Mapping):
        return {key: cut(value, start, stop) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [cut(value, start, stop) for value in batch]
        # A namedtuple takes its fields one by one.
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


# Plans


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A controller's instructions for the latest batch; the defaults are for a loop without a controller.

    Args:
        measuring: Whether an estimator measures this batch.
        min_micro_batches: The fewest backward passes for the batch; some estimators compare the passes.
        replay_token: A recorded backward pass may be replayed while this stays equal. None: each pass needs Python.
        batch_size: Samples of a full batch on this rank. None: this batch counts as full.
        rank_shard: This rank's samples of the batch. None: there is no controller.
        see_replay: Receives the gradients of a replayed pass, which no hook sees, by the parameters' names, and the
            weight of its loss.
    """

    measuring: bool = False
    min_micro_batches: int = 1
    replay_token: object = True
    batch_size: int | None = None
    rank_shard: RankShard | None = None
    see_replay: Callable[[Mapping[str, Tensor], LossWeight], None] = lambda gradients, weight: None
