"""Which batches a training can meet from here on."""

import sys
from collections.abc import Callable, Collection, Hashable
from itertools import islice

from divebatch.checks import require_count, warn_user
from divebatch.controller import Controller
from divebatch.errors import ArgumentError
from divebatch.measurement import Measurement

MOST_SIZES = 16
"""More batch sizes than this are not compiled unasked."""
MANY = 100_000
"""Sizes that are looked at: a policy without a cap, over a stream without an end, has no largest."""


def _same(size: int) -> Hashable:
    return size


def reachable_sizes(control: Controller, *, shape_of: Callable[[int], Hashable] = _same) -> list[int]:
    """Return the loader's batch sizes that the policy can reach, the present one among them, from the smallest on.

    Args:
        control: The controller of the training.
        shape_of: What is compiled for a batch size; of several sizes with the same the smallest is returned.
    """
    loader, unit = control.loader, control._steps.unit
    most = min(loader.dataset_size or sys.maxsize, control._limit.most or sys.maxsize)
    least = max(control.ranks.size, control._measuring.min_batch_size)
    found = control.policy.reachable(_start(control, most))
    sizes = {min(max(least, min(size, most) // unit), most) for size in islice(found, MANY)} | {loader.batch_size}
    shapes = {shape_of(size): size for size in sorted(sizes, reverse=True)}
    _require_few(control, len(shapes), len(found))
    return sorted(shapes.values())


def shapes_to_meet(control: Controller) -> dict[int, set[int]]:
    """Return the samples of every batch that the loader can deliver, each with the batch sizes at which it comes.

    Where the data is no multiple of a batch, the last one of an epoch is shorter.
    """
    loader = control.loader
    cuts: dict[int, set[int]] = {}
    if loader.delivery_size is not None:  # whatever the batch size is
        now = loader.batch_size
        cuts[loader.delivery_size] = {now, max(now, control.policy.cap or loader.dataset_size or now)}
    else:
        cuts = {size: {size} for size in reachable_sizes(control)}
    shapes = dict(cuts)
    for cut, sizes in cuts.items():
        if rest := _rest(control, cut):
            shapes[rest] = shapes.get(rest, set()) | sizes
    if control._every_steps is not None and not loader.drop_last and loader.delivery_size is None:
        warn_user(
            f"with every_steps={control._every_steps} the batch size changes within epochs, so that an epoch's last "
            f"batch may have any number of samples, for which no code is ready: pass drop_last=True to the loader"
        )
    return dict(sorted(shapes.items()))


def named_shapes(control: Controller, sizes: Collection[int]) -> dict[int, set[int]]:
    """Return the sizes that a user names, as `shapes_to_meet` does."""
    if not isinstance(sizes, Collection):
        raise ArgumentError(f"sizes must be a list of batch sizes, got sizes={sizes!r}")
    most = control.loader.dataset_size or sys.maxsize
    for size in sizes:
        require_count("sizes", size)
        if size > most:
            raise ArgumentError(f"sizes has {size}, and an epoch has {most} samples: no batch has more, leave it out")
    if not sizes:
        raise ArgumentError("sizes is empty: name batch sizes, or leave it out for all that the policy can reach")
    return {size: {size} for size in sorted(set(sizes))}


def _start(control: Controller, most: int) -> Measurement:
    return Measurement(
        epoch=control.epoch + 1,
        batch_size=control._steps.batch_size,
        first_batch_size=control._rates.first_batch_size,
        dataset_size=control.loader.dataset_size,
        largest_batch_size=most,
    )


def _rest(control: Controller, cut: int) -> int:
    """Samples of the last batch of an epoch where they are fewer than `cut`; 0 where none is shorter, or known."""
    loader = control.loader
    return 0 if loader.drop_last or loader.dataset_size is None else loader.dataset_size % cut


def _require_few(control: Controller, num_shapes: int, num_sizes: int) -> None:
    if num_shapes <= MOST_SIZES:
        return
    name = type(control.policy).__name__
    raise ArgumentError(
        f"{name} can reach {num_sizes} batch sizes, and each would be compiled. Make them few: Doublings({name}(...)) "
        f"or Rounded({name}(...), multiple_of=...) from divebatch.policies; or let the loader deliver parts of one "
        f"size, AdaptiveLoader(..., delivery_size=...), and add up their gradients; or name those to be ready for, "
        f"warm_shapes(..., sizes=[...])"
    )
