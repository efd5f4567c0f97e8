"""Loggers that show epochs in TensorBoard and W&B. A new logger is a class and a row of `LOGGERS`."""

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
    """A display of one run's epochs, beside the records."""

    def start(self, header: RunHeader, folder: Path, *, epochs_done: int) -> None:
        """Begin, or continue after `epochs_done` epochs; `folder` is the run's own folder."""

    def log(self, record: EpochRecord) -> None:
        """Show a finished epoch."""

    def close(self) -> None:
        """Write pending output at the end of the run or when it stops."""


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
"""The shown name of each logged field of a record."""


def scalars(record: EpochRecord) -> dict[str, float]:
    """Return an epoch's measured values by shown name."""
    values = {name: getattr(record, field) for name, field in SCALARS.items()}
    return {name: value for name, value in values.items() if value is not None}


class TensorBoard:
    """A logger into the run's folder; `tensorboard --logdir OUT` then shows EXPERIMENT/METHOD/seed-K."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("tensorboard", "tensorboard") from error
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def start(self, header: RunHeader, folder: Path, *, epochs_done: int) -> None:
        # A resumed run starts from its checkpoint: later points are removed.
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
    """A logger with one W&B run for each run, grouped by experiment; WANDB_PROJECT and the like apply."""

    def __init__(self) -> None:
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise MissingExtraError("wandb", "wandb") from error
        self._run: Any = None

    def start(self, header: RunHeader, folder: Path, *, epochs_done: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The id follows from the records' path, so that a resumed run continues its W&B run.
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
    """Make a logger by name; an error lists the known loggers or names the extra to install."""
    require_choice("logger", kind, tuple(LOGGERS))
    return LOGGERS[kind]()


@contextmanager
def logging_to(
    kinds: Sequence[str], header: RunHeader, folder: Path, *, epochs_done: int
) -> Iterator[Callable[[EpochRecord], None]]:
    """Open loggers of these kinds; yield a function that shows an epoch in each."""
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
    except Exception as error:  # a foreign library may raise anything
        del loggers[kind]
        warnings.warn(f"logger {kind!r} failed and is left out: {type(error).__name__}: {error}", stacklevel=2)
