"""How far a run has got: its records and its checkpoint on disk, and whether they may be continued."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from divebatch.errors import ArgumentError, CheckpointError, DivebatchError, RecordError
from divebatch.lab.experiments.identity import RecordsSoFar, differences, require_own, require_records
from divebatch.lab.experiments.run import Run
from divebatch.lab.experiments.schedules import SCHEDULES
from divebatch.lab.experiments.schema import Experiment
from divebatch.lab.training.checkpoint import previous
from divebatch.lab.training.checkpoint_store import Saved, open_newest
from divebatch.lab.training.launch import first_does
from divebatch.ranks import Ranks
from divebatch.records import EpochRecord, RunHeader, read_run, rewrite_run
from divebatch.state_checks import read, whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run has got: its records up to the checkpoint, and the checkpoint."""

    header: RunHeader | None = None
    """The records' first line; None where there are none yet."""
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
        first_does(ranks, lambda: _start_again(run, len(epochs)))
        return RunProgress()
    done = _epochs_of(saved.rest, run, len(epochs)) if saved is not None else len(epochs)
    if saved is not None:
        require_records(run, saved.path, saved.rest, RecordsSoFar(header, epochs[:done]))
    if last_epoch(epochs[:done]) >= run.experiment.epochs:
        return RunProgress(header, epochs, is_begun=True)
    # The checkpoint is what a run can go on from: epochs beyond it are trained, and recorded, again.
    planned = replace(header, config=run.config)  # perhaps for more epochs than before
    first_does(ranks, lambda: rewrite_run(run.records_path, planned, epochs[:done]))
    return RunProgress(planned, epochs[:done], saved, is_begun=True)


def _records_so_far(run: Run, *, resume: bool) -> tuple[RunHeader, list[EpochRecord]] | None:
    check_can_write(run, resume=resume)
    return _read_back(run) if run.records_path.exists() else None


def _open_saved(run: Run, ranks: Ranks, *, is_needed: bool) -> Saved | None:
    """The last checkpoint. A complete run may lack its last one, if it was killed right before: then it is behind."""
    try:
        saved = open_newest(run.checkpoint_path, device=torch.device(run.device), ranks=ranks)
        if saved is not None:
            require_own(run, saved.path, saved.rest)
        return saved
    except CheckpointError:
        if is_needed:
            raise
        return None


def _start_again(run: Run, num_epochs: int) -> None:
    """Remove the records of a run that was killed before its first checkpoint; those of any other are kept."""
    if num_epochs > run.checkpoint_every:  # else it was killed before its first checkpoint
        raise CheckpointError(
            f"'{run.records_path}' holds {num_epochs} epochs, but its checkpoint '{run.checkpoint_path.name}' is gone: "
            f"put it back, or remove the records to start this run again."
        )
    if num_epochs:
        logger.warning("no checkpoint of '%s' was written yet: it begins again", run.records_path)
    run.records_path.unlink()


def check_can_write(run: Run, *, resume: bool) -> None:
    """Raise before any work if the records of this run must not be written or continued."""
    for path in (run.records_path, run.checkpoint_path, previous(run.checkpoint_path)):
        _require_plain(path)
    if not run.records_path.exists():
        _require_no_checkpoint(run)
        return
    if resume:
        _require_same(run, _read_back(run)[0])
        return
    raise RecordError(
        f"'{run.records_path}' already holds a run. Continue it with resume=True, or choose another folder."
    )


def _require_plain(path: Path) -> None:
    """A pipe would never be read to its end, and what is written beside a link replaces the link."""
    if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
        raise RecordError(f"'{path}' is a link, a pipe or a device: a run's files must be plain. Remove it.")


def _require_no_checkpoint(run: Run) -> None:
    for path in (run.checkpoint_path, previous(run.checkpoint_path)):
        if path.exists():
            raise RecordError(
                f"'{path}' is a checkpoint, but the records of its run, '{run.records_path.name}', are gone: put them "
                f"back, or remove '{run.checkpoint_path.name}*' to start this run again."
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
        epoch: int = read(state, "control.epoch", whole())
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
    for key, there, now in differences(header.config, run.config):
        raise CheckpointError(
            f"'{run.records_path}' is a run with another configuration: {key} is {there!r} there "
            f"and {now!r} now. Choose another folder."
        )


def lengthened(run: Run, plan: Callable[[int], Experiment]) -> Run:
    """The run for more epochs than its records were planned for, with every other setting as it was begun.

    Settings that count epochs are scaled to the length of a run, and must not change in the middle of one. `plan`
    makes the experiment for a number of epochs.
    """
    if not run.records_path.is_file() or b"\n" not in run.records_path.read_bytes():
        return run
    before, after = read_run(run.records_path)[0].config.get("epochs"), run.experiment.epochs
    if type(before) is not int or not 0 < before < after or run.experiment.one_pass:
        return run
    planned = plan(before)
    kind = planned.schedule.kind
    if SCHEDULES[kind].has_end:
        raise ArgumentError(
            f"'{run.records_path}' was planned for {before} epochs, where its {kind} schedule ends: for {after} start "
            f"a run in another folder"
        )
    return replace(run, experiment=replace(planned, epochs=after))
