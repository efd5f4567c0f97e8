"""One table an experiment: a row for each method, and notes that say what the numbers leave out."""

import math
from dataclasses import dataclass

from divebatch.report.curves import Average
from divebatch.report.runs import Experiment
from divebatch.report.summary import COMMON_TARGET_METHOD, MethodSummary, has_validation, summarise

MISSING = "-"
NOT_REACHED = "not reached"
COLUMNS = (
    "method",
    "trials",
    "batch size, first → largest",
    "final val loss",
    "final val accuracy (%)",
    "epochs to own target",
    "epochs to common target",
    "steps",
    "train s",
)


@dataclass(frozen=True, slots=True)
class Table:
    """Plain text in rows and columns; whoever renders it escapes what its format treats as special."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


def result_table(experiment: Experiment) -> Table:
    """What each method reached: final values as mean ± standard error over trials, the other numbers as means."""
    summaries = summarise(experiment)
    rows = [_row(summary) for summary in summaries]
    return Table(experiment.name, list(COLUMNS), rows, _notes(experiment, summaries))


def _row(summary: MethodSummary) -> list[str]:
    return [
        summary.method,
        f"{summary.num_finished} of {summary.num_trials}",
        batch_size_range(summary.first_batch_size, summary.largest_batch_size, " → "),
        with_error(summary.final_loss),
        with_error(summary.final_accuracy, percent=True),
        _epochs(summary.epochs_to_own_target, summary.own_target, summary),
        _epochs(summary.epochs_to_common_target, summary.common_target, summary),
        MISSING if summary.steps is None else f"{summary.steps:.0f}",
        MISSING if summary.train_seconds is None else seconds(summary.train_seconds),
    ]


def batch_size_range(first: float | None, last: float | None, between: str) -> str:
    """Two sizes in samples, rounded; one where they are equal.

    >>> batch_size_range(128.0, 5028.4, " - "), batch_size_range(128.0, 128.0, " - ")
    ('128 - 5028', '128')
    """
    sizes = [f"{size:.0f}" for size in (first, last) if size is not None]
    return between.join(dict.fromkeys(sizes)) or MISSING


def with_error(average: Average | None, *, percent: bool = False) -> str:
    """Mean ± standard error, at least to the error's second digit; the mean alone for a single trial.

    >>> with_error(Average(0.51234, 0.02, 4)), with_error(Average(0.98764, 0.002, 4), percent=True)
    ('0.5123 ± 0.0100', '98.76 ± 0.10')
    """
    if average is None:
        return MISSING
    scale = 100.0 if percent else 1.0
    mean, error = scale * average.mean, scale * average.standard_error
    if math.isnan(error):
        return f"{mean:.2f}" if percent else f"{mean:.4g}"
    if max(abs(mean), error) >= 1e6 or abs(mean) < 1e-4:
        return f"{mean:.3g} ± {error:.2g}"
    decimals = 2 if percent else _decimals(error)
    return f"{mean:.{decimals}f} ± {error:.{decimals}f}"


def seconds(value: float) -> str:
    """Short, at least three digits where there are that many.

    >>> seconds(1.234), seconds(56.78), seconds(1234.5)
    ('1.23', '56.8', '1234')
    """
    return f"{value:.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def _decimals(size: float) -> int:
    """Four, or so many more that two digits of `size` show."""
    return min(8, max(4, 1 - math.floor(math.log10(size)))) if size > 0 else 4


def _epochs(reached: int | None, target: float | None, summary: MethodSummary) -> str:
    if reached is not None:
        return str(reached)
    return MISSING if target is None or summary.final_accuracy is None else NOT_REACHED


def _notes(experiment: Experiment, summaries: list[MethodSummary]) -> list[str]:
    if not has_validation(experiment):
        return ["No run has a validation loss or accuracy.", *map(_unfinished, filter(_is_unfinished, summaries))]
    notes = [
        "Trials: finished of those there are. Final values are means over trials ± the standard error of the mean.",
        "Epochs to a target: the first epoch whose accuracy, averaged over trials, is at least the target. "
        "Own target: the method's own final accuracy less one point, so easier for a method that ends worse.",
        _common_target_note(summaries[0].common_target),
    ]
    notes += [_unfinished(summary) for summary in summaries if _is_unfinished(summary)]
    notes += [diverged_note(summary) for summary in summaries if summary.num_diverged]
    single = [summary.method for summary in summaries if summary.num_at_last_epoch == 1]
    if single:
        notes.append(f"A single trial, hence no standard error: {', '.join(single)}.")
    return notes


def _common_target_note(target: float | None) -> str:
    if target is None:
        return f"No common target: no final accuracy of {COMMON_TARGET_METHOD}."
    return f"Common target: the final accuracy of {COMMON_TARGET_METHOD} less one point, {100 * target:.2f} %."


def _is_unfinished(summary: MethodSummary) -> bool:
    return not summary.num_finished == summary.num_trials == summary.num_at_last_epoch


def _unfinished(summary: MethodSummary) -> str:
    start = f"{summary.method}: {summary.num_finished} of {summary.num_trials} trials finished"
    if summary.last_epoch is None:
        return f"{start}, no epoch recorded yet."
    return f"{start}; final values are those of epoch {summary.last_epoch}, which {summary.num_at_last_epoch} reached."


def diverged_note(summary: MethodSummary) -> str:
    """Says how many trials diverged and what the mean loss is then a mean of."""
    start = f"{summary.method}: {summary.num_diverged} of {summary.num_trials} trials diverged"
    kept = summary.final_loss.num_trials if summary.final_loss else 0
    over = f"the final loss is a mean over {kept} that did not" if kept else "there is no final loss"
    return f"{start} (no finite validation loss in the last epoch); {over}, the accuracy counts all that recorded one."
