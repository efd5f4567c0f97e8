"""What a controller is made of: the parts that were left out are chosen here, and all are checked to fit together."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from divebatch.checks import require_count
from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError
from divebatch.estimators import ESTIMATORS, Estimator, Scene, make_estimator, names_where
from divebatch.lr import BY_SIZE, Coupling, coupling_for, require_adam, require_known
from divebatch.norms.loss_scale import LossReduction
from divebatch.policies import Policy
from divebatch.policies.policy import require_policy
from divebatch.ranks import inside_ddp

DEFAULT_ESTIMATOR = "moments"
"""For shadows, couplings and policies that name none: right at fixed weights, for every model and optimizer."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What an estimator would measure in: the model, who trains it, and with which batches.

    Args:
        model: The model, or the DDP wrapper around it.
        optimizers: Those that train it, in any order.
        loader: Who delivers the batches.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loader: AdaptiveLoader

    def scene(self, loss_reduction: LossReduction = "mean") -> Scene:
        """What an estimator may look at."""
        first, *others = training(self.model, self.optimizers)
        return Scene(
            inside_ddp(self.model), self.loader, first, other_optimizers=tuple(others), loss_reduction=loss_reduction
        )


def estimator_of(policy: Policy, trained: Trained | None = None, *, shadows: Mapping[str, Policy] | None = None) -> str:
    """Return the name of the estimator that measures for `policy` where none is given.

    That is the policy's own, or the one that stands in for it where policies would not act on what it measures there.
    """
    # Controller, adapters and experiment files all ask here, so a default means the same everywhere.
    name = policy.estimator or DEFAULT_ESTIMATOR
    if trained is None or "diversity" not in policy.needs:
        return name
    stand_in = make_estimator(name).stand_in(trained.scene(), trained.loader.delivery_size or trained.loader.batch_size)
    needing = any("inner_variance" in each.needs for each in (policy, *(shadows or {}).values()))
    return name if not stand_in or (needing and not ESTIMATORS[stand_in].has_inner_variance) else stand_in


def resolve_estimator(
    policy: Policy,
    estimator: str | Estimator | None,
    trained: Trained | None = None,
    *,
    shadows: Mapping[str, Policy] | None = None,
    grad_scaler: Any = None,
) -> Estimator:
    """Return the estimator that measures for `policy`: the one that was given, else as `estimator_of` says.

    Args:
        policy: The policy that decides.
        estimator: A name, an object, or None for the policy's own.
        trained: What would be measured, for the choice of one where none is given.
        shadows: Policies that only watch; they take what measures for `policy`.
        grad_scaler: The GradScaler that multiplies the losses, where there is one; an object must know it already.
    """
    if isinstance(estimator, Estimator):
        made = estimator
    else:
        name = estimator or estimator_of(policy, trained, shadows=shadows)
        is_stand_in = estimator is None and name != estimator_of(policy)
        made = _made(name, grad_scaler, may_look=is_stand_in)
    for each in (policy, *(shadows or {}).values()):
        if "inner_variance" in each.needs and not made.has_inner_variance:
            raise ArgumentError(
                f"{type(each).__name__} needs the noise along the gradient, which {type(made).__name__} does not "
                f"measure: use one of the estimators {names_where(lambda kind: kind.has_inner_variance)}"
            )
    return made


def _made(name: str, grad_scaler: Any, *, may_look: bool) -> Estimator:
    """Make an estimator that undoes the scale of losses. `may_look`: nobody was told to make it with the scaler."""
    made = make_estimator(name)
    if not made.takes("grad_scaler"):
        return made
    # Those without norm rules know a scaler that nobody uses by itself, so that a wrong one does no harm.
    if grad_scaler is None and (may_look or not made.takes("compiled")):
        grad_scaler = _living_scaler()
    return made if grad_scaler is None else make_estimator(name, grad_scaler=grad_scaler)


def _living_scaler() -> Any:
    """Return the GradScaler that a loop of the user's own may scale its losses with; None where that is not clear.

    A wrong one does no harm: a noise scale is a ratio, and the scale of a scaler that nobody uses never changes.
    """
    gc.collect()  # those of a loop that has ended may still be there
    found = [each for each in gc.get_objects() if issubclass(type(each), GradScaler) and each.is_enabled()]
    return found[0] if len(found) == 1 else None


def as_list(given: Any) -> list[Any]:
    """Return what was given as one, as several or as None, as a list."""
    return list(given) if isinstance(given, Sequence) else [] if given is None else [given]


def resolve_couplings(
    policy: Policy, lr_coupling: Coupling | Sequence[Coupling] | None, optimizers: Sequence[Optimizer]
) -> list[Coupling]:
    """Return how each optimizer's rate follows the batch size: as given, else as the policy says, else not at all."""
    if lr_coupling is None and policy.lr_coupling is None and policy.needs_lr_coupling:
        # Auto's case: linear for SGD, the square root for Adam-like optimizers.
        return [coupling_for(optimizer, one_of=len(optimizers)) for optimizer in optimizers]
    named = policy.lr_coupling or "none" if lr_coupling is None else lr_coupling
    couplings: list[Any] = [named] * len(optimizers) if isinstance(named, str | int | float) else list(named)
    if len(couplings) != len(optimizers):
        raise ArgumentError(
            f"lr_coupling must have one name for each of the {len(optimizers)} optimizers, got {len(couplings)}: "
            f"{couplings}"
        )
    if lr_coupling is not None:
        for coupling in couplings:
            require_coupling(policy, coupling)
    for coupling, optimizer in zip(couplings, optimizers, strict=True):
        if coupling == "adam":
            require_adam(optimizer)
    return couplings


def require_coupling(policy: Policy, lr_coupling: Coupling) -> None:
    """Raise if there is no such coupling, or the policy is made for another one."""
    require_known(lr_coupling)
    fits: tuple[Any, ...] = BY_SIZE if policy.lr_coupling is None else (policy.lr_coupling,)
    is_free = policy.lr_coupling is None and not (policy.needs_lr_coupling and isinstance(lr_coupling, str))
    if not is_free and lr_coupling not in fits:
        raise ArgumentError(
            f"{type(policy).__name__} moves the learning rate with the batch size: leave lr_coupling out, or pass "
            f"lr_coupling={' or '.join(map(repr, fits))}, got lr_coupling={lr_coupling!r}"
        )


def require_parts(
    model: nn.Module,
    optimizers: Sequence[Any],
    loader: object,
    policy: Policy,
    estimator: object,
    shadows: Mapping[str, Any],
) -> None:
    """Raise for what is no optimizer, loader, policy or estimator, and where there is nothing to train."""
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
    training(model, optimizers)
    if not isinstance(loader, AdaptiveLoader):
        raise ArgumentError(
            f"loader must be an AdaptiveLoader, got {type(loader).__name__}; "
            f"for a DataLoader: AdaptiveLoader.wrap(dataloader)"
        )
    policy.check_start(loader.batch_size)


def training(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that hold parameters of `model`, first the one that holds most; raise if none does."""
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
    return holding


def require_step_cadence(every_steps: int, policy: Policy, estimator: Estimator | None) -> None:
    """Raise unless policy and estimator can do with a part of an epoch."""
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
    """Raise on all ranks if they differ: that would part them later, without a word or in a hang."""
    facts = {
        "the number of samples": loader.dataset_size,
        "batch_size": loader.batch_size,
        "seed": loader.seed,
        "drop_last": loader.drop_last,
        "the epoch": loader.epoch,
        "the learning rate": [float(group["lr"]) for each in optimizers for group in each.param_groups],
    }
    loader.ranks.require_same({**facts, **settings})
