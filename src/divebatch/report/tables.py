"""Make an experiment's tables as text, CSV and Markdown, with notes on what is left out."""

import csv
import html
import io
import json
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from divebatch.records import EpochRecord, Metric
from divebatch.report.analysis import LOSS, Analysis, Arrival, Average, MethodResult, has_validation
from divebatch.report.compare import BEST, CUSTOMARY, Gain, best_fixed, metric_in_words, note_on, ratio_in_words
from divebatch.report.drawing import seconds
from divebatch.report.load import RecordedExperiment, RecordedRun

MISSING = "-"
MEBIBYTE = 2**20
MAX_VALUES = 4
"""Most values of a setting that are listed; the rest is counted."""
MAX_SIZES = 5
"""Most batch sizes that are listed one by one."""
HIDDEN = frozenset({"seed", "trials", "name", "summary"})
"""Settings that the report shows elsewhere: with the runs or in the heading."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of plain text, in which renderers escape the special characters of their format.

    Args:
        name: Part of the file's name; without a dash, so that two experiments' files differ.
        title: The table's subject.
        columns: The headings of the columns.
        rows: Rows with a cell for each column; the first cell names the row.
        notes: Sentences to read with the numbers.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]

    def to_markdown(self) -> str:
        """Return the table and its notes as Markdown, without the title."""
        lines = ["| " + " | ".join(map(escape_markdown, row)) + " |" for row in (self.columns, *self.rows)]
        notes = [f"- {escape_markdown(note)}" for note in self.notes]
        return "\n".join([lines[0], "|" + " --- |" * len(self.columns), *lines[1:], "", *notes]).strip()

    def to_text(self) -> list[str]:
        """Return aligned lines for a terminal, with the first, second and last columns left and numbers right."""
        cells = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        left = {0, 1, len(widths) - 1}
        return [
            "  ".join(
                cell.ljust(width) if place in left else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV in which no cell is a formula of a spreadsheet."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_csv_cell, row) for row in rows)
    return text.getvalue()


def _csv_cell(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.9g}" if math.isfinite(cell) else ""
    # A spreadsheet would execute text that begins like a formula, even after spaces or with full-width signs.
    text = "" if cell is None else str(cell)
    plain = unicodedata.normalize("NFKC", text)
    return f"'{text}" if re.match(r"\s*[=+@]|[\t\r\n]|\s*-.*[^\d.]", plain) else text


def escape_markdown(text: str) -> str:
    """Escape tags and markup in a text, and put it on one line.

    >>> print(escape_markdown("<b> a|b"))
    &lt;b&gt; a\\|b
    """
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", html.escape(one_line, quote=False))


# Numbers as text


def with_error(average: Average | None, *, percent: bool = False) -> str:
    """Format mean ± standard error with at least two digits of the error; a single trial gives the mean alone.

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
    # Four decimals, or more if two digits of the error need them.
    decimals = 2 if percent else min(8, max(4, 1 - math.floor(math.log10(error)))) if error > 0 else 4
    return f"{mean:.{decimals}f} ± {error:.{decimals}f}"


def size_range(first: float | None, last: float | None) -> str:
    """Format two sizes in samples, rounded; equal sizes appear once.

    >>> size_range(128.0, 5028.4), size_range(128.0, 128.0)
    ('128 -> 5028', '128')
    """
    sizes = [f"{size:.0f}" for size in (first, last) if size is not None]
    return " -> ".join(dict.fromkeys(sizes)) or MISSING


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else f"{value:{form}}"


def _seconds(value: float | None) -> str:
    return MISSING if value is None else seconds(value)


# An experiment at a glance


def size_in_words(experiment: RecordedExperiment) -> str:
    """Return the experiment's size as text like `20 epochs, 2 seeds`."""
    counts = sorted({len(runs) for runs in experiment.methods.values()})
    seeds = " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))
    epochs = f"{experiment.length} epoch{'s' * (experiment.length != 1)}"
    return f"{epochs}, {seeds} seed{'s' * (seeds != '1')}"


