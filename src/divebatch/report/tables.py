"""The tables of an experiment: what each method reached, when, and what it cost; notes say what is left out."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from divebatch.records import Metric
from divebatch.report.analysis import Analysis, Arrival, MethodResult, Target, has_validation
from divebatch.report.curves import Average
from divebatch.report.runs import RecordedRun

MISSING = "-"
NOT_REACHED = "not reached"
MEBIBYTE = 2**20
QUARTERS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Table:
    """Plain text in rows and columns; whoever renders it escapes what its format treats as special.

    Args:
        title: What the table shows.
        columns: Their headings.
        rows: One cell for each column; the first one names the row.
        notes: Sentences to be read with the numbers.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


# Numbers as text


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


def _decimals(size: float) -> int:
    """Four, or so many more that two digits of `size` show."""
    return min(8, max(4, 1 - math.floor(math.log10(size)))) if size > 0 else 4


def seconds(value: float) -> str:
    """Short, at least three digits where there are that many.

    >>> seconds(1.234), seconds(56.78), seconds(1234.5)
    ('1.23', '56.8', '1234')
    """
    return f"{value:.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def batch_size_range(first: float | None, last: float | None, between: str) -> str:
    """Two sizes in samples, rounded; one where they are equal.

    >>> batch_size_range(128.0, 5028.4, " - "), batch_size_range(128.0, 128.0, " - ")
    ('128 - 5028', '128')
    """
    sizes = [f"{size:.0f}" for size in (first, last) if size is not None]
    return between.join(dict.fromkeys(sizes)) or MISSING


def metric_name(metric: Metric) -> str:
    """The metric in words."""
    return f"validation {metric.word}"


# What each method reached


