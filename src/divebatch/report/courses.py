"""What a run did, step by step: how many steps of which size each epoch had, and what they took."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from divebatch.records import EpochRecord
from divebatch.report.runs import RecordedRun

Steps = tuple[int, float]
"""(how many, samples of each)."""


@dataclass(frozen=True, slots=True)
class EpochCourse:
    """The steps of one epoch.

    Args:
        steps: In order; a shorter last batch stands alone.
        num_steps: Of the whole epoch.
        seconds: Of training; None where not recorded.
        batch_size: The size in force; None where it changed within the epoch.
        measured: Whether gradients were measured.
    """

    steps: Sequence[Steps]
    num_steps: int
    seconds: float | None
    batch_size: int | None
    measured: bool

    @property
    def step_seconds(self) -> float | None:
        """Mean over the epoch's steps; None where it has no time."""
        return self.seconds / self.num_steps if self.seconds is not None and self.seconds > 0 else None

    @property
    def samples_of_a_step(self) -> float:
        """Mean over the epoch's steps: a little below the batch size where the last batch is shorter."""
        return sum(count * size for count, size in self.steps) / self.num_steps


def course_of(run: RecordedRun) -> Iterator[EpochCourse]:
    """The epochs of a run that have steps and samples, in order."""
    start = EpochRecord(epoch=0, batch_size=1, lr=0.0, steps=0, samples=0, train_seconds=0.0)
    began = run.planned_batch_size
    for before, record in pairwise([start, *run.epochs]):
        if record.steps > before.steps and record.samples > before.samples:
            yield EpochCourse(
                _steps(before, record, began),
                record.steps - before.steps,
                _seconds(before, record),
                None if record.changes else record.batch_size,
                bool(record.measured),
            )
        began = record.next_batch_size


def _seconds(before: EpochRecord, record: EpochRecord) -> float | None:
    if before.train_seconds is None or record.train_seconds is None:
        return None
    return record.train_seconds - before.train_seconds


def _steps(before: EpochRecord, record: EpochRecord, began: int | None) -> list[Steps]:
    """The last batch may be short; where the samples do not fit that, all steps have the mean size."""
    samples, num_steps = record.samples - before.samples, record.steps - before.steps
    stretches = _stretches(before, record, began)
    missing = sum(count * size for count, size in stretches) - samples
    if not stretches or not 0 <= missing < stretches[-1][1]:
        return [(num_steps, samples / num_steps)]
    count, size = stretches[-1]
    last = [(count - 1, size), (1, size - missing)] if missing else [(count, size)]
    return [each for each in (*stretches[:-1], *last) if each[0]]


def _stretches(before: EpochRecord, record: EpochRecord, began: int | None) -> list[tuple[int, int]]:
    """(steps, size) from one change within the epoch to the next; empty where the first size is not known."""
    changes = record.changes or []
    first = began if changes else record.batch_size
    if first is None:
        return []
    edges = [before.steps, *(change.step for change in changes), record.steps]
    sizes = [first, *(change.batch_size for change in changes)]
    return [(end - start, size) for (start, end), size in zip(pairwise(edges), sizes, strict=True) if end > start]
