"""What policies ask for at the point a probe starts from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from divebatch.controller import Controller
from divebatch.estimators import ESTIMATORS
from divebatch.lab.experiments.schema import Method, Part, build_estimator
from divebatch.lab.probe.trainer import BranchTrainer
from divebatch.lab.training import Tally, train_epoch
from divebatch.lab.training.device_options import device_settings
from divebatch.measurement import Decision, Measurement
from divebatch.policies import CABS, Auto, DiveBatch, Fixed, InnerProductTest, NoiseScale, NormTest, Policy
from divebatch.policies.wrappers import Around
from divebatch.records import EpochRecord

ASKED_OF = ("split", "per-sample", "moments", "trajectory")
"""Estimators whose view is shown; the others need several processes or another pass over all data."""
DELTA = 0.1
"""DiveBatch's delta where the run's own method has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one estimator saw over the epoch after the checkpoint, and the batch sizes policies made of it.

    The noise scale is in samples, with its 95 % interval; an end is None where the interval has none.
    """

    estimator: str
    noise_scale: float | None
    low: float | None
    high: float | None
    sizes: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """All values, ready for JSON."""
        return {**asdict(self), "sizes": dict(self.sizes)}


def ask_policies(branches: BranchTrainer) -> list[Asked]:
    """One epoch at the present batch size for each estimator, always from the checkpoint, policies as shadows."""
    state = branches.save()
    batch_norm = has_batch_norm(branches.trainer.model)
    found = []
    for kind in ASKED_OF:
        if ESTIMATORS[kind].takes_batch_norm or not batch_norm:
            branches.restore(state)
            found.append(_ask(branches, kind))
    branches.restore(state)
    return found


def has_batch_norm(model: nn.Module) -> bool:
    """Whether samples have no gradients of their own."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


@dataclass(frozen=True, slots=True)
class BegunWith(Around):
    """A policy that goes by the size the run began with: the probe's own controller begins with the present one."""

    first_batch_size: int

    def next(self, seen: Measurement) -> Decision:
        """As the policy decides in the run."""
        return self.policy.next(replace(seen, first_batch_size=self.first_batch_size))


def policies_for(estimator: str, method: Method, dataset_size: int, first_batch_size: int) -> dict[str, Policy]:
    """Free to grow up to the data and, but for `Auto`, to shrink.

    On an estimate that is not at fixed weights, the paper's, only the rule that is made for it makes sense.
    """
    kind, delta = ESTIMATORS[estimator], float(method.policy.settings.get("delta", DELTA))
    policies: dict[str, Policy] = {
        "Auto": BegunWith(Auto(dataset_size), first_batch_size),
        "NoiseScale": NoiseScale(dataset_size, monotone=False),
        "NormTest, eta 0.5": NormTest(dataset_size, monotone=False),
        "InnerProductTest": InnerProductTest(dataset_size, monotone=False),
        "CABS": CABS(dataset_size),
        f"DiveBatch, delta {delta:g}": DiveBatch(delta, dataset_size, monotone=False),
    }
    if not kind.at_fixed_weights:
        return {name: policy for name, policy in policies.items() if policy.estimator == estimator}
    return {
        name: policy
        for name, policy in policies.items()
        if kind.has_inner_variance or "inner_variance" not in policy.needs
    }


def _ask(branches: BranchTrainer, kind: str) -> Asked:
    dataset_size = branches.loader.dataset_size
    assert dataset_size is not None  # our datasets are no streams
    policies = policies_for(kind, branches.run.method, dataset_size, branches.start.first_batch_size)
    record = _measured_epoch(branches, kind, policies)
    low, high = (_noise_scale(end, dataset_size) for end in (record.diversity_low, record.diversity_high))
    noise = _noise_scale(record.diversity, dataset_size)
    return Asked(estimator=kind, noise_scale=noise, low=low, high=high, sizes=record.shadows or {})


def _measured_epoch(branches: BranchTrainer, kind: str, shadows: Mapping[str, Policy]) -> EpochRecord:
    trainer, loader = branches.trainer, branches.loader
    loader.batch_size = branches.start.batch_size
    loader.set_epoch(branches.start.epoch)
    trainer.model.train()
    with (
        device_settings(trainer.options.precision, trainer.clock.device),
        Controller(
            trainer.model,
            trainer.optimizer,
            loader,
            Fixed(),
            estimator=build_estimator(Part(kind=kind), trainer.options, trainer.loss_fn),
            scheduler=trainer.all_schedulers,
            shadows=shadows,
        ) as control,
    ):
        loss = train_epoch(trainer.step.under(control.plan), loader, Tally())
        return replace(control.step(loss=loss), train_loss=loss)


def _noise_scale(diversity: float | None, dataset_size: int) -> float | None:
    return None if diversity is None else max(0.0, dataset_size * diversity - 1)
