"""Event files for TensorBoard, one folder a run."""

import json
from pathlib import Path
from typing import Any

from divebatch.errors import MissingExtraError
from divebatch.lab.loggers.logger import scalars
from divebatch.records import EpochRecord, RunHeader


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
        """A resumed run goes back to its checkpoint: what was shown beyond it is taken back."""
        self._writer = self._make(str(folder), purge_step=epochs_done + 1)
        if not epochs_done:
            self._writer.add_text("config", f"```\n{json.dumps(header.config, indent=1)}\n```", 0)

    def log(self, record: EpochRecord) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.epoch)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
