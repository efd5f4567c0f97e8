"""What a run shows while it runs: live bars on a terminal, a few plain lines elsewhere."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from divebatch.errors import ArgumentError
from divebatch.record_line import seen_in_words
from divebatch.records import EpochRecord
from divebatch.report.live import rate_between, time_left

if TYPE_CHECKING:
    from divebatch.lab.experiments import Run


def duration(seconds: float | None) -> str:
    """Two units at most.

    >>> duration(7.4), duration(83), duration(7260), duration(None)
    ('7s', '1m 23s', '2h 01m', '')
    """
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def rate(per_second: float | None) -> str:
    """Three digits and a thousands' letter.

    >>> rate(84.2), rate(1234.5), rate(2345678.0)
    ('84.2', '1.23k', '2.35M')
    """
    if per_second is None:
        return ""
    for bound, divisor, letter in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (float("inf"), 1e6, "M")):
        if per_second < bound:
            return f"{per_second / divisor:.3g}{letter}"
    return "inf"


class Display:
    """Is told of every finished epoch. This one says nothing."""

    def on_epoch(self, index: int, record: EpochRecord) -> None:
        """Run number `index` has finished an epoch."""

    def on_resume(self, index: int, record: EpochRecord) -> None:
        """Run number `index` goes on after an epoch that it had finished before."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def mode_of(*, quiet: bool, json: bool) -> str:
    """`show`, `quiet` or `json`."""
    if quiet and json:
        raise ArgumentError("--quiet and --json exclude each other: leave one of them out")
    return "quiet" if quiet else "json" if json else "show"


def make_display(runs: Sequence["Run"], mode: str = "show") -> Display:
    """Bars where somebody watches, lines where a file does; JSON or nothing where that was asked for."""
    if mode == "quiet":
        return Display()
    if mode == "json":
        return UntilNobodyListens(JsonLines(runs))
    console = Console()
    return UntilNobodyListens(ProgressBars(runs, console) if console.is_terminal else Lines(runs))


def name_of(run: "Run") -> str:
    """`divebatch seed 3`."""
    return f"{run.method_name} seed {run.seed}"


def describe(record: EpochRecord, before: EpochRecord | None = None) -> str:
    """The numbers of an epoch that people watch; the speed is that since `before`."""
    parts = [f"batch {record.batch_size}", f"lr {record.lr:.4g}"]
    if record.diversity is not None or record.noise_scale_low is not None:
        parts.append(seen_in_words(record))
    parts.append("val loss diverged" if record.val_loss is None else f"val loss {record.val_loss:.4f}")
    if record.val_accuracy is not None:
        parts.append(f"accuracy {100 * record.val_accuracy:.2f} %")
    if record.bits_per_byte is not None:
        parts.append(f"{record.bits_per_byte:.4f} bits per byte")
    speed = rate(rate_between(before, record))
    return "  ".join([*parts, f"{speed} samples/s"] if speed else parts)


class UntilNobodyListens(Display):
    """Another display until the output cannot be written, a closed pipe or a full disk: that must not end training."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def on_epoch(self, index: int, record: EpochRecord) -> None:
        with self._unless_deaf():
            self._display.on_epoch(index, record)

    def on_resume(self, index: int, record: EpochRecord) -> None:
        with self._unless_deaf():
            self._display.on_resume(index, record)

    def __enter__(self) -> Self:
        with self._unless_deaf():
            self._display.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        with self._unless_deaf():
            self._display.__exit__()

    @contextmanager
    def _unless_deaf(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._display = Display()
            with suppress(OSError):
                print(f"divebatch: stdout: {error.strerror}; training goes on", file=sys.stderr, flush=True)
            # Whatever else is printed, by Python itself at its end too, goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


class JsonLines(Display):
    """The epoch's record with its run's names, one object a line: for programs."""

    def __init__(self, runs: Sequence["Run"]) -> None:
        self._runs = runs

    def on_epoch(self, index: int, record: EpochRecord) -> None:
        run = self._runs[index]
        names = {"experiment": run.experiment.name, "method": run.method_name, "seed": run.seed}
        print(json.dumps({**names, **json.loads(record.to_json())}), flush=True)


class ProgressBars(Display):
    """A bar for all epochs of all runs, and one for each run under way."""

    def __init__(self, runs: Sequence["Run"], console: Console) -> None:
        self._runs = runs
        columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"))
        self._progress = Progress(TextColumn("{task.description}"), *columns, console=console)
        total = sum(run.experiment.epochs for run in runs)
        self._all = self._progress.add_task(runs[0].experiment.name, total=total, numbers=f"{len(runs)} runs")
        self._tasks: dict[int, TaskID] = {}
        self._before: dict[int, EpochRecord] = {}

    def on_epoch(self, index: int, record: EpochRecord) -> None:
        """Move both bars; a finished run's bar goes away."""
        run = self._runs[index]
        numbers = describe(record, self._before.get(index))
        self._move(index, record, numbers)
        if record.epoch == run.experiment.epochs:
            self._progress.remove_task(self._tasks[index])
            self._progress.console.print(f"{name_of(run)}: {numbers}", highlight=False, markup=False)

    def on_resume(self, index: int, record: EpochRecord) -> None:
        """Both bars begin where the run had got to."""
        if record.epoch < self._runs[index].experiment.epochs:
            self._move(index, record, "")
        else:
            self._progress.advance(self._all, record.epoch)

    def _move(self, index: int, record: EpochRecord, numbers: str) -> None:
        run, before = self._runs[index], self._before.get(index)
        if index not in self._tasks:
            self._tasks[index] = self._progress.add_task(name_of(run), total=run.experiment.epochs, numbers="")
        self._progress.update(self._tasks[index], completed=record.epoch, numbers=numbers)
        self._progress.advance(self._all, record.epoch - (before.epoch if before else 0))
        self._before[index] = record

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class Lines(Display):
    """Four lines a run, without any escape codes."""

    def __init__(self, runs: Sequence["Run"]) -> None:
        self._runs = runs
        self._before: dict[int, EpochRecord] = {}

    def on_epoch(self, index: int, record: EpochRecord) -> None:
        """At each quarter of the run, one line."""
        run = self._runs[index]
        epochs, before = run.experiment.epochs, self._before.get(index)
        # Not the epoch's number less one: where epochs are parts of a pass, one batch may carry a run over several.
        if (4 * record.epoch) // epochs > (4 * (before.epoch if before else record.epoch - 1)) // epochs:
            left = duration(time_left(record, epochs)) if record.epoch < epochs else ""
            numbers = describe(record, before) + (f"  {left} left" if left else "")
            print(f"{name_of(run)}: epoch {record.epoch}/{epochs}  {numbers}", flush=True)
        self._before[index] = record

    def on_resume(self, index: int, record: EpochRecord) -> None:
        """One line: what was printed before is not printed again."""
        run = self._runs[index]
        is_complete = record.epoch >= run.experiment.epochs
        print(f"{name_of(run)}: {'was complete' if is_complete else f'goes on after epoch {record.epoch}'}", flush=True)
        self._before[index] = record
