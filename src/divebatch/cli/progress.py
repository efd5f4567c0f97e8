"""What a run shows while it runs: live bars on a terminal, a few plain lines elsewhere."""

import sys
from collections.abc import Sequence
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from divebatch.experiments import Run
from divebatch.records import EpochRecord


class Display(Protocol):
    """Told of every finished epoch."""

    def on_epoch(self, index: int, record: EpochRecord) -> None:
        """Run number `index` has finished an epoch."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def make_display(runs: Sequence[Run]) -> Display:
    """Bars where somebody watches, lines where a file does."""
    console = Console()
    return Bars(runs, console) if console.is_terminal else Lines(runs)


def name_of(run: Run) -> str:
    """`divebatch seed 3`."""
    return f"{run.method_name} seed {run.seed}"


def describe(record: EpochRecord) -> str:
    """The numbers of an epoch that people watch."""
    loss = "diverged" if record.val_loss is None else f"{record.val_loss:.4f}"
    accuracy = 100 * (record.val_accuracy or 0.0)
    return f"batch {record.batch_size}  lr {record.lr:.4g}  val loss {loss}  accuracy {accuracy:.2f} %"


class Bars:
    """A bar for all epochs of all runs, and one for each run under way."""

    def __init__(self, runs: Sequence[Run], console: Console) -> None:
        self._runs = runs
        columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"))
        self._progress = Progress(TextColumn("{task.description}"), *columns, console=console)
        total = sum(run.experiment.epochs for run in runs)
        self._all = self._progress.add_task(runs[0].experiment.name, total=total, numbers=f"{len(runs)} runs")
        self._tasks: dict[int, TaskID] = {}

    def on_epoch(self, index: int, record: EpochRecord) -> None:
        """Move both bars; a finished run's bar goes away."""
        run = self._runs[index]
        if index not in self._tasks:
            self._tasks[index] = self._progress.add_task(name_of(run), total=run.experiment.epochs, numbers="")
        self._progress.update(self._tasks[index], completed=record.epoch, numbers=describe(record))
        self._progress.advance(self._all)
        if record.epoch == run.experiment.epochs:
            self._progress.remove_task(self._tasks[index])
            self._progress.console.print(f"{name_of(run)}: {describe(record)}", highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class Lines:
    """Four lines a run, without any escape codes."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs

    def on_epoch(self, index: int, record: EpochRecord) -> None:
        """At each quarter of the run, one line."""
        run = self._runs[index]
        epochs = run.experiment.epochs
        if (4 * record.epoch) // epochs > (4 * (record.epoch - 1)) // epochs:
            print(f"{name_of(run)}: epoch {record.epoch}/{epochs}  {describe(record)}")
            sys.stdout.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None
