"""A plain loop that sets everything that Adam has by hand from the formulas, for a given course of batch sizes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from divebatch import AdaptiveLoader
from reference.per_sample import mean_loss


def set_by_hand(group: dict[str, Any], own: dict[str, Any], k: float, *, schedule: float = 1.0) -> None:
    """Put a parameter group where k times the base batch wants it; `own` is the group at the base."""
    group["lr"] = own["lr"] * schedule * math.sqrt(k)
    group["betas"] = (own["betas"][0] ** k, own["betas"][1] ** k)
    group["eps"] = own["eps"] / math.sqrt(k)
    if own.get("decoupled_weight_decay"):
        group["weight_decay"] = own["weight_decay"] * math.sqrt(k)
    if "momentum_decay" in own:
        group["momentum_decay"] = own["momentum_decay"] * k


def train_by_hand(
    model: nn.Module,
    optimizer: Optimizer,
    loader: AdaptiveLoader,
    sizes: Sequence[int],
    *,
    schedule: Callable[[int], float] = lambda epoch: 1.0,
) -> None:
    """Train an epoch at each size; the first is the base. Batches end with inputs and targets."""
    own, before = [dict(group) for group in optimizer.param_groups], sizes[0]
    for epoch, size in enumerate(sizes):
        for group, mine in zip(optimizer.param_groups, own, strict=True):
            set_by_hand(group, mine, size / sizes[0], schedule=schedule(epoch))
        for state in optimizer.state.values():
            state["step"] /= size / before
        loader.batch_size = before = size
        for *_, x, y in loader:
            optimizer.zero_grad()
            mean_loss(model(x), y).backward()
            optimizer.step()
