"""A batch in several backward passes: any batch size in the memory of a small one."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from divebatch.checks import require_choice, require_count
from divebatch.errors import ArgumentError
from divebatch.norms.share import part_of_batch

LOSS_REDUCTIONS = ("mean", "sum")


def micro_batches(batch: Any, size: int, *, loss_reduction: str = "mean") -> Iterator[tuple[Any, float]]:
    """Cut `batch` into parts of at most `size` samples, each with the factor for its loss.

    Multiply each part's loss by its factor and call `backward()` within the loop: the gradients add up to those of one
    backward pass over the whole batch. For a loss that is a mean over samples the factor is the part's share of the
    batch; for a sum it is 1. Meters and controllers know of the cut, so measured norms stay right. `batch` is a tensor
    or any nesting of tuples, lists and mappings (dicts, Hugging Face's BatchEncoding) of tensors with the batch
    dimension first; what is no tensor is passed on to every part, and mappings come out as dicts. BatchNorm sees one
    part at a time: its statistics are those of `size` samples, not of the batch.

    >>> import torch
    >>> x, w = torch.arange(5.0), torch.ones((), requires_grad=True)
    >>> for part, factor in micro_batches(x, 2):
    ...     ((w * part).mean() * factor).backward()
    >>> w.grad == x.mean()
    tensor(True)
    """
    require_count("size", size)
    require_choice("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
    num_samples = batch_length(batch)
    for start in range(0, num_samples, size):
        stop = min(start + size, num_samples)
        share = (stop - start) / num_samples if loss_reduction == "mean" else 1.0
        with part_of_batch(share):
            yield (batch if stop - start == num_samples else cut(batch, start, stop)), share


def batch_length(batch: Any) -> int:
    """Samples in a batch: the first dimension that all its tensors share."""
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
    """The samples from `start` to before `stop`."""
    if isinstance(batch, Tensor):
        return batch[start:stop]
    if isinstance(batch, Mapping):
        return {key: cut(value, start, stop) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [cut(value, start, stop) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
