"""What must hold of the parts that a controller is given."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from divebatch.checks import require_count
from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError
from divebatch.estimators import Estimator
from divebatch.estimators.catalog import names_where
from divebatch.policies import Policy
from divebatch.policies.policy import require_policy


def require_step_cadence(every_steps: int, policy: Policy, loader: AdaptiveLoader, estimator: Estimator | None) -> None:
    """Raise unless policy, loader and estimator can do with a part of an epoch."""
    require_count("every_steps", every_steps)
    if not policy.decides_within_epochs:
        raise ArgumentError(
            f"{type(policy).__name__} decides after whole epochs, by their number, loss or speed: leave "
            f"every_steps={every_steps} out. A policy of your own may say decides_within_epochs = True"
        )
    if not loader.can_resize:
        raise ArgumentError(
            f"every_steps={every_steps} needs data whose order is known: a stream keeps its batch size for an epoch"
        )
    if estimator is not None and not estimator.has_window:
        raise ArgumentError(
            f"{type(estimator).__name__} sums over whole epochs and cannot serve every_steps={every_steps}: "
            f"use one of the estimators {names_where(lambda kind: kind.has_window)}"
        )
    if estimator is not None and every_steps < (least := estimator.min_steps_between_decisions):
        raise ArgumentError(
            f"every_steps={every_steps} leaves a decision less than two estimates of {type(estimator).__name__}, and "
            f"one has no spread: take every_steps of at least {least}, a smaller one of the estimator, or decay below 1"
        )


def require_parts(
    model: nn.Module, optimizer: object, loader: object, policy: Policy, estimator: object = None
) -> None:
    """Raise for what is no optimizer, loader, policy or estimator, and where there is nothing to train."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    require_policy(policy)
    if isinstance(estimator, type):
        raise ArgumentError(f"estimator must be a name or an object such as {estimator.__name__}(), got the class")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ArgumentError(f"{type(model).__name__} has no trainable parameter")
    if not isinstance(loader, AdaptiveLoader):
        raise ArgumentError(
            f"loader must be an AdaptiveLoader, got {type(loader).__name__}; "
            f"for a DataLoader: AdaptiveLoader.wrap(dataloader)"
        )
    policy.check_start(loader.batch_size)


def require_same_setup(parts: tuple[Optimizer, AdaptiveLoader, Policy, Any], **settings: Any) -> None:
    """Raise on all ranks if they differ: that would part them later, without a word or in a hang."""
    optimizer, loader, policy, estimator = parts
    facts = {
        "the number of samples": loader.dataset_size,
        "batch_size": loader.batch_size,
        "seed": loader.seed,
        "drop_last": loader.drop_last,
        "the epoch": loader.epoch,
        "policy": repr(policy),
        "estimator": estimator if isinstance(estimator, str | None) else type(estimator).__name__,
        "the learning rate": [float(group["lr"]) for group in optimizer.param_groups],
    }
    loader.ranks.require_same({**facts, **settings})
