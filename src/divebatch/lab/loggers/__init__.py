"""Loggers show epochs where people look already (TensorBoard, W&B). A new one is one file and one row here."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from divebatch.checks import require_choice
from divebatch.lab.loggers.logger import Logger, scalars
from divebatch.lab.loggers.tensorboard import TensorBoard
from divebatch.lab.loggers.wandb import WeightsAndBiases
from divebatch.records import EpochRecord, RunHeader

LOGGERS: dict[str, Callable[[], Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def make_logger(kind: str) -> Logger:
    """Make a logger by name; an error lists those there are, or names the extra to install."""
    require_choice("logger", kind, tuple(LOGGERS))
    return LOGGERS[kind]()


@contextmanager
def logging_to(
    kinds: Sequence[str], header: RunHeader, folder: Path, *, epochs_done: int
) -> Iterator[Callable[[EpochRecord], None]]:
    """Inside, loggers of these kinds are open; yields what tells them all of an epoch."""
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
    """A logger that fails (a full disk, no network) must not end the training: it is left out from here on."""
    try:
        yield
    except Exception as error:  # of somebody else's library
        del loggers[kind]
        warnings.warn(f"logger {kind!r} failed and is left out: {type(error).__name__}: {error}", stacklevel=2)


__all__ = ["LOGGERS", "Logger", "logging_to", "make_logger", "scalars"]
