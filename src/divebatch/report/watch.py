"""Runs as they stand, from their records alone: what is under way, how fast, how long still."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from divebatch.errors import RecordError
from divebatch.records import EpochRecord, read_run, was_stopped
from divebatch.report.runs import RecordedRun

SILENT_EPOCHS, SILENT_SECONDS = 5, 60.0
"""A run that wrote nothing for so many of its epochs, and at least so many seconds, counts as stopped."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One run at one moment."""

    run: RecordedRun
    state: str
    """running, finished or stopped."""
    silent_seconds: float
    """Since its records last changed."""

    @property
    def name(self) -> str:
        """Experiment, method and seed, safe to print."""
        header = self.run.header
        return _printable(f"{header.experiment} {header.method} seed {header.seed}")

    @property
    def last(self) -> EpochRecord | None:
        return self.run.last

    @property
    def best(self) -> str:
        """The best value of the run's metric so far, as text; empty where there is none."""
        metric = self.run.header.metric
        values = [metric.of(record) for record in self.run.epochs]
        best = metric.best(value for value in values if value is not None)
        return "" if best is None else metric.text(best)

    @property
    def samples_per_second(self) -> float | None:
        """The speed of training in the last epoch."""
        *_, before, last = (None, None, *self.run.epochs)
        return rate_between(before, last) if last else None

    @property
    def seconds_left(self) -> float | None:
        """If the rest goes on as fast as the run has gone so far."""
        return time_left(self.last, self.run.planned_epochs) if self.last and self.state == "running" else None


def rate_between(before: EpochRecord | None, record: EpochRecord) -> float | None:
    """Samples trained on a second of training, from one epoch's end to the next one's."""
    if record.train_seconds is None or (before is not None and before.train_seconds is None):
        return None
    samples = record.samples - (before.samples if before else 0)
    seconds = record.train_seconds - ((before.train_seconds or 0.0) if before else 0.0)
    return samples / seconds if seconds > 0 else None


def time_left(record: EpochRecord, planned_epochs: int | None) -> float | None:
    """Seconds, everything included, at the average pace so far."""
    if planned_epochs is None or record.total_seconds is None or record.epoch < 1:
        return None
    return max(0, planned_epochs - record.epoch) * record.total_seconds / record.epoch


@dataclass(slots=True)
class Watch:
    """Reads a folder again and again; files that have not changed are not read twice."""

    folder: Path
    _read: dict[Path, tuple[tuple[int, int], RecordedRun, bool]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Files that could not be read at the last look."""

    def look(self) -> list[Standing]:
        """Every run there is: running ones first, then by name."""
        self.problems.clear()
        found = [self._standing(path) for path in sorted(self.folder.glob("**/seed-*.jsonl"))]
        order = ("running", "stopped", "finished")
        standings = [standing for standing in found if standing is not None]
        return sorted(standings, key=lambda each: (order.index(each.state), *_place(each.run)))

    def _standing(self, path: Path) -> Standing | None:
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if self._read.get(path, (None,))[0] != stamp:
                header, epochs = read_run(path)
                self._read[path] = (stamp, RecordedRun(header, tuple(epochs)), was_stopped(path))
        except (RecordError, OSError) as error:
            self.problems.append(_printable(str(error)))
            return None
        (_, run, has_stopped), silent = self._read[path], max(0.0, time.time() - status.st_mtime)
        return Standing(run, "stopped" if has_stopped else _state(run, silent), silent)


def _place(run: RecordedRun) -> tuple[str, str, int]:
    return run.header.experiment, run.header.method, run.header.seed


def _state(run: RecordedRun, silent: float) -> str:
    if run.is_finished():
        return "finished"
    pace = (run.last.total_seconds or 0.0) / run.last.epoch if run.last else 0.0
    return "stopped" if silent > max(SILENT_SECONDS, SILENT_EPOCHS * pace) else "running"


def _printable(text: str) -> str:
    """A terminal would obey control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)
