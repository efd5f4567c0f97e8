"""Each method of an experiment in numbers: what the table and the captions say."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from divebatch.report.curves import Average, average_curve
from divebatch.report.runs import Experiment, Run

COMMON_TARGET_METHOD = "sgd-small"
ONE_POINT = 0.01
"""Of accuracy, which runs from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSummary:
    """One method over its trials. None where nothing was recorded or a target was never reached.

    Final values, steps and seconds are those of `last_epoch`, over the trials that reached it.
    """

    method: str
    num_trials: int
    num_finished: int
    num_diverged: int
    """Trials whose last epoch has no finite validation loss."""
    last_epoch: int | None
    """The highest epoch number that any trial reached."""
    num_at_last_epoch: int
    first_batch_size: float | None
    largest_batch_size: float | None
    """Mean over trials of each trial's largest, in samples."""
    final_batch_size: float | None
    final_loss: Average | None
    final_accuracy: Average | None
    """0..1."""
    own_target: float | None
    """Own final accuracy less one point, 0..1."""
    epochs_to_own_target: int | None
    common_target: float | None
    """The same of sgd-small."""
    epochs_to_common_target: int | None
    steps: float | None
    train_seconds: float | None


def summarise(experiment: Experiment) -> list[MethodSummary]:
    """One summary a method, in the experiment's order."""
    common = _target(experiment.methods.get(COMMON_TARGET_METHOD, ()))
    return [_summarise(experiment, method, common) for method in experiment.methods]


def has_validation(experiment: Experiment) -> bool:
    """Whether any epoch of any run has a validation loss or accuracy."""
    records = (record for run in experiment.runs for record in run.epochs)
    return any(record.val_loss is not None or record.val_accuracy is not None for record in records)


def num_diverged(experiment: Experiment, runs: Sequence[Run]) -> int:
    """Trials that ended without a finite validation loss, in an experiment that validates at all."""
    if not has_validation(experiment):
        return 0
    return sum(run.last is not None and average_curve([run], "val_loss").final() is None for run in runs)


def _summarise(experiment: Experiment, method: str, common_target: float | None) -> MethodSummary:
    runs = experiment.methods[method]
    begun = [run for run in runs if run.epochs]
    accuracy = average_curve(runs, "val_accuracy")
    own_target = _target(runs)
    last_epoch = max((run.epochs[-1].epoch for run in begun), default=None)
    return MethodSummary(
        method=method,
        num_trials=len(runs),
        num_finished=sum(experiment.is_finished(run) for run in runs),
        num_diverged=num_diverged(experiment, runs),
        last_epoch=last_epoch,
        num_at_last_epoch=sum(run.epochs[-1].epoch == last_epoch for run in begun),
        first_batch_size=fmean(run.batch_sizes[0] for run in begun) if begun else None,
        largest_batch_size=fmean(max(run.batch_sizes) for run in begun) if begun else None,
        final_batch_size=_final_mean(runs, "batch_size"),
        final_loss=average_curve(runs, "val_loss").final(),
        final_accuracy=accuracy.final(),
        own_target=own_target,
        epochs_to_own_target=None if own_target is None else accuracy.first_reaching(own_target),
        common_target=common_target,
        epochs_to_common_target=None if common_target is None else accuracy.first_reaching(common_target),
        steps=_final_mean(runs, "steps"),
        train_seconds=_final_mean(runs, "train_seconds"),
    )


def _target(runs: Sequence[Run]) -> float | None:
    """One point below the mean final accuracy."""
    final = average_curve(runs, "val_accuracy").final()
    return final.mean - ONE_POINT if final else None


def _final_mean(runs: Sequence[Run], field: str) -> float | None:
    final = average_curve(runs, field).final()
    return final.mean if final else None
