"""Checks of a controller's arguments, at once and against the loop, and the default estimator."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from divebatch.checks import require_count
from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators import ESTIMATORS, Estimator, TrainingContext, make_estimator, names_where
from divebatch.lr import SURE
from divebatch.norms.loss_scale import LossReduction
from divebatch.policies import Policy
from divebatch.policies.policy import require_policy
from divebatch.ranks import inside_ddp


class Cadence:
    """The number of the loader's batches in an optimizer step, checked against the loop's steps.

    `accumulate` or the loader's `delivery_size` gives this number.
    """

    def __init__(self, loader: AdaptiveLoader, accumulate: int) -> None:
        require_count("accumulate", accumulate)
        if accumulate > 1 and loader.delivery_size is not None:
            raise ArgumentError(
                f"the loader's delivery_size={loader.delivery_size} already sets the batches of a step: leave out "
                f"accumulate={accumulate}, or delivery_size"
            )
        self.accumulate, self._loader = accumulate, loader
        self.unit = 1 if loader.delivery_size is not None else accumulate
        """Batches of the loader's `batch_size` in a step; a loader with a `delivery_size` counts whole steps."""
        self.agreeing, self._others = 0, Counter[int]()
        """The number of steps with the expected number of batches, and the other numbers with their counts."""

    def said(self, batch_size: int) -> int:
        """Return the expected number of batches in a step of `batch_size` samples."""
        delivered = self._loader.delivery_size
        return self.accumulate if delivered is None else math.ceil(batch_size / delivered)

    def check(self, taken: int, said: int) -> None:
        """Count a step by its number of batches; raise if the first steps all have another number than expected."""
        current = self._loader.current
        if (taken, said) == (0, 1):  # a further step on the same batch
            self.agreeing += 1
        elif current is not None and not current.is_used_up:  # an epoch's last step may be shorter
            self._others[taken] += 1
            if not self.agreeing and self._others[taken] == SURE:
                raise self._wrong(taken, said)

    def end_epoch(self, batch_size: int) -> None:
        """Raise if most steps of an epoch took an unexpected number of batches."""
        if self._others.total() >= SURE and self._others.total() > self.agreeing:
            raise self._wrong(self._others.most_common(1)[0][0], self.said(batch_size))
        if self.agreeing >= SURE:
            self.agreeing, self._others = 0, Counter()

    def _wrong(self, taken: int, said: int) -> UsageError:
        if self._loader.delivery_size is not None:
            return UsageError(
                f"{said} of the loader's batches make a step (batch_size over delivery_size), and the optimizer steps "
                f"once in {taken}: step once in {said}, or leave delivery_size out and pass accumulate={taken}"
            )
        if taken == 0:
            return UsageError(
                f"the optimizer steps several times before the {said} batches of accumulate={said} are delivered: let "
                f"the loader deliver what a step takes (batch_size=...), and pass accumulate=1"
            )
        return UsageError(
            f"the optimizer steps once in {taken} of the loader's batches, but Controller was given accumulate={said}: "
            f"pass accumulate={taken}"
        )


def as_list(given: Any) -> list[Any]:
    """Return one object, several or none as a list."""
    return list(given) if isinstance(given, Sequence) else [] if given is None else [given]


def training_context(
    model: nn.Module, optimizers: Sequence[Optimizer], loader: AdaptiveLoader, loss_reduction: LossReduction = "mean"
) -> TrainingContext:
    """Return the parts that an estimator may use. The first optimizer is the one that holds most of the model."""
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}

    def held(optimizer: Optimizer) -> int:
        return sum(sizes.get(id(each), 0) for group in optimizer.param_groups for each in group["params"])

    holding = sorted((each for each in optimizers if held(each)), key=held, reverse=True)
    if not holding:
        names = ", ".join(type(each).__name__ for each in optimizers)
        raise ArgumentError(
            f"the optimizer ({names}) holds no parameter of the model ({type(model).__name__}): pass one that was made "
            f"with this very model's parameters, and make it after the model was moved, sharded or copied"
        )
    first, *others = holding
    return TrainingContext(
        inside_ddp(model), loader, first, other_optimizers=tuple(others), loss_reduction=loss_reduction
    )


