"""Memory epoch by epoch, and where the numbers come from: configurations and surroundings of the runs."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from divebatch.records import EpochRecord
from divebatch.report.runs import RecordedExperiment, RecordedRun
from divebatch.report.tables import MEBIBYTE, MISSING, Table

MAX_SIZES = 5
"""So many batch sizes are listed one by one."""
MEMORY_COLUMNS = [
    *("method", "batch sizes", "average of epochs (MiB)", "maximum (MiB)"),
    *("ratio to fixed batch", "epochs compared", "ratio while measuring"),
]
MEMORY_NOTES = [
    "Peak memory of the GPU in each epoch, in MiB (2^20 bytes). Average: over all epochs of all trials.",
    "Ratio to fixed batch: the average, divided by the average that the fixed-batch runs here have at each epoch's "
    "batch size. Epochs at a size that no fixed-batch run here has are left out of both; 'epochs compared' counts the "
    "others, over all trials. Ratio while measuring: the same over the epochs in which gradient norms were measured.",
]

Epochs = list[EpochRecord]


def memory_table(experiment: RecordedExperiment) -> Table | None:
    """The paper's memory table: peak GPU memory of each method, beside plain SGD at the same batch sizes.

    None where no run on a GPU recorded its memory: a CPU's records hold the whole process's peak.
    """
    epochs = {method: _epochs_with_memory(runs) for method, runs in experiment.methods.items()}
    references = _fixed_peaks(experiment)
    rows = [_row(method, records, references) for method, records in epochs.items() if records]
    notes = [*MEMORY_NOTES, *_missing_notes(epochs)]
    return Table(f"{experiment.name}: peak memory", MEMORY_COLUMNS, rows, notes) if rows else None


def _row(method: str, epochs: Epochs, references: Mapping[int, float]) -> list[str]:
    peaks = [_peak(record) for record in epochs]
    compared = [record for record in epochs if record.batch_size in references]
    return [
        method,
        _listed_sizes(epochs),
        f"{fmean(peaks) / MEBIBYTE:.0f}",
        f"{max(peaks) / MEBIBYTE:.0f}",
        _ratio(compared, references),
        f"{len(compared)} of {len(epochs)}",
        _ratio([record for record in compared if record.measured], references),
    ]


def _epochs_with_memory(runs: Sequence[RecordedRun]) -> Epochs:
    return [r for run in runs if run.is_on_gpu for r in run.epochs if r.peak_memory_bytes is not None]


def _fixed_peaks(experiment: RecordedExperiment) -> dict[int, float]:
    """Batch size -> mean peak in bytes over all epochs of the runs that keep to it."""
    peaks: dict[int, list[float]] = defaultdict(list)
    fixed = [run for run in experiment.runs if run.kind_of("method", "policy") == "fixed"]
    for record in _epochs_with_memory(fixed):
        peaks[record.batch_size].append(_peak(record))
    return {size: fmean(values) for size, values in peaks.items()}


def _ratio(epochs: Epochs, references: Mapping[int, float]) -> str:
    expected = sum(references[record.batch_size] for record in epochs)
    return f"{sum(map(_peak, epochs)) / expected:.2f}" if expected else MISSING


def _listed_sizes(epochs: Epochs) -> str:
    """Every size where there are few, else how many and between which."""
    sizes = sorted({record.batch_size for record in epochs})
    if len(sizes) <= MAX_SIZES:
        return ", ".join(map(str, sizes))
    return f"{len(sizes)} sizes, {sizes[0]} to {sizes[-1]}"


def _peak(record: EpochRecord) -> float:
    return float(record.peak_memory_bytes or 0)


def _missing_notes(epochs: Mapping[str, Epochs]) -> Iterator[str]:
    missing = [method for method, records in epochs.items() if not records]
    if missing:
        yield f"No GPU memory recorded: {', '.join(missing)}."


# Settings

MAX_VALUES = 4
"""So many different values of one setting are listed; the rest is counted."""
HIDDEN = frozenset({"seed", "trials", "name", "summary"})
"""Settings that are told better elsewhere: from the runs that there are, or in the heading."""


def settings_tables(experiment: RecordedExperiment) -> list[Table]:
    """Settings that all runs share, settings that differ between methods, and what the runs ran on."""
    configs = {method: [_flat(run.header.config) for run in runs] for method, runs in experiment.methods.items()}
    keys = _keys(config for group in configs.values() for config in group)
    shown = {key: [_distinct(group, key) for group in configs.values()] for key in keys}
    shared = [[key, cells[0]] for key, cells in shown.items() if len(set(cells)) == 1]
    differing = [[key, *cells] for key, cells in shown.items() if len(set(cells)) > 1]
    tables = [
        Table("Settings of all runs", ["setting", "value"], shared, []),
        Table("Settings that differ", ["setting", *configs], differing, []),
        Table("Versions and hardware", ["item", "value"], _surroundings(experiment.runs), []),
    ]
    return [table for table in tables if table.rows]


def summary_line(experiment: RecordedExperiment) -> str:
    """The experiment in a sentence, as its configuration has it; empty where it has none."""
    texts = {str(run.header.config.get("summary", "")) for run in experiment.runs}
    summary = texts.pop() if len(texts) == 1 else ""
    models = sorted({kind for run in experiment.runs if (kind := run.kind_of("model")) is not None})
    # The summary tells of the experiment as planned; `--model` may have put another network in.
    return ". ".join(filter(None, [summary.rstrip("."), f"Model that ran: {', '.join(models)}" if models else ""]))


def _surroundings(runs: Sequence[RecordedRun]) -> list[list[str]]:
    items = [_surrounding(run) for run in runs]
    return [[key, _distinct(items, key)] for key in _keys(items)]


def _surrounding(run: RecordedRun) -> dict[str, str]:
    header = run.header
    return {
        **_flat({"versions": header.versions, "hardware": header.hardware}),
        "git commit": MISSING if header.git_commit is None else str(header.git_commit),
        "seeds": str(header.seed),
    }


def _keys(items: Iterable[Mapping[str, str]]) -> list[str]:
    return [key for key in dict.fromkeys(key for item in items for key in item) if key not in HIDDEN]


def _distinct(items: Sequence[Mapping[str, str]], key: str) -> str:
    """The values that occur, in order of appearance."""
    values = list(dict.fromkeys(item.get(key, MISSING) for item in items))
    rest = [f"and {len(values) - MAX_VALUES} more"] if len(values) > MAX_VALUES else []
    return ", ".join(values[:MAX_VALUES] + rest)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted keys, values as JSON without the quotes of plain text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat
