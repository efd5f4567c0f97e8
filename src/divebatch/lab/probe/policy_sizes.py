"""What policies ask for at the point a probe starts from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from divebatch.controller import Controller
from divebatch.errors import ArgumentError, CoverageError
from divebatch.estimators import ESTIMATORS
from divebatch.lab.experiments.schema import Method, Part, build_estimator
from divebatch.lab.probe.trainer import BranchTrainer
from divebatch.lab.training import Tally, train_epoch
from divebatch.lab.training.device_options import device_settings
from divebatch.lab.training.several_optimizers import parts_of
from divebatch.measurement import Decision, Measurement
from divebatch.policies import CABS, Auto, DiveBatch, Fixed, InnerProductTest, NoiseScale, NormTest, Policy
from divebatch.policies.wrappers import Around
from divebatch.records import EpochRecord

DELTA = 0.1
"""DiveBatch's delta where the run's own method has none."""
EUCLIDEAN = "Euclidean"


@dataclass(frozen=True, slots=True)
class Question:
    """A noise scale to ask for.

    Args:
        norm: What signal and noise are measured in: "Euclidean" as for SGD, "preconditioned" as an Adam-like optimizer
            sees them.
        estimator: The kind that measures it.
        settings: Its settings.
    """

    norm: str
    estimator: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_noise_scale(self) -> bool:
        """Whether what it measures is one: not along an epoch's changing weights, as the paper's."""
        return ESTIMATORS[self.estimator].at_fixed_weights

    def __str__(self) -> str:
        return self.estimator if self.norm == EUCLIDEAN else f"{self.estimator}, {self.norm}"


QUESTIONS = (
    Question(EUCLIDEAN, "split"),
    Question(EUCLIDEAN, "per-sample"),
    Question(EUCLIDEAN, "moments"),
    Question("preconditioned", "moments", {"preconditioned": True}),
    Question(EUCLIDEAN, "trajectory"),
)
"""A new noise scale is one row. The other estimators need several processes or another pass over all data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one estimator saw after the checkpoint, and the batch sizes policies made of it.

    The noise scale is in samples, with its 95 % interval; an end is None where the interval has none. `problem` says
    why nothing could be measured, where it could not.
    """

    question: Question
    noise_scale: float | None = None
    low: float | None = None
    high: float | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All values, ready for JSON."""
        values = asdict(self)
        return {**values.pop("question"), **values}


def ask_policies(branches: BranchTrainer, *, samples: int) -> list[Asked]:
    """Ask each estimator at the present batch size, always from the checkpoint, with policies as shadows.

    It looks at one epoch, and of a run over one pass at the next `samples` samples.
    """
    state, found = branches.save(), []
    if branches.rest is not None:
        branches.rest.window = samples
    for question in QUESTIONS:
        branches.restore(state)
        try:
            found.append(_ask(branches, question))
        except (ArgumentError, CoverageError) as error:  # this optimizer or model is not for this estimator
            found.append(Asked(question=question, problem=str(error)))
    branches.restore(state)
    return found


@dataclass(frozen=True, slots=True)
class BegunWith(Around):
    """A policy that goes by the size the run began with: the probe's own controller begins with the present one."""

    first_batch_size: int

    def next(self, seen: Measurement) -> Decision:
        """As the policy decides in the run."""
        return self.policy.next(replace(seen, first_batch_size=self.first_batch_size))


def policies_for(question: Question, method: Method, dataset_size: int, first_batch_size: int) -> dict[str, Policy]:
    """Free to grow up to the data and, but for `Auto`, to shrink.

    On an estimate that is not at fixed weights, the paper's, only the rule that is made for it makes sense; in another
    norm than the Euclidean, only rules that take nothing but the noise scale.
    """
    kind, delta = ESTIMATORS[question.estimator], float(method.policy.settings.get("delta", DELTA))
    policies: dict[str, Policy] = {
        "Auto": BegunWith(Auto(dataset_size), first_batch_size),
        "NoiseScale": NoiseScale(dataset_size, monotone=False),
        "NormTest, eta 0.5": NormTest(dataset_size, monotone=False),
        "InnerProductTest": InnerProductTest(dataset_size, monotone=False),
        "CABS": CABS(dataset_size),
        f"DiveBatch, delta {delta:g}": DiveBatch(delta, dataset_size, monotone=False),
    }
    if not kind.at_fixed_weights:
        return {name: policy for name, policy in policies.items() if policy.estimator == question.estimator}
    if question.norm != EUCLIDEAN:
        return {name: policies[name] for name in ("Auto", "NoiseScale")}
    return {
        name: policy
        for name, policy in policies.items()
        if kind.has_inner_variance or "inner_variance" not in policy.needs
    }


def _ask(branches: BranchTrainer, question: Question) -> Asked:
    size = branches.dataset_size
    policies = policies_for(question, branches.run.method, size, branches.start.first_batch_size)
    record = _measured_epoch(branches, question, policies)
    low, high = (_noise_scale(end, size) for end in (record.diversity_low, record.diversity_high))
    noise = _noise_scale(record.diversity, size)
    return Asked(question=question, noise_scale=noise, low=low, high=high, sizes=record.shadows or {})


def _measured_epoch(branches: BranchTrainer, question: Question, shadows: Mapping[str, Policy]) -> EpochRecord:
    trainer, loader = branches.trainer, branches.loader
    loader.batch_size = branches.start.batch_size
    loader.set_epoch(branches.first_epoch(0))
    trainer.model.train()
    part = Part(kind=question.estimator, settings=question.settings)
    with (
        device_settings(trainer.options.precision, trainer.clock.device),
        Controller(
            trainer.model,
            parts_of(trainer.optimizer),
            loader,
            Fixed(),
            estimator=build_estimator(part, trainer.options, trainer.loss_fn),
            scheduler=trainer.all_schedulers,
            shadows=shadows,
        ) as control,
    ):
        loss = train_epoch(trainer.step.under(control.plan), loader, Tally())
        return replace(control.step(loss=loss), train_loss=loss)


def _noise_scale(diversity: float | None, dataset_size: int) -> float | None:
    return None if diversity is None else max(0.0, dataset_size * diversity - 1)