def estimator_of(
    policy: Policy, context: TrainingContext | None = None, *, shadows: Mapping[str, Policy] | None = None
) -> str:
    """Return the name of the estimator for `policy` if none was given.

    This is the policy's own estimator, or the replacement if policies would not act on its measurements.
    """
    # Controller, adapters and experiment files all use this, so a default means the same everywhere. "moments" works at
    # fixed weights, for every model and optimizer.
    name = policy.estimator or "moments"
    if context is None or "diversity" not in policy.needs:
        return name
    stand_in = make_estimator(name).stand_in(context, context.loader.delivery_size or context.loader.batch_size)
    needing = any("inner_variance" in each.needs for each in (policy, *(shadows or {}).values()))
    return name if not stand_in or (needing and not ESTIMATORS[stand_in].has_inner_variance) else stand_in


def resolve_estimator(
    policy: Policy,
    estimator: str | Estimator | None,
    context: TrainingContext | None = None,
    *,
    shadows: Mapping[str, Policy] | None = None,
    grad_scaler: Any = None,
) -> Estimator:
    """Return the given estimator, built if it is a name; None: the one that `estimator_of` names.

    The shadows use the same estimator. An estimator object must already have its `grad_scaler`.
    """
    if isinstance(estimator, Estimator):
        made = estimator
    else:
        name = estimator or estimator_of(policy, context, shadows=shadows)
        made = make_estimator(name)
        if grad_scaler is not None and made.takes("grad_scaler"):
            made = make_estimator(name, grad_scaler=grad_scaler)
    for each in (policy, *(shadows or {}).values()):
        if "inner_variance" in each.needs and not made.has_inner_variance:
            raise ArgumentError(
                f"{type(each).__name__} needs the noise along the gradient, which {type(made).__name__} does not "
                f"measure: use one of the estimators {names_where(lambda kind: kind.has_inner_variance)}"
            )
    return made


def require_parts(
    model: nn.Module,
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    loader: object,
    policy: Policy,
    estimator: object,
    shadows: Mapping[str, Any],
) -> None:
    """Raise if a part has the wrong type, or nothing can be trained."""
    for prepared in (*optimizers, *schedulers):
        if type(prepared).__module__.startswith("accelerate."):
            raise ArgumentError(
                f"{type(prepared).__name__} was made by accelerator.prepare, and Controller takes torch's own: use "
                f"divebatch.integrations.accelerate.make_controller(accelerator, model, optimizer, loader, policy)"
            )
    for optimizer in optimizers or [None]:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                f"optimizer must be a torch optimizer or a list of such, got {type(optimizer).__name__}"
            )
    for each in (policy, *shadows.values()):
        require_policy(each)
    if isinstance(estimator, type):
        raise ArgumentError(f"estimator must be a name or an object such as {estimator.__name__}(), got the class")
    if not isinstance(estimator, str | Estimator | None):
        raise ArgumentError(f"estimator must be a name or an Estimator such as Split(), got {estimator!r}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ArgumentError(f"{type(model).__name__} has no trainable parameter")
    if not isinstance(loader, AdaptiveLoader):
        raise ArgumentError(
            f"loader must be an AdaptiveLoader, got {type(loader).__name__}; "
            f"for a DataLoader: AdaptiveLoader.wrap(dataloader)"
        )


def require_step_cadence(every_steps: int | None, policy: Policy, estimator: Estimator | None = None) -> None:
    """Raise if `every_steps` is set and policy or estimator cannot work within an epoch."""
    if every_steps is None:
        return
    require_count("every_steps", every_steps)
    if not policy.decides_within_epochs:
        raise ArgumentError(
            f"{type(policy).__name__} decides after whole epochs, by their number, loss or speed: leave "
            f"every_steps={every_steps} out. A policy of your own may say decides_within_epochs = True"
        )
    if estimator is None:
        return
    if not estimator.has_window:
        raise ArgumentError(
            f"{type(estimator).__name__} sums over whole epochs and cannot serve every_steps={every_steps}: "
            f"use one of the estimators {names_where(lambda kind: kind.has_window)}"
        )
    if every_steps < (least := estimator.min_steps_between_decisions):
        raise ArgumentError(
            f"every_steps={every_steps} leaves a decision less than two estimates of {type(estimator).__name__}, and "
            f"one has no spread: take every_steps of at least {least}, a smaller one of the estimator, or decay below 1"
        )


def require_same_setup(optimizers: Sequence[Optimizer], loader: AdaptiveLoader, **settings: Any) -> None:
    """Raise on all ranks if their settings differ: silent divergence or a deadlock would follow."""
    facts = {
        "the number of samples": loader.dataset_size,
        "batch_size": loader.batch_size,
        "seed": loader.seed,
        "drop_last": loader.drop_last,
        "the epoch": loader.epoch,
        "the learning rate": [float(group["lr"]) for each in optimizers for group in each.param_groups],
    }
    loader.ranks.require_same({**facts, **settings})
