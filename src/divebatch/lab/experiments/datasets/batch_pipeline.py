"""From stored pixels to what a model sees, one batch at a time: operator by operator, or compiled into few kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from divebatch.lab.experiments.datasets.augment import Transform
from divebatch.lab.training.forward import MOST_VARIANTS

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The stored images and labels a batch is made from, on the device."""

    images: Tensor
    """With their margin."""
    labels: Tensor
    """Of `images`."""
    which: Tensor
    """The batch's places in `images`."""
    index: Tensor
    """The batch's sample numbers."""
    holds_all: bool
    """Whether `images` are all there are, the same for every batch, and not this batch's alone."""


def prepare(fetched: Fetched, plan: Tensor, transform: Transform, normalise: Callable[[Tensor], Tensor]) -> Batch:
    """The batch's images, changed by their rows of `plan` and normalised, and its labels."""
    pixels = transform.apply(fetched.images, fetched.which, plan.index_select(0, fetched.index))
    return normalise(pixels), fetched.labels.index_select(0, fetched.which)


@cache
def _compiled() -> Callable[..., Batch]:
    """One for all loaders of a process: a second one of the same transform and layout takes what is there."""
    import torch._dynamo  # takes a second to import, and only compiled runs need it

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    return torch.compile(prepare, dynamic=False, fullgraph=True)


def prepare_compiled(
    fetched: Fetched, plan: Tensor, transform: Transform, normalise: Callable[[Tensor], Tensor]
) -> Batch:
    """The result of `prepare`, to the last bit or so, in few kernels, which keep places and pixels out of memory.

    The compiler makes code once for a transform, a layout and a store; only the number of samples stays open. It takes
    1 for a constant, so a single sample goes without it.
    """
    if len(fetched.which) == 1:
        return prepare(fetched, plan, transform, normalise)
    of_this_batch = [fetched.which, fetched.index]
    if not fetched.holds_all:
        of_this_batch += [fetched.images, fetched.labels]
    for tensor in of_this_batch:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    with torch.no_grad():  # whatever the caller does: the compiler makes code for either mode
        inputs, targets = _compiled()(fetched, plan, transform, normalise)
    return inputs.detach(), targets.detach()  # what comes out is marked too: a model would be compiled for any size
