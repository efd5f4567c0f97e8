"""The interface of a logger: three methods."""

from pathlib import Path
from typing import Protocol

from divebatch.records import EpochRecord, RunHeader


class Logger(Protocol):
    """Told of one run from its start to its end. Records are written anyway; a logger shows them elsewhere as well."""

    def start(self, header: RunHeader, folder: Path, *, epochs_done: int) -> None:
        """The run begins, or goes on after `epochs_done` epochs. `folder` is the run's own, for files."""
        ...

    def log(self, record: EpochRecord) -> None:
        """An epoch has ended."""
        ...

    def close(self) -> None:
        """The run has ended, or stopped: write down what is pending."""
        ...


SCALARS = {
    "train/loss": "train_loss",
    "val/loss": "val_loss",
    "val/accuracy": "val_accuracy",
    "batch/size": "batch_size",
    "batch/diversity": "diversity",
    "batch/exact_diversity": "exact_diversity",
    "lr": "lr",
    "progress/steps": "steps",
    "progress/samples": "samples",
    "progress/train_seconds": "train_seconds",
    "memory/peak_bytes": "peak_memory_bytes",
}
"""The name a logger shows: the record's field."""


def scalars(record: EpochRecord) -> dict[str, float]:
    """The values of an epoch by the name to show; those that were not measured are left out."""
    values = {name: getattr(record, field) for name, field in SCALARS.items()}
    return {name: value for name, value in values.items() if value is not None}
