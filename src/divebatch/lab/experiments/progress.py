"""How far a run has got: its records and its checkpoint on disk, and whether they may be continued."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from divebatch.errors import CheckpointError, DivebatchError, RecordError
from divebatch.lab.experiments.run import Run
from divebatch.lab.training.checkpoint_store import Saved, open_newest
from divebatch.lab.training.launch import first_does
from divebatch.ranks import Ranks
from divebatch.records import EpochRecord, RunHeader, read_run, rewrite_run

WORDS = {"summary", "paper", "trials"}
"""Settings that may differ between a run and its resume."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run has got: its records up to the checkpoint, and the checkpoint."""

    epochs: list[EpochRecord] = field(default_factory=list)
    saved: Saved | None = None
    is_begun: bool = False
    """Whether the records hold the run's first line already."""

    def is_complete(self, run: Run) -> bool:
        """Whether the records have the run's last epoch."""
        return last_epoch(self.epochs) >= run.experiment.epochs


def last_epoch(epochs: list[EpochRecord]) -> int:
    """Return the number of the last epoch that was recorded; 0 where none was."""
    # Not their count: where epochs are parts of a pass, one batch may carry a run over several of them.
    return epochs[-1].epoch if epochs else 0


def read_progress(run: Run, *, resume: bool, ranks: Ranks) -> RunProgress:
    """Read how far a run has got. Rank 0 removes records beyond the checkpoint: the resume writes them again."""
    written = first_does(ranks, lambda: _records_so_far(run, resume=resume))
    if written is None:
        return RunProgress()
    header, epochs = written
    is_complete = last_epoch(epochs) >= run.experiment.epochs
    saved = _open_saved(run, ranks, is_needed=not is_complete)
    if saved is None and not is_complete:
        first_does(ranks, run.records_path.unlink)
        return RunProgress()
    done = _epochs_of(saved.rest, run, len(epochs)) if saved is not None else len(epochs)
    if last_epoch(epochs[:done]) >= run.experiment.epochs:
        return RunProgress(epochs, is_begun=True)
    # The checkpoint is what a run can go on from: epochs beyond it are trained, and recorded, again.
    first_does(ranks, lambda: rewrite_run(run.records_path, header, epochs[:done]))
    return RunProgress(epochs[:done], saved, is_begun=True)


def _records_so_far(run: Run, *, resume: bool) -> tuple[RunHeader, list[EpochRecord]] | None:
    check_can_write(run, resume=resume)
    return _read_back(run) if run.records_path.exists() else None


def _open_saved(run: Run, ranks: Ranks, *, is_needed: bool) -> Saved | None:
    """The last checkpoint. A complete run may lack its last one, if it was killed right before: then it is behind."""
    try:
        return open_newest(run.checkpoint_path, device=torch.device(run.device), ranks=ranks)
    except CheckpointError:
        if is_needed:
            raise
        return None


def check_can_write(run: Run, *, resume: bool) -> None:
    """Raise before any work if the records of this run must not be written or continued."""
    if not run.records_path.exists():
        return
    if resume:
        _require_same(run, _read_back(run)[0])
        return
    raise RecordError(
        f"'{run.records_path}' already holds a run. Continue it with resume=True, or choose another folder."
    )


def _read_back(run: Run) -> tuple[RunHeader, list[EpochRecord]]:
    try:
        is_begun = b"\n" in run.records_path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read '{run.records_path}': {error.strerror}") from error
    if not is_begun:  # killed before its first line was complete
        return run.header(), []
    header, epochs = read_run(run.records_path)
    for number, record in enumerate(epochs, 1):
        if record.epoch != number and not run.experiment.one_pass:
            raise RecordError(f"'{run.records_path}': epoch {record.epoch} stands where epoch {number} should")
    return header, epochs


def _epochs_of(state: dict[str, Any], run: Run, recorded: int) -> int:
    """How many records the checkpoint has behind it; they are written first, so it never knows one that is not."""
    with reading_state(run):
        epoch = state["control"]["epoch"]
        if type(epoch) is not int or epoch < 0:
            raise CheckpointError(f"its epoch is {epoch!r}")
    if epoch > recorded:
        raise CheckpointError(
            f"'{run.checkpoint_path}' stands at epoch {epoch}, but its records end at {recorded}: "
            f"the records were changed. Remove both files to start this run again."
        )
    return epoch


@contextmanager
def reading_state(run: Run) -> Iterator[None]:
    """Inside, whatever goes wrong with a saved state becomes an error that names the file."""
    try:
        yield
    except Exception as error:  # a file made on purpose may fail in any way
        what = str(error) if isinstance(error, DivebatchError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"checkpoint '{run.checkpoint_path}' does not fit this run: {what}") from error


def _require_same(run: Run, header: RunHeader) -> None:
    """A resume must continue the same configuration."""
    wanted, there = run.config, header.config
    keys = {*wanted, *there} - WORDS
    different = sorted(key for key in keys if wanted.get(key) != there.get(key))
    if different:
        key = different[0]
        raise CheckpointError(
            f"'{run.records_path}' is a run with another configuration: {key} is {there.get(key)!r} there "
            f"and {wanted.get(key)!r} now. Choose another folder."
        )
