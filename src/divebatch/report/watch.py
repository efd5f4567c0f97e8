"""Runs as they stand, from their records alone: what is under way, how fast, how long still."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from divebatch.errors import RecordError
from divebatch.records import EpochRecord, RunHeader, read_run

SILENT_EPOCHS, SILENT_SECONDS = 5, 60.0
"""A run that wrote nothing for so many of its epochs, and at least so many seconds, counts as stopped."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One run at one moment."""

    experiment: str
    method: str
    seed: int
    state: str
    """running, finished or stopped."""
    epochs: tuple[EpochRecord, ...]
    planned_epochs: int | None
    silent_seconds: float
    """Since its records last changed."""

    @property
    def last(self) -> EpochRecord | None:
        """The last finished epoch."""
        return self.epochs[-1] if self.epochs else None

    @property
    def samples_per_second(self) -> float | None:
        """Of training, in the last epoch."""
        before = self.epochs[-2] if len(self.epochs) > 1 else None
        return rate_between(before, self.last) if self.last else None

    @property
    def seconds_left(self) -> float | None:
        """If the rest goes on as fast as the run has gone so far."""
        return time_left(self.last, self.planned_epochs) if self.last and self.state == "running" else None


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
    _read: dict[Path, tuple[tuple[int, int], tuple[RunHeader, list[EpochRecord]]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Files that could not be read at the last look."""

    def look(self) -> list[Standing]:
        """Every run there is: running ones first, then by name."""
        self.problems.clear()
        found = [self._standing(path) for path in sorted(self.folder.glob("**/seed-*.jsonl"))]
        order = ("running", "stopped", "finished")
        standings = [standing for standing in found if standing is not None]
        return sorted(standings, key=lambda each: (order.index(each.state), each.experiment, each.method, each.seed))

    def _standing(self, path: Path) -> Standing | None:
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if self._read.get(path, (None,))[0] != stamp:
                self._read[path] = (stamp, read_run(path))
        except (RecordError, OSError, RecursionError, ValueError) as error:
            self.problems.append(_printable(str(error)))
            return None
        header, epochs = self._read[path][1]
        return _standing(header, epochs, max(0.0, time.time() - status.st_mtime))


def _standing(header: RunHeader, epochs: Sequence[EpochRecord], silent: float) -> Standing:
    planned = header.config.get("epochs")
    planned = planned if isinstance(planned, int) else None
    state = _state(epochs, planned, silent)
    names = _printable(header.experiment), _printable(header.method)
    return Standing(*names, header.seed, state, tuple(epochs), planned, silent)


def _state(epochs: Sequence[EpochRecord], planned: int | None, silent: float) -> str:
    if epochs and planned is not None and epochs[-1].epoch >= planned:
        return "finished"
    pace = (epochs[-1].total_seconds or 0.0) / epochs[-1].epoch if epochs and epochs[-1].epoch > 0 else 0.0
    return "stopped" if silent > max(SILENT_SECONDS, SILENT_EPOCHS * pace) else "running"


def _printable(text: str) -> str:
    """A terminal would obey control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)
