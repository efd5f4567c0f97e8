"""Show the progress of runs: live bars on a terminal, a few plain lines elsewhere."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from divebatch.records import EpochRecord, seen_in_words
from divebatch.report.live import rate_between, time_left

if TYPE_CHECKING:
    from divebatch.lab import Run

SECONDS_BETWEEN = 60.0
"""Seconds between two lines about the same run."""


def duration(seconds: float | None) -> str:
    """Format seconds in at most two units.

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
    """Format a rate with three digits and a letter for thousands.

    >>> rate(84.2), rate(1234.5), rate(2345678.0)
    ('84.2', '1.23k', '2.35M')
    """
    if per_second is None:
        return ""
    divisor, letter = (1, "") if per_second < 1e3 else (1e3, "k") if per_second < 1e6 else (1e6, "M")
    return f"{per_second / divisor:.3g}{letter}"


def name_of(run: "Run") -> str:
    """Return text like `divebatch seed 3`."""
    return f"{run.method_name} seed {run.seed}"


def describe(record: EpochRecord, before: EpochRecord | None = None) -> str:
    """Summarize an epoch in numbers, the result first; the speed counts from `before`."""
    is_measured = record.diversity is not None or record.noise_scale_low is not None
    speed = rate(rate_between(before, record))
    parts = (
        "" if record.val_accuracy is None else f"accuracy {100 * record.val_accuracy:.2f} %",
        "" if record.bits_per_byte is None else f"{record.bits_per_byte:.4f} bits per byte",
        "val loss diverged" if record.val_loss is None else f"val loss {record.val_loss:.4f}",
        f"batch {record.batch_size}",
        f"lr {record.lr:.4g}",
        seen_in_words(record) if is_measured else "",
        f"{speed} samples/s" if speed else "",
    )
    return "  ".join(filter(None, parts))


class Display:
    """A display of finished epochs, which ends if the output cannot be written; training continues.

    This base class shows nothing.
    """

    def __init__(self, runs: Sequence["Run"]) -> None:
        self._runs = runs
        self._before: dict[int, EpochRecord] = {}
        self._is_heard = True

    def on_epoch(self, index: int, record: EpochRecord, *, was_done: bool = False) -> None:
        """Show an epoch that run number `index` has finished, or resumes after if the epoch `was_done`."""
        self._unless_deaf(self._show, index, record, was_done)
        self._before[index] = record

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def _unless_deaf(self, show: Callable[..., None], *arguments: Any) -> None:
        try:
            if self._is_heard:
                show(*arguments)
        except OSError as error:
            self._is_heard = False
            with suppress(OSError):
                print(f"divebatch: stdout: {error.strerror}; training continues", file=sys.stderr, flush=True)
            # Discard all further output, also what Python flushes at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)

    def _show(self, index: int, record: EpochRecord, was_done: bool) -> None: ...


class JsonLines(Display):
    """A JSON object per epoch, for programs: the record with the names of its run."""

    def _show(self, index: int, record: EpochRecord, was_done: bool) -> None:
        run = self._runs[index]
        names = {"experiment": run.experiment.name, "method": run.method_name, "seed": run.seed}
        if not was_done:
            print(json.dumps({**names, **json.loads(record.to_json())}), flush=True)


class Lines(Display):
    """Plain lines without escape codes: one per finished run, one a minute for every other run."""

    def __init__(self, runs: Sequence["Run"]) -> None:
        super().__init__(runs)
        self._shown = [time.monotonic()] * len(runs)

    def _show(self, index: int, record: EpochRecord, was_done: bool) -> None:
        run, now = self._runs[index], time.monotonic()
        epochs, is_last = run.experiment.epochs, record.epoch >= run.experiment.epochs
        if was_done:
            words = "was complete" if is_last else f"goes on after epoch {record.epoch}"
        elif not is_last and now - self._shown[index] < SECONDS_BETWEEN:
            return
        else:
            self._shown[index] = now
            left = "" if is_last else f"  {duration(time_left(record, epochs))} left"
            words = f"epoch {record.epoch}/{epochs}  {describe(record, self._before.get(index))}{left}"
        print(f"{name_of(run)}: {words}", flush=True)


class ProgressBars(Display):
    """A bar for all epochs and one for each active run; on a narrow terminal the numbers are cut."""

    def __init__(self, runs: Sequence["Run"], console: Console) -> None:
        super().__init__(runs)
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(20 if console.width >= 100 else 10),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[numbers]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console,
            expand=True,
        )
        total = sum(run.experiment.epochs for run in runs)
        self._all = self._progress.add_task(runs[0].experiment.name, total=total, numbers=f"{len(runs)} runs")
        self._tasks: dict[int, TaskID] = {}

    def _show(self, index: int, record: EpochRecord, was_done: bool) -> None:
        run, before = self._runs[index], self._before.get(index)
        is_last = record.epoch >= run.experiment.epochs
        numbers = "" if was_done else describe(record, before)
        self._progress.advance(self._all, record.epoch - (before.epoch if before else 0))
        if was_done and is_last:
            return
        if index not in self._tasks:
            self._tasks[index] = self._progress.add_task(name_of(run), total=run.experiment.epochs, numbers="")
        self._progress.update(self._tasks[index], completed=record.epoch, numbers=numbers)
        if is_last:
            self._progress.remove_task(self._tasks[index])
            self._progress.console.print(f"{name_of(run)}: {numbers}", highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._unless_deaf(self._progress.start)
        return self

    def __exit__(self, *_: object) -> None:
        self._unless_deaf(self._progress.stop)


def make_display(runs: Sequence["Run"], mode: str = "show") -> Display:
    """Return bars for a terminal or lines for a file; JSON or nothing if `mode` asks for that."""
    if mode != "show":
        return JsonLines(runs) if mode == "json" else Display(runs)
    console = Console()
    return ProgressBars(runs, console) if console.is_terminal else Lines(runs)
