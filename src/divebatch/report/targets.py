"""Accuracies on the way and times to a target, for experiments on real data.

All numbers of a method are over the same trials: the finished ones, or all of them while none has finished. Only a
finished trial has a final accuracy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from divebatch.report.curves import Average, Curve, average_curve
from divebatch.report.runs import Experiment, Run
from divebatch.report.summary import COMMON_TARGET_METHOD, ONE_POINT

QUARTERS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a target was first reached."""

    epoch: int
    seconds: float | None
    """Training time up to the end of that epoch, mean over trials, without evaluation and compilation."""
    compile_seconds: float
    """Compilation up to there, mean over trials; 0 where none was recorded."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One method's accuracy over epochs, 0..1."""

    method: str
    runs: tuple[Run, ...]
    """Those that count."""
    is_finished: bool
    """Whether those that count have finished."""
    accuracy: Curve
    final: Average | None
    """At the last epoch that was asked for; None while no trial has finished."""
    final_loss: Average | None
    """Of validation, likewise."""

    @property
    def own_target(self) -> float | None:
        """The own final accuracy less one point, 0..1."""
        return self.final.mean - ONE_POINT if self.final else None

    @property
    def changes_batch_size(self) -> bool:
        """Whether its policy is another than to keep the batch size."""
        return any(run.kind_of("method", "policy") != "fixed" for run in self.runs)

    def arrival(self, target: float | None) -> Arrival | None:
        """At the first epoch whose accuracy, averaged over trials, is at least `target`."""
        return _arrival(self.runs, self.accuracy, target)

    def arrivals(self, target: float) -> list[Arrival | None]:
        """Of each trial alone, in the order of the seeds."""
        return [_arrival([run], average_curve([run], "val_accuracy"), target) for run in self.runs]


@dataclass(frozen=True, slots=True)
class CommonTarget:
    """One accuracy for all methods, 0..1: the final one of `method` less one point."""

    method: str
    accuracy: float


def stage_epochs(length: int) -> list[int]:
    """The epochs at 25, 50, 75 and 100 % of `length`, rounded down, at least 1.

    >>> stage_epochs(200), stage_epochs(90)
    ([50, 100, 150, 200], [22, 45, 67, 90])
    """
    return [max(1, length * quarter // 4) for quarter in QUARTERS]


def progress_of(experiment: Experiment) -> list[Progress]:
    """One for each method, in the experiment's order."""
    return [_progress(experiment, method, runs) for method, runs in counted(experiment).methods.items()]


def counted(experiment: Experiment) -> Experiment:
    """The same with only the trials that count."""
    methods = {method: _counted(experiment, runs) for method, runs in experiment.methods.items()}
    return Experiment(experiment.name, methods)


def common_target(methods: Sequence[Progress]) -> CommonTarget | None:
    """Of sgd-small where it has finished, else of the method with the best final accuracy; None while none has one."""
    finals = {progress.method: progress.final.mean for progress in methods if progress.final}
    if not finals:
        return None
    method = COMMON_TARGET_METHOD if COMMON_TARGET_METHOD in finals else max(finals, key=lambda name: finals[name])
    return CommonTarget(method, finals[method] - ONE_POINT)


def _counted(experiment: Experiment, runs: tuple[Run, ...]) -> tuple[Run, ...]:
    return tuple(run for run in runs if experiment.is_finished(run)) or runs


def _progress(experiment: Experiment, method: str, runs: tuple[Run, ...]) -> Progress:
    accuracy, loss = average_curve(runs, "val_accuracy"), average_curve(runs, "val_loss")
    is_finished = any(map(experiment.is_finished, runs))
    return Progress(method, runs, is_finished, accuracy, accuracy.at(experiment.length), loss.at(experiment.length))


def _arrival(runs: Sequence[Run], accuracy: Curve, target: float | None) -> Arrival | None:
    epoch = None if target is None else accuracy.first_reaching(target)
    if epoch is None:
        return None
    seconds = average_curve(runs, "train_seconds").at(epoch)
    compiling = average_curve(runs, "compile_seconds").at(epoch)
    return Arrival(epoch, seconds.mean if seconds else None, compiling.mean if compiling else 0.0)
