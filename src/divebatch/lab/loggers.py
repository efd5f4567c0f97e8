"""Loggers show epochs where people look already (TensorBoard, W&B). A new one is a class and a row of `LOGGERS`."""

import hashlib
import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from divebatch.checks import require_choice
from divebatch.errors import MissingExtraError
from divebatch.records import EpochRecord, RunHeader


class Logger(Protocol):
    """Shows the epochs of one run, which are written to its records anyway."""

    def start(self, header: RunHeader, folder: Path, *, epochs_done: int) -> None:
        """Begin, or continue after `epochs_done` epochs; `folder` is the run's own, for files."""

    def log(self, record: EpochRecord) -> None:
        """Show an epoch that has ended."""

    def close(self) -> None:
        """Write down what is pending: the run has ended, or stopped."""


SCALARS = {
    "train/loss": "train_loss",
    "val/loss": "val_loss",
    "val/accuracy": "val_accuracy",
    "val/bits_per_byte": "bits_per_byte",
    "batch/size": "batch_size",
    "batch/diversity": "diversity",
    "batch/noise_scale": "noise_scale",
    "batch/exact_diversity": "exact_diversity",
    "lr": "lr",
    "progress/steps": "steps",
    "progress/samples": "samples",
    "progress/train_seconds": "train_seconds",
    "memory/peak_bytes": "peak_memory_bytes",
}
"""The name a logger shows: the record's field."""


def scalars(record: EpochRecord) -> dict[str, float]:
    """Return the values of an epoch by the name to show, without those that were not measured."""
    values = {name: getattr(record, field) for name, field in SCALARS.items()}
    return {name: value for name, value in values.items() if value is not None}


class TensorBoard:
    """Writes into the run's own folder: `tensorboard --logdir OUT` then shows EXPERIMENT/METHOD/seed-K."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("tensorboard", "tensorboard") from error
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def start(self, header: RunHeader, folder: Path, *, epochs_done: int) -> None:
        # A resumed run goes back to its checkpoint: what was shown beyond it is taken back.
        self._writer = self._make(str(folder), purge_step=epochs_done + 1)
        if not epochs_done:
            self._writer.add_text("config", f"```\n{json.dumps(header.config, indent=1)}\n```", 0)

    def log(self, record: EpochRecord) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.epoch)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run for each of ours, grouped by experiment; WANDB_PROJECT and W&B's other variables hold as usual."""

    def __init__(self) -> None:
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise MissingExtraError("wandb", "wandb") from error
        self._run: Any = None

    def start(self, header: RunHeader, folder: Path, *, epochs_done: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # A resumed run continues in the same place: its name there follows from the place of its records.
        place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "divebatch"),
            group=header.experiment,
            name=f"{header.method} seed {header.seed}",
            id=f"{header.experiment}-{header.method}-{header.seed}-{place}",
            resume="allow" if epochs_done else None,
            config=dict(header.config),
            dir=str(folder),
        )

    def log(self, record: EpochRecord) -> None:
        self._run.log(scalars(record), step=record.epoch)

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, Callable[[], Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def make_logger(kind: str) -> Logger:
    """Make a logger by name; an error lists those there are, or names the extra to install."""
    require_choice("logger", kind, tuple(LOGGERS))
    return LOGGERS[kind]()


@contextmanager
def logging_to(
    kinds: Sequence[str], header: RunHeader, folder: Path, *, epochs_done: int
) -> Iterator[Callable[[EpochRecord], None]]:
    """Open loggers of these kinds; yield a function that shows an epoch in all of them."""
    open_loggers = {kind: make_logger(kind) for kind in kinds}
    for logger in open_loggers.values():
        logger.start(header, folder, epochs_done=epochs_done)

    def log(record: EpochRecord) -> None:
        for kind in list(open_loggers):
            with _leaving_out(kind, open_loggers):
                open_loggers[kind].log(record)

    try:
        yield log
    finally:
        for kind in list(open_loggers):
            with _leaving_out(kind, open_loggers):
                open_loggers[kind].close()


@contextmanager
def _leaving_out(kind: str, loggers: dict[str, Logger]) -> Iterator[None]:
    # A logger that fails (a full disk, no network) must not end the training.
    try:
        yield
    except Exception as error:  # of somebody else's library
        del loggers[kind]
        warnings.warn(f"logger {kind!r} failed and is left out: {type(error).__name__}: {error}", stacklevel=2)
