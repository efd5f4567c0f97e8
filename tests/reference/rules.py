"""A layer's norms by its rule against a loop over samples."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from divebatch import NormMeter
from reference.per_sample import sq_norms

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def some(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def weighted(outputs: Tensor, factors: Tensor) -> Tensor:
    """A loss whose gradient with respect to the outputs is `factors`."""
    return (outputs * factors).sum()


def metered(layer: nn.Module, x: Any, dy: Tensor, **call: Any) -> Tensor:
    """The squared norms of samples whose output gradients are `dy`; a tuple `x` holds several arguments."""
    with NormMeter(layer, loss_reduction="sum") as meter:
        weighted(layer(*(x if isinstance(x, tuple) else (x,)), **call), dy).backward()
    return meter.per_sample()


def assert_matches_loop(
    layer: nn.Module, x: Tensor, dy: Tensor, *, twin: nn.Module | None = None, rel: float | None = None
) -> None:
    """`twin`: a layer in float64 to loop over, if it is not a copy of `layer`."""
    twin = copy.deepcopy(layer).double() if twin is None else twin
    fast = metered(layer, x, dy)
    assert fast.dtype == dy.dtype
    expected = sq_norms(twin, weighted, x.double() if x.is_floating_point() else x, dy.double())
    torch.testing.assert_close(fast.double(), expected, rtol=rel or TOLERANCE[dy.dtype], atol=0)