def about(experiment: RecordedExperiment) -> str:
    """Return the configured summary, plus the models that the summary does not name; empty if there is no summary."""
    texts = {str(run.header.config.get("summary", "")) for run in experiment.runs}
    summary = texts.pop().rstrip(".") if len(texts) == 1 else ""
    # The summary describes the experiment's file; `--model` may have replaced the network.
    models = sorted({kind for run in experiment.runs if (kind := run.kind_of("model")) is not None})
    unnamed = [model for model in models if _letters(model) not in _letters(summary)]
    return f"{summary} ({', '.join(unnamed)})" if unnamed and summary else summary


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def summary_table(analysis: Analysis, gains: Sequence[Gain]) -> Table:
    """Make the summary table, with a row and a short note for each method."""
    metric, best = analysis.metric, best_fixed(analysis)
    unit = " %" * metric.is_accuracy
    rows = []
    for result in analysis.methods:
        final = result.curve(metric.name).final()
        rows.append(
            [
                result.method,
                size_range(result.first_batch_size, result.largest_batch_size),
                _number(result.final_mean("steps"), ".0f"),
                MISSING if final is None else with_error(final, percent=metric.is_accuracy) + unit,
                _seconds(result.final_mean("train_seconds")),
                note_on(result, gains, best),
            ]
        )
    notes = ["Means over trials ± standard error, at the end of training; seconds of training alone."]
    if not analysis.is_timed:
        machines = "; ".join(analysis.experiment.machines)
        notes.append(f"Seconds come from different hardware ({machines}) and do not compare.")
    return Table("summary", "Summary", ["method", "batch", "steps", metric.word, "seconds", ""], rows, notes)


# What each method reached