def stage_epochs(length: int) -> list[int]:
    """The epochs at 25, 50, 75 and 100 % of `length`, rounded down, at least 1.

    >>> stage_epochs(200), stage_epochs(90)
    ([50, 100, 150, 200], [22, 45, 67, 90])
    """
    return [max(1, length * quarter // 4) for quarter in QUARTERS]


def result_table(analysis: Analysis) -> Table:
    """The metric at four stages of training as mean ± standard error over trials, and the way to both targets.

    Args:
        analysis: The experiment's, from `analyse`.
    """
    experiment, metric = analysis.experiment, analysis.metric
    epochs = stage_epochs(experiment.length)
    other = Metric() if metric.name == "val_loss" else Metric("val_loss", "lower")
    columns = ["method", "trials"]
    columns += [f"{25 * quarter} % ({epoch})" for quarter, epoch in zip(QUARTERS, epochs, strict=True)]
    columns += [f"final val {other.word}{' (%)' * other.is_accuracy}"]
    columns += ["to own target", "to common target"]
    rows = [
        [
            result.method,
            f"{result.num_finished} of {len(result.trials)}",
            *(with_error(result.curve(metric.name).at(epoch), percent=metric.is_accuracy) for epoch in epochs),
            with_error(_final(result, other, experiment.length), percent=other.is_accuracy),
            _way(analysis, result, analysis.own),
            _way(analysis, result, analysis.common),
        ]
        for result in analysis.methods
    ]
    unit = " (%)" if metric.is_accuracy else ""
    title = f"{experiment.name}: {metric_name(metric)}{unit} and time to target"
    return Table(title, columns, rows, list(_result_notes(analysis)))


def _final(result: MethodResult, metric: Metric, length: int) -> Average | None:
    return result.curve(metric.name).at(length) if result.num_finished else None


def _way(analysis: Analysis, result: MethodResult, arrivals: Mapping[str, Mapping[str, Arrival]]) -> str:
    """Seconds and epoch, for instance `1566 s (96)`."""
    way = arrivals[result.method]
    if not way or result.curve(analysis.metric.name).is_empty:
        return MISSING
    epoch, time = way["epochs"].value, way["seconds"].value
    if epoch is None:
        return NOT_REACHED if result.num_finished else "not yet"
    return f"({epoch:.0f})" if time is None else f"{seconds(time)} s ({epoch:.0f})"


def _result_notes(analysis: Analysis) -> Iterator[str]:
    if not has_validation(analysis.experiment):
        yield "No run has a validation loss or accuracy."
        yield from _trial_notes(analysis)
        return
    what = analysis.metric.word
    verb = "is at least the target" if analysis.metric.higher_is_better else "is at most the target"
    yield "Trials: finished of those there are. Accuracies and losses: means over trials ± standard error."
    yield f"Columns in percent: the {what} after that part of the epochs; in parentheses the epoch."
    yield (
        "To a target: seconds of training (without evaluation and compilation, mean over trials) and, in parentheses, "
        f"epochs until the {what} averaged over trials {verb}; a trial alone, being rougher than the average, may "
        f"reach it earlier. Own target: the method's own final {what}{_margin(analysis.metric)}, so easier for one "
        "that ends worse; a method that has learned nothing has none."
    )
    yield _target_note(analysis)
    yield from _trial_notes(analysis)
    yield from (diverged_note(result, analysis) for result in analysis.methods if result.num_diverged)
    yield from _comparability_notes(analysis)


def _margin(metric: Metric) -> str:
    if metric.is_accuracy:
        return " less one point" if metric.higher_is_better else " and one point"
    return " less 1 %" if metric.higher_is_better else " and 1 %"


def _target_note(analysis: Analysis) -> str:
    target, metric = analysis.target, analysis.metric
    what = metric.word
    if target is None:
        return f"No common target: no method that has learned something has a final {what} yet."
    value = metric.text(target.value)
    return f"Common target: {value}, the final {what} of {target.method}{_margin(metric)}{_why(analysis, target)}."


def _why(analysis: Analysis, target: Target) -> str:
    baselines = analysis.experiment.settings.baselines
    if target.is_baseline:
        return ""
    return f": the best one here, as {baselines[0]} has none" if baselines else ": the best one here"


def _trial_notes(analysis: Analysis) -> Iterator[str]:
    for result in analysis.methods:
        start = f"{result.method}: {result.num_finished} of {len(result.trials)} trials finished"
        if result.last_epoch is None:
            yield f"{start}, no epoch recorded yet."
        elif not result.num_finished:
            yield f"{start}, epoch {result.last_epoch} reached; no final value, means over trials that got so far."
        elif result.num_finished < len(result.trials):
            yield f"{start}; all numbers are over those."
    single = [result.method for result in analysis.methods if len(result.runs) == 1]
    if single:
        yield f"A single trial, hence no standard error: {', '.join(single)}."
    seeds = {result.method: ", ".join(str(run.header.seed) for run in result.runs) for result in analysis.methods}
    if len(set(seeds.values())) > 1:
        yield "Not all methods have the same seeds: " + "; ".join(f"{m} {s}" for m, s in seeds.items()) + "."


def diverged_note(result: MethodResult, analysis: Analysis) -> str:
    """How many trials diverged, and what the mean loss is then a mean of."""
    start = f"{result.method}: {result.num_diverged} of {len(result.trials)} trials diverged"
    final = _final(result, Metric("val_loss", "lower"), analysis.experiment.length)
    over = f"the final loss is a mean over {final.num_trials} that did not" if final else "there is no final loss"
    return f"{start} (no finite validation loss in the last epoch); {over}, the accuracy counts all that recorded one."


def _comparability_notes(analysis: Analysis) -> Iterator[str]:
    experiment = analysis.experiment
    lengths = sorted({run.planned_epochs for run in experiment.runs if run.planned_epochs})
    if len(lengths) > 1:
        yield (
            f"Runs ask for different numbers of epochs ({', '.join(map(str, lengths))}): the stages are those of the "
            f"longest. Keep such runs in different folders."
        )
    if len(experiment.machines) > 1:
        yield f"Times come from different hardware ({'; '.join(experiment.machines)}) and do not compare."


# What it cost

Cell = Callable[[MethodResult], str]


def cost_table(analysis: Analysis) -> Table:
    """Steps, samples, seconds and memory at the end of the trials that count, means over trials.

    Args:
        analysis: The experiment's, from `analyse`.
    """
    cells: dict[str, Cell] = {
        "batch size, first → largest": lambda r: batch_size_range(r.first_batch_size, r.largest_batch_size, " → "),
        "steps": lambda result: _number(result.final_mean("steps"), ".0f"),
        "10^6 samples": lambda result: _number(result.final_mean("samples"), ".4g", scale=1e-6),
        "samples per s": lambda result: _number(_samples_per_second(result), ".0f"),
        "train s": lambda result: _seconds(result.final_mean("train_seconds")),
        "eval s": lambda result: _seconds(result.final_mean("eval_seconds")),
        "compile s": lambda result: _seconds(result.final_mean("compile_seconds")),
        "peak MiB": lambda result: _number(_mean(map(_peak_bytes, result.runs)), ".0f", scale=1 / MEBIBYTE),
    }
    columns = {name: [cell(result) for result in analysis.methods] for name, cell in cells.items()}
    shown = {name: column for name, column in columns.items() if not set(column) <= {MISSING, seconds(0.0)}}
    rows = [[r.method, *(column[index] for column in shown.values())] for index, r in enumerate(analysis.methods)]
    return Table(f"{analysis.experiment.name}: cost", ["method", *shown], rows, list(_cost_notes(analysis)))


def _cost_notes(analysis: Analysis) -> Iterator[str]:
    yield "Numbers to the end of training, means over trials. Train s leaves out evaluation and compilation."
    unfinished = [result.method for result in analysis.methods if not result.num_finished]
    if unfinished:
        yield f"Not finished, numbers so far: {', '.join(unfinished)}."
    shapes = {result.method: result.final_mean("recompiles") for result in analysis.methods}
    compiled = [f"{method} {number:.0f}" for method, number in shapes.items() if number]
    if compiled:
        yield f"Different batch shapes that were compiled: {', '.join(compiled)}."
    on_cpu = "" if all(run.is_on_gpu for run in analysis.experiment.runs) else _CPU_NOTE
    yield f"Peak MiB: the highest memory use of all epochs.{on_cpu}"


_CPU_NOTE = " On a CPU it is the resident peak of the process, with everything else that the process holds."


def _samples_per_second(result: MethodResult) -> float | None:
    """Of training, to the end of each run; mean over those that were timed."""
    last = [run.last for run in result.runs if run.last]
    return _mean(record.samples / record.train_seconds if record.train_seconds else None for record in last)


def _peak_bytes(run: RecordedRun) -> float | None:
    return max(
        (record.peak_memory_bytes for record in run.epochs if record.peak_memory_bytes is not None), default=None
    )


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _number(value: float | None, form: str, *, scale: float = 1.0) -> str:
    return MISSING if value is None else f"{scale * value:{form}}"


def _seconds(value: float | None) -> str:
    return MISSING if value is None else seconds(value)
