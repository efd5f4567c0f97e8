"""The paper's memory table: peak GPU memory of each method, beside plain SGD at the same batch sizes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from divebatch.records import EpochRecord
from divebatch.report.cost import MEBIBYTE
from divebatch.report.runs import Experiment, Run
from divebatch.report.table import MISSING, Table

MAX_SIZES = 5
"""So many batch sizes are listed one by one."""
COLUMNS = [
    *("method", "batch sizes", "average of epochs (MiB)", "maximum (MiB)"),
    *("ratio to fixed batch", "epochs compared", "ratio while measuring"),
]
NOTES = [
    "Peak memory of the GPU in each epoch, in MiB (2^20 bytes). Average: over all epochs of all trials.",
    "Ratio to fixed batch: the average, divided by the average that the fixed-batch runs here have at each epoch's "
    "batch size. Epochs at a size that no fixed-batch run here has are left out of both; 'epochs compared' counts the "
    "others, over all trials. Ratio while measuring: the same over the epochs in which gradient norms were measured.",
]

Epochs = list[EpochRecord]


def memory_table(experiment: Experiment) -> Table | None:
    """None where no run on a GPU recorded its memory: a CPU's records hold the whole process's peak."""
    epochs = {method: _epochs_with_memory(runs) for method, runs in experiment.methods.items()}
    references = _fixed_peaks(experiment)
    rows = [_row(method, records, references) for method, records in epochs.items() if records]
    notes = [*NOTES, *_missing_notes(epochs)]
    return Table(f"{experiment.name}: peak memory", COLUMNS, rows, notes) if rows else None


def _row(method: str, epochs: Epochs, references: Mapping[int, float]) -> list[str]:
    peaks = [_peak(record) for record in epochs]
    compared = [record for record in epochs if record.batch_size in references]
    return [
        method,
        _sizes(epochs),
        f"{fmean(peaks) / MEBIBYTE:.0f}",
        f"{max(peaks) / MEBIBYTE:.0f}",
        _ratio(compared, references),
        f"{len(compared)} of {len(epochs)}",
        _ratio([record for record in compared if record.measured], references),
    ]


def _epochs_with_memory(runs: Sequence[Run]) -> Epochs:
    return [r for run in runs if run.is_on_gpu for r in run.epochs if r.peak_memory_bytes is not None]


def _fixed_peaks(experiment: Experiment) -> dict[int, float]:
    """Batch size -> mean peak in bytes over all epochs of the runs that keep to it."""
    peaks: dict[int, list[float]] = defaultdict(list)
    fixed = [run for run in experiment.runs if run.kind_of("method", "policy") == "fixed"]
    for record in _epochs_with_memory(fixed):
        peaks[record.batch_size].append(_peak(record))
    return {size: fmean(values) for size, values in peaks.items()}


def _ratio(epochs: Epochs, references: Mapping[int, float]) -> str:
    expected = sum(references[record.batch_size] for record in epochs)
    return f"{sum(map(_peak, epochs)) / expected:.2f}" if expected else MISSING


def _sizes(epochs: Epochs) -> str:
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
