"""What each method's training took: steps, samples, seconds, memory."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from divebatch.report.curves import average_curve
from divebatch.report.runs import Experiment, Run
from divebatch.report.table import MISSING, Table, batch_size_range, seconds
from divebatch.report.targets import Progress, progress_of

MEBIBYTE = 2**20

Cell = Callable[[Sequence[Run]], str]


def cost_table(experiment: Experiment) -> Table:
    """One row a method: numbers at the end of its finished trials, or at the last epoch recorded while none has."""
    cells: dict[str, Cell] = {
        "batch size, first → largest": _sizes,
        "steps": lambda runs: _whole(_final_mean(runs, "steps")),
        "10^6 samples": lambda runs: _millions(_final_mean(runs, "samples")),
        "samples per s": lambda runs: _whole(samples_per_second(runs)),
        "train s": lambda runs: _seconds(_final_mean(runs, "train_seconds")),
        "eval s": lambda runs: _seconds(_final_mean(runs, "eval_seconds")),
        "compile s": lambda runs: _seconds(_final_mean(runs, "compile_seconds")),
        "peak MiB": lambda runs: _whole(_mean(_peak_mebibytes(run) for run in runs)),
    }
    methods = progress_of(experiment)
    columns = {name: [cell(progress.runs) for progress in methods] for name, cell in cells.items()}
    shown = {name: column for name, column in columns.items() if set(column) != {MISSING}}
    rows = [[p.method, *(column[index] for column in shown.values())] for index, p in enumerate(methods)]
    return Table(f"{experiment.name}: cost", ["method", *shown], rows, list(_notes(experiment, methods)))


def samples_per_second(runs: Sequence[Run]) -> float | None:
    """Of training, to the end of each run; mean over those that were timed."""
    last = [run.last for run in runs if run.last]
    return _mean(record.samples / record.train_seconds if record.train_seconds else None for record in last)


def _sizes(runs: Sequence[Run]) -> str:
    begun = [run.batch_sizes for run in runs if run.epochs]
    if not begun:
        return MISSING
    return batch_size_range(fmean(sizes[0] for sizes in begun), fmean(map(max, begun)), " → ")


def _notes(experiment: Experiment, methods: list[Progress]) -> Iterator[str]:
    yield "Numbers to the end of training, means over trials. Train s leaves out evaluation and compilation."
    if not all(progress.is_finished for progress in methods):
        unfinished = ", ".join(progress.method for progress in methods if not progress.is_finished)
        yield f"Not finished, numbers so far: {unfinished}."
    shapes = {progress.method: _final_mean(progress.runs, "recompiles") for progress in methods}
    compiled = [f"{method} {number:.0f}" for method, number in shapes.items() if number is not None]
    if compiled:
        yield f"Different batch shapes that were compiled: {', '.join(compiled)}."
    yield "Peak MiB: the highest memory use of all epochs." + _cpu_note(experiment)


def _cpu_note(experiment: Experiment) -> str:
    if all(run.is_on_gpu for run in experiment.runs):
        return ""
    return " On a CPU it is the resident peak of the process, with everything else that the process holds."


def _peak_mebibytes(run: Run) -> float | None:
    peaks = [record.peak_memory_bytes for record in run.epochs if record.peak_memory_bytes is not None]
    return max(peaks) / MEBIBYTE if peaks else None


def _final_mean(runs: Sequence[Run], field: str) -> float | None:
    final = average_curve(runs, field).final()
    return final.mean if final else None


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _whole(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0f}"


def _millions(value: float | None) -> str:
    return MISSING if value is None else f"{value / 1e6:.4g}"


def _seconds(value: float | None) -> str:
    return MISSING if value is None else seconds(value)
