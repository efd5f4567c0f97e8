"""Weights & Biases. The package is imported when a run uses it, never before."""

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any

from divebatch.errors import MissingExtraError
from divebatch.lab.loggers.logger import scalars
from divebatch.records import EpochRecord, RunHeader

PROJECT = "divebatch"


class WeightsAndBiases:
    """One W&B run for each of ours, grouped by experiment; WANDB_PROJECT and W&B's other variables hold as usual."""

    def __init__(self) -> None:
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise MissingExtraError("wandb", "wandb") from error
        self._run: Any = None

    def start(self, header: RunHeader, folder: Path, *, epochs_done: int) -> None:
        """A resumed run goes on in the same place: its name there follows from where its records are."""
        folder.mkdir(parents=True, exist_ok=True)
        place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
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
