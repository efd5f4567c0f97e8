"""Watch runs through their records: state, speed, time left."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from divebatch.errors import RecordError
from divebatch.records import EpochRecord, read_run, was_stopped
from divebatch.report.load import RecordedRun

SILENT_EPOCHS, SILENT_SECONDS = 5, 60.0
"""Silence after which a run counts as stopped: five of its epochs, and at least a minute."""
STATES = ("running", "stopped", "finished")


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a run at one moment."""

    run: RecordedRun
    state: str
    """The run's state, one of `STATES`."""
    silent_seconds: float
    """Seconds since the records last changed."""

    @property
    def name(self) -> str:
        return printable(f"{self.run.header.method} seed {self.run.header.seed}")

    @property
    def best(self) -> str:
        """Return the metric's best value so far as text, which is empty if there is none."""
        metric = self.run.header.metric
        values = [metric.of(record) for record in self.run.epochs]
        best = metric.best(value for value in values if value is not None)
        return "" if best is None else metric.text(best)

    @property
    def samples_per_second(self) -> float | None:
        """Return the speed of training in the last epoch."""
        *_, before, last = (None, None, *self.run.epochs)
        return rate_between(before, last) if last else None

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds left at the average pace so far; None: the run is not running."""
        last = self.run.last
        return time_left(last, self.run.planned_epochs) if last and self.state == "running" else None


def rate_between(before: EpochRecord | None, record: EpochRecord) -> float | None:
    """Return the samples per second of training between the ends of two epochs."""
    if record.train_seconds is None or (before is not None and before.train_seconds is None):
        return None
    samples = record.samples - (before.samples if before else 0)
    seconds = record.train_seconds - ((before.train_seconds or 0.0) if before else 0.0)
    return samples / seconds if seconds > 0 else None


def time_left(record: EpochRecord, planned_epochs: int | None) -> float | None:
    """Return the seconds left at the average pace so far, evaluation and compilation included."""
    if planned_epochs is None or record.total_seconds is None or record.epoch < 1:
        return None
    return max(0, planned_epochs - record.epoch) * record.total_seconds / record.epoch


@dataclass(slots=True)
class Watch:
    """A reader of a folder's runs that only reads files that have changed since its last look."""

    folder: Path
    _read: dict[Path, tuple[tuple[int, int], RecordedRun, bool]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Files that could not be read at the last look."""

    def look(self) -> list[Standing]:
        """Return every run, running ones first, then by name."""
        self.problems.clear()
        found = [self._standing(path) for path in sorted(self.folder.glob("**/seed-*.jsonl"))]

        def place(each: Standing) -> tuple[int, str, str, int]:
            header = each.run.header
            return STATES.index(each.state), header.experiment, header.method, header.seed

        return sorted((standing for standing in found if standing is not None), key=place)

    def _standing(self, path: Path) -> Standing | None:
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if self._read.get(path, (None,))[0] != stamp:
                header, epochs = read_run(path)
                self._read[path] = (stamp, RecordedRun(header, tuple(epochs)), was_stopped(path))
        except (RecordError, OSError) as error:
            self.problems.append(printable(str(error)))
            return None
        (_, run, has_stopped), silent = self._read[path], max(0.0, time.time() - status.st_mtime)
        return Standing(run, "stopped" if has_stopped else _state(run, silent), silent)


def _state(run: RecordedRun, silent: float) -> str:
    if run.is_finished():
        return "finished"
    pace = (run.last.total_seconds or 0.0) / run.last.epoch if run.last else 0.0
    return "stopped" if silent > max(SILENT_SECONDS, SILENT_EPOCHS * pace) else "running"


def printable(text: str) -> str:
    """Replace control characters, which a terminal would execute."""
    return "".join(character if character.isprintable() else "?" for character in text)