def stage_epochs(length: int) -> list[int]:
    """Return the epochs at 25, 50, 75 and 100 % of `length`, rounded down, at least 1.

    >>> stage_epochs(200), stage_epochs(90)
    ([50, 100, 150, 200], [22, 45, 67, 90])
    """
    return [max(1, length * quarter // 4) for quarter in (1, 2, 3, 4)]


def result_table(analysis: Analysis) -> Table:
    """Make the paper's Table 1: the metric at four stages as mean ± standard error, and the way to both targets."""
    experiment, metric = analysis.experiment, analysis.metric
    epochs = stage_epochs(experiment.length)
    other = Metric() if metric.name == "val_loss" else LOSS
    columns = ["method", "trials"]
    columns += [f"{percent} % ({epoch})" for percent, epoch in zip((25, 50, 75, 100), epochs, strict=True)]
    columns += [f"final val {other.word}{' (%)' * other.is_accuracy}"]
    columns += ["to own target", "to common target"]
    rows = [
        [
            result.method,
            f"{result.num_finished} of {len(result.trials)}",
            *(with_error(result.curve(metric.name).at(epoch), percent=metric.is_accuracy) for epoch in epochs),
            with_error(_final(result, other, experiment.length), percent=other.is_accuracy),
            _way(result, metric, analysis.own[result.method]),
            _way(result, metric, analysis.common[result.method]),
        ]
        for result in analysis.methods
    ]
    title = f"Validation {metric.word}{' (%)' * metric.is_accuracy} and time to target"
    return Table("results", title, columns, rows, list(_result_notes(analysis)))


def _final(result: MethodResult, metric: Metric, length: int) -> Average | None:
    return result.curve(metric.name).at(length) if result.num_finished else None


def _way(result: MethodResult, metric: Metric, way: Mapping[str, Arrival]) -> str:
    """Return seconds and epoch as text like `1566 s (96)`."""
    if not way or not len(result.curve(metric.name).measured().epochs):
        return MISSING
    epoch, time = way["epochs"].value, way["seconds"].value
    if epoch is None:
        return "not reached" if result.num_finished else "not yet"
    return f"({epoch:.0f})" if time is None else f"{seconds(time)} s ({epoch:.0f})"


def _result_notes(analysis: Analysis) -> Iterator[str]:
    metric = analysis.metric
    if not has_validation(analysis.experiment):
        yield "No run has a validation loss or accuracy."
        yield from _trial_notes(analysis)
        return
    verb = "is at least the target" if metric.higher_is_better else "is at most the target"
    amount = "one point" if metric.is_accuracy else "1 %"
    margin = f" less {amount}" if metric.higher_is_better else f" and {amount}"
    yield "Trials: finished of those there are. Numbers: means over trials ± standard error."
    yield f"Columns in percent: the {metric.word} after that part of the epochs; in parentheses the epoch."
    yield (
        f"To a target: seconds of training and, in parentheses, epochs until the {metric.word} averaged over trials "
        f"{verb}. Own target: the method's own final {metric.word}{margin}, so easier for one that ends worse."
    )
    target, baselines = analysis.target, analysis.experiment.settings.baselines
    if target is None:
        yield f"No common target: no method that has learned something has a final {metric.word} yet."
    else:
        why = "" if target.is_baseline else f": the best one here{f', as {baselines[0]} has none' if baselines else ''}"
        value = metric.text(target.value)
        yield f"Common target: {value}, the final {metric.word} of {target.method}{margin}{why}."
    yield from _trial_notes(analysis)
    yield from (diverged_note(result, analysis) for result in analysis.methods if result.num_diverged)
    lengths = sorted({run.planned_epochs for run in analysis.experiment.runs if run.planned_epochs})
    if len(lengths) > 1:
        yield (
            f"Runs ask for different numbers of epochs ({', '.join(map(str, lengths))}): the stages are those of the "
            f"longest. Keep such runs in different folders."
        )


def _trial_notes(analysis: Analysis) -> Iterator[str]:
    for result in analysis.methods:
        start = f"{result.method}: {result.num_finished} of {len(result.trials)} trials finished"
        last_epoch = max((run.last.epoch for run in result.trials if run.last), default=None)
        if last_epoch is None:
            yield f"{start}, no epoch recorded yet."
        elif not result.num_finished:
            yield f"{start}, epoch {last_epoch} reached; no final value, means over trials that got so far."
        elif result.num_finished < len(result.trials):
            yield f"{start}; all numbers are over those."
    single = [result.method for result in analysis.methods if len(result.runs) == 1]
    if single:
        yield f"A single trial, hence no standard error: {', '.join(single)}."
    seeds = {result.method: ", ".join(str(run.header.seed) for run in result.runs) for result in analysis.methods}
    if len(set(seeds.values())) > 1:
        yield "Not all methods have the same seeds: " + "; ".join(f"{m} {s}" for m, s in seeds.items()) + "."


def diverged_note(result: MethodResult, analysis: Analysis) -> str:
    """Return a note on the number of diverged trials and on the trials in the mean loss."""
    start = f"{result.method}: {result.num_diverged} of {len(result.trials)} trials diverged"
    final = _final(result, LOSS, analysis.experiment.length)
    over = f"the final loss is a mean over {final.num_trials} that did not" if final else "there is no final loss"
    return f"{start} (no finite validation loss in the last epoch); {over}, the accuracy counts all that recorded one."


# What adaptive methods gained


def gains_table(analysis: Analysis, gains: Sequence[Gain]) -> Table | None:
    """Make the table of adaptive methods against fixed batches; None: there are no gains."""
    if not gains:
        return None
    rows = [
        [
            gain.result.method,
            f"{_with_size(gain.baseline)}, {' and '.join(gain.roles)}",
            f"{gain.num_seeds}",
            MISSING if gain.metric is None else metric_in_words(gain.metric, analysis.metric),
            _number(gain.steps.value if gain.steps else None, ".2f"),
            MISSING if gain.seconds is None else ratio_in_words(gain.seconds),
        ]
        for gain in gains
    ]
    columns = ["method", "against", "seeds", analysis.metric.word, "steps", "seconds"]
    return Table("gains", "Adaptive methods against fixed batches", columns, rows, list(_gain_notes(analysis)))


def _with_size(result: MethodResult) -> str:
    return f"{result.method} ({result.first_batch_size or 0:.0f})"


def _gain_notes(analysis: Analysis) -> Iterator[str]:
    yield (
        f"Final {analysis.metric.word}: the difference to the fixed batch. Steps and seconds: ratios to it, below 1 if "
        "less was needed. Means over the seeds that both have finished, in parentheses Student's 95 % interval. 'No "
        "difference shown': the interval holds a gain (plus sign) and a loss."
    )
    yield "Seconds are those of training alone. The cost of finding the best fixed batch is not counted."
    yield "On many devices the ratio of steps bounds what the ratio of seconds can come down to."
    best, name = best_fixed(analysis), analysis.experiment.settings.customary
    if best is not None:
        fixed = [_with_size(each) for each in analysis.methods if each.is_fixed]
        yield (
            f"{BEST.capitalize()}: {best.method}, the best in final {analysis.metric.word} or, of those within one "
            f"standard error of the best, the quickest. Fixed batches here: {', '.join(fixed)}."
        )
    if name is not None and not any(each.method == name and each.num_finished for each in analysis.methods):
        yield f"The {CUSTOMARY}, {name}, has no finished run."
    if any(run.header.config.get("seconds") is not None for run in analysis.experiment.runs):
        yield "Runs end after some seconds of training, so that methods see different numbers of samples."
    if not analysis.is_timed:
        yield "Seconds are left out where two methods ran on different hardware."


# What it cost


def cost_table(analysis: Analysis) -> Table:
    """Make the table of steps, samples, seconds and memory at the end of the counting trials, averaged over trials."""
    cells: dict[str, Callable[[MethodResult], str]] = {
        "batch size, first -> largest": lambda r: size_range(r.first_batch_size, r.largest_batch_size),
        "steps": lambda result: _number(result.final_mean("steps"), ".0f"),
        "10^6 samples": lambda result: _number(_scaled(result.final_mean("samples"), 1e-6), ".4g"),
        "samples per s": lambda result: _number(_samples_per_second(result), ".0f"),
        "train s": lambda result: _seconds(result.final_mean("train_seconds")),
        "eval s": lambda result: _seconds(result.final_mean("eval_seconds")),
        "compile s": lambda result: _seconds(result.final_mean("compile_seconds")),
        "peak MiB": lambda result: _number(_scaled(_peak_bytes(result), 1 / MEBIBYTE), ".0f"),
    }
    columns = {name: [cell(result) for result in analysis.methods] for name, cell in cells.items()}
    shown = {name: column for name, column in columns.items() if not set(column) <= {MISSING, seconds(0.0)}}
    rows = [[r.method, *(column[index] for column in shown.values())] for index, r in enumerate(analysis.methods)]
    return Table("cost", "Cost", ["method", *shown], rows, list(_cost_notes(analysis)))


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value


def _samples_per_second(result: MethodResult) -> float | None:
    """Return the samples per second, averaged over timed runs."""
    last = [run.last for run in result.runs if run.last]
    known = [record.samples / record.train_seconds for record in last if record.train_seconds]
    return fmean(known) if known else None


def _peak_bytes(result: MethodResult) -> float | None:
    peaks = [record.peak_memory_bytes for run in result.runs for record in run.epochs]
    return max((peak for peak in peaks if peak is not None), default=None)


def _cost_notes(analysis: Analysis) -> Iterator[str]:
    yield "Numbers to the end of training, means over trials. Train s leaves out evaluation and compilation."
    unfinished = [result.method for result in analysis.methods if not result.num_finished]
    if unfinished:
        yield f"Not finished, numbers so far: {', '.join(unfinished)}."
    shapes = {result.method: result.final_mean("recompiles") for result in analysis.methods}
    compiled = [f"{method} {number:.0f}" for method, number in shapes.items() if number]
    if compiled:
        yield f"Different batch shapes that were compiled: {', '.join(compiled)}."
    on_cpu = " On a CPU it is the resident peak of the process, with everything else that the process holds."
    is_on_gpu = all(run.is_on_gpu for run in analysis.experiment.runs)
    yield f"Peak MiB: the highest memory use of all epochs of all these trials.{'' if is_on_gpu else on_cpu}"


# Memory


def memory_table(analysis: Analysis) -> Table | None:
    """Make the paper's memory table: the memory of each method beside that of fixed batches of the same sizes.

    None: no run on a GPU recorded memory; on a CPU, records have the peak of the whole process.
    """
    epochs = {result.method: _epochs_with_memory(result.runs) for result in analysis.methods}
    peaks: dict[int, list[float]] = defaultdict(list)
    for result in analysis.methods:
        fixed = [run for run in result.runs if run.kind_of("method", "policy") == "fixed"]
        for record in _epochs_with_memory(fixed):
            peaks[record.batch_size].append(_peak(record))
    expected = {size: fmean(values) for size, values in peaks.items()}
    rows = [
        [
            method,
            _listed_sizes(records),
            f"{fmean(map(_peak, records)) / MEBIBYTE:.0f}",
            _memory_ratio(records, expected),
            f"{sum(record.batch_size in expected for record in records)} of {len(records)}",
            _memory_ratio([record for record in records if record.measured], expected),
        ]
        for method, records in epochs.items()
        if records
    ]
    if not rows:
        return None
    columns = ["method", "batch sizes", "average of epochs (MiB)", "ratio to fixed batch", "epochs compared"]
    notes = [
        "Peak memory of the GPU in each epoch, in MiB (2^20 bytes), averaged over the epochs of the trials that count.",
        "Ratio to fixed batch: the average, divided by the average that the fixed-batch runs here have at each epoch's "
        "batch size. Epochs at a size that no fixed-batch run here has are left out; 'epochs compared' counts the "
        "others. Ratio while measuring: the same over the epochs in which gradient norms were measured.",
    ]
    missing = [method for method, records in epochs.items() if not records]
    notes += [f"No GPU memory recorded: {', '.join(missing)}."] if missing else []
    return Table("memory", "Average of peak memory", [*columns, "ratio while measuring"], rows, notes)


def _epochs_with_memory(runs: Sequence[RecordedRun]) -> list[EpochRecord]:
    return [r for run in runs if run.is_on_gpu for r in run.epochs if r.peak_memory_bytes is not None]


def _peak(record: EpochRecord) -> float:
    return float(record.peak_memory_bytes or 0)


def _memory_ratio(epochs: Sequence[EpochRecord], expected: Mapping[int, float]) -> str:
    compared = [record for record in epochs if record.batch_size in expected]
    whole = sum(expected[record.batch_size] for record in compared)
    return f"{sum(map(_peak, compared)) / whole:.2f}" if whole else MISSING


def _listed_sizes(epochs: Sequence[EpochRecord]) -> str:
    """Return every size if there are few, or else their number and range."""
    sizes = sorted({record.batch_size for record in epochs})
    if len(sizes) <= MAX_SIZES:
        return ", ".join(map(str, sizes))
    return f"{len(sizes)} sizes, {sizes[0]} to {sizes[-1]}"


# Settings


def settings_json(experiment: RecordedExperiment) -> str:
    """Return as JSON the settings, versions and hardware that all runs share, and each method's differences."""
    flat = {method: [_flat(_settings_of(run)) for run in runs] for method, runs in experiment.methods.items()}
    blocks: dict[str, dict[str, Any]] = {"all runs": {}, **{method: {} for method in flat}}
    for key in dict.fromkeys(key for group in flat.values() for run in group for key in run):
        by_method = {method: _distinct(group, key) for method, group in flat.items()}
        first, *others = by_method.values()
        if all(value == first for value in others):
            blocks["all runs"][key] = first
        else:
            for method, value in by_method.items():
                blocks[method] |= {} if value is None else {key: value}
    # Shared settings line by line, then a line for each method.
    shared = json.dumps(blocks.pop("all runs"), indent=4, ensure_ascii=False)
    lines = [f"{json.dumps(name)}: {json.dumps(block, ensure_ascii=False)}" for name, block in blocks.items()]
    return "{\n" + ",\n".join([f'"all runs": {shared}', *lines]) + "\n}"


def _settings_of(run: RecordedRun) -> dict[str, Any]:
    header = run.header
    config = {key: value for key, value in header.config.items() if key not in HIDDEN}
    ran = {"versions": header.versions, "hardware": header.hardware, "git_commit": header.git_commit}
    return {**config, **ran, "parameters": header.num_parameters, "seeds": header.seed}


def _distinct(group: Sequence[Mapping[str, Any]], key: str) -> Any:
    """Return the common value, or a list of the first different values."""
    values = [json.loads(text) for text in dict.fromkeys(json.dumps(run.get(key)) for run in group)]
    if len(values) == 1:
        return values[0]
    return values[:MAX_VALUES] + [f"and {len(values) - MAX_VALUES} more"] * (len(values) > MAX_VALUES)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
