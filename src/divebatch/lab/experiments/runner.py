"""One run: an experiment's method with one seed, from its configuration to its records."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch

from divebatch.errors import DivergedError, RecordError, StoppedError
from divebatch.lab.experiments.assembly import make_trainer
from divebatch.lab.experiments.identity import (
    RecordsSoFar,
    identity_of,
    require_own,
    tell_of_micro_batches,
    without_identity,
)
from divebatch.lab.experiments.progress import RunProgress, last_epoch, read_progress, reading_state
from divebatch.lab.experiments.run import Run
from divebatch.lab.loggers import logging_to
from divebatch.lab.training import StopRequest, Trainer
from divebatch.lab.training.checkpoint_store import save_state
from divebatch.lab.training.distributed import is_finite_everywhere
from divebatch.lab.training.stop_signals import AgreedStop
from divebatch.ranks import Ranks
from divebatch.records import EpochRecord, RecordWriter, RunHeader, RunStop

logger = logging.getLogger(__name__)


def _say_nothing(_: EpochRecord) -> None:
    """Nobody listens."""


def execute(
    run: Run,
    *,
    resume: bool = False,
    on_epoch: Callable[[EpochRecord], None] = _say_nothing,
    on_resume: Callable[[EpochRecord], None] = _say_nothing,
    stop: StopRequest | None = None,
) -> None:
    """Train to the end, a record after every epoch and checkpoints as the run says.

    `on_epoch` gets each epoch that is trained here, `on_resume` the last one that was there before, if any. What was
    killed is resumed from its last checkpoint. Asked to stop (by a signal, or by `stop`, which then listens
    for them), it finishes the step under way, saves, and raises `StoppedError`. Under an initialised process group
    all ranks call it; rank 0 alone writes records.
    """
    if stop is not None and stop.now():
        raise StoppedError(f"stopped before {run.records_path} was begun")
    ranks = Ranks.here()
    progress = read_progress(run, resume=resume, ranks=ranks)
    if progress.epochs:
        on_resume(progress.epochs[-1])
    if not progress.is_complete(run):
        with nullcontext(stop) if stop is not None else make_stop(ranks) as listening:
            _continue(run, progress, on_epoch, listening)
        gc.collect()  # a trainer is full of cycles; the next run's peak of memory must not hold this one's tensors


def make_stop(ranks: Ranks) -> StopRequest:
    """Listens for signals; several ranks stop together."""
    return StopRequest() if ranks.is_alone else AgreedStop(ranks)


def _continue(run: Run, progress: RunProgress, report: Callable[[EpochRecord], None], stop: StopRequest) -> None:
    trainer = make_trainer(run)
    if progress.saved is not None:
        require_own(run, progress.saved.path, progress.saved.rest, data=trainer.data_fingerprint)
        if trainer.ranks.is_first:
            tell_of_micro_batches(run, progress.saved.rest, trainer.model)
        with reading_state(run):
            layout = partial(trainer.parallel.layout, trainer.optimizer)
            trainer.load_state_dict(without_identity(progress.saved.state(trainer.clock.device, layout)))
    epoch = last_epoch(progress.epochs)
    header = progress.header or _first_header(run, trainer)
    saver = Saver(run, trainer, stop, epoch, RecordsSoFar(header, progress.epochs))
    with trainer.control, _writing(run, trainer.ranks, progress, header) as write:
        while epoch < run.experiment.epochs:
            record = saver.run_epoch()
            epoch = record.epoch
            write(record)
            # After the record, so that a checkpoint never knows an epoch that the records do not.
            saver.after_epoch(record)
            report(record)


def _first_header(run: Run, trainer: Trainer) -> RunHeader:
    """The first line of new records."""
    trained = [each for each in trainer.model.parameters() if each.requires_grad]
    return run.header(num_parameters=sum(each.numel() for each in trained))  # fsdp's parts tell their whole


@contextmanager
def _writing(
    run: Run, ranks: Ranks, progress: RunProgress, header: RunHeader
) -> Iterator[Callable[[EpochRecord], None]]:
    """Takes epochs to the records and the loggers, on rank 0."""
    if not ranks.is_first:
        yield lambda record: None
        return
    with (
        RecordWriter(run.records_path) as writer,
        logging_to(run.loggers, header, run.log_folder, epochs_done=len(progress.epochs)) as log,
    ):
        if not progress.is_begun:
            writer.write(header)

        def write(record: EpochRecord) -> None:
            writer.write(record)
            log(record)

        try:
            yield write
        except StoppedError as error:
            with suppress(RecordError):  # the state is saved, and that is what counts
                writer.write(RunStop(reason=str(error)))
            raise


class Saver:
    """Decides when a run's state is written down."""

    def __init__(self, run: Run, trainer: Trainer, stop: StopRequest, epoch: int, records: RecordsSoFar) -> None:
        self.run, self.trainer, self.stop, self.records = run, trainer, stop, records
        self._epoch, self._steps = epoch, 0

    def run_epoch(self) -> EpochRecord:
        """An epoch with its pauses; where it diverges, the error says what there is to go back to."""
        try:
            record = self.trainer.run_epoch(after_step=self._after_step)
            self._require_finite()
        except DivergedError as error:
            path = self.run.checkpoint_path
            saved = f"The last good checkpoint is '{path}'." if path.exists() else "No checkpoint was written yet."
            raise DivergedError(f"{error}. {saved} A smaller learning rate may help.") from error
        return record

    def after_epoch(self, record: EpochRecord) -> None:
        """The record is on disk: a checkpoint never knows an epoch that the records do not."""
        self.records.add(record)
        epoch = record.epoch
        is_last, is_asked = epoch == self.run.experiment.epochs, self.stop.now()  # once: a signal may come any time
        if is_last or epoch % self.run.checkpoint_every == 0 or is_asked:
            self._save(self.run.checkpoint_path)
        # One batch may carry a run over several parts of its pass, and so over the epoch that is to be kept.
        if any(self._epoch < kept <= epoch for kept in self.run.keep_epochs):
            self._save(self.run.kept_checkpoint(epoch))
        self._epoch = epoch
        if is_asked and not is_last:
            raise self._stopped()

    def _after_step(self) -> None:
        self._steps += 1
        every, is_asked = self.run.checkpoint_steps, self.stop.after_step()
        if is_asked or (every is not None and self._steps % every == 0):
            self._require_finite()
            self._save(self.run.checkpoint_path)
        if is_asked:
            raise self._stopped()

    def _require_finite(self) -> None:
        """Before anything is written down. The weights may have gone in a step whose loss was still good."""
        for problem in self.trainer.ranks.gather(self._what_is_not_finite()):
            if problem is not None:
                raise DivergedError(problem)

    def _what_is_not_finite(self) -> str | None:
        """What is no longer finite on this rank, in words; None where all is well."""
        if not torch.isfinite(self.trainer.tally.loss_sum):
            return f"the training loss of epoch {self.trainer.control.epoch + 1} is not finite"
        for name, tensor in self.trainer.model.state_dict().items():
            if tensor.is_floating_point() and not is_finite_everywhere(tensor):
                return f"the model's '{name}' is no longer finite"
        return None

    def _save(self, path: Path) -> None:
        identity = identity_of(self.run, self.trainer.data_fingerprint, self.records)
        state = {"identity": identity, **self.trainer.state_dict()}
        save_state(path, state, self.trainer.ranks)

    def _stopped(self) -> StoppedError:
        return StoppedError(
            f"stopped after {self.trainer.control.epoch} epochs and saved to {self.run.checkpoint_path}"
        )
