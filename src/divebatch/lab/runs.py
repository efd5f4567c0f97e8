"""Runs, each an experiment's method with one seed: their files, and training from a saved state to the end."""

import gc
import hashlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy
import torch

from divebatch import __version__
from divebatch.checks import require_choice
from divebatch.errors import ArgumentError, CheckpointError, DivebatchError, DivergedError, RecordError, StoppedError
from divebatch.lab.build import make_trainer
from divebatch.lab.checkpoint import load_checkpoint, load_newest, previous, save_checkpoint
from divebatch.lab.files import locked, write_whole
from divebatch.lab.loggers import logging_to
from divebatch.lab.ranks import SHARDINGS, StopRequest, first_does
from divebatch.lab.schedules import SCHEDULES
from divebatch.lab.schema import Experiment, Method
from divebatch.lab.step import has_batch_norm
from divebatch.lab.trainer import Trainer
from divebatch.norms.sharded import is_sharded
from divebatch.ranks import Ranks
from divebatch.records import EpochRecord, RecordWriter, RunHeader, RunStop, read_run

logger = logging.getLogger(__name__)

MAY_CHANGE = {"summary", "paper", "trials", "training.micro_batch_size"}
"""Settings that may change at a resume: descriptions, and how batches are split to fit into memory."""


@dataclass(frozen=True, slots=True)
class Run:
    """An experiment's method with one seed."""

    experiment: Experiment
    method_name: str
    seed: int
    folder: Path
    device: str = "cpu"
    log_exact: bool = False
    data_dir: Path | None = None
    checkpoint_every: int = 1
    """Epochs between two checkpoints; the last epoch always has a checkpoint."""
    checkpoint_steps: int | None = None
    """Steps between two checkpoints within an epoch. None: none within epochs."""
    keep_epochs: tuple[int, ...] = ()
    """Epochs whose checkpoints are kept in files of their own; later checkpoints replace all others."""
    sharding: str = "ddp"
    """The model on several ranks: "ddp", a copy on each, or "fsdp", a part on each."""
    loggers: tuple[str, ...] = ()
    """Kinds of loggers that also show the epochs; `divebatch.lab.loggers` has the known kinds."""

    def __post_init__(self) -> None:
        require_choice("sharding", self.sharding, SHARDINGS)
        for epoch in self.keep_epochs:
            if not 1 <= epoch <= self.experiment.epochs:
                raise ArgumentError(
                    f"epoch {epoch}, whose checkpoint is to stay: the run has 1 to {self.experiment.epochs}"
                )
        if self.log_exact and self.sharding == "fsdp":
            raise ArgumentError("the exact diversity needs whole gradients, which fsdp has nowhere: use sharding ddp")
        if self.experiment.training.compile and self.sharding == "fsdp":
            raise ArgumentError("norms of compiled passes are not measured on fsdp's parts: use compile=False, or ddp")

    @property
    def method(self) -> Method:
        return self.experiment.method(self.method_name)

    @property
    def name(self) -> str:
        return f"{self.experiment.name} {self.method_name} seed {self.seed}"

    @property
    def records_path(self) -> Path:
        """DIR/EXPERIMENT/METHOD/seed-K.jsonl, a path on which other programs rely."""
        return self.folder / self.experiment.name / self.method_name / f"seed-{self.seed}.jsonl"

    @property
    def checkpoint_path(self) -> Path:
        """Path of the last checkpoint, beside the records."""
        return self.records_path.with_suffix(".ckpt")

    @property
    def config(self) -> dict[str, Any]:
        """All settings that must be equal at a resume, in the form of a record."""
        values = asdict(self.experiment)
        # These affect how a run is shown, not how it is trained: another baseline must not prevent a resume.
        del values["methods"], values["report"], values["metric"]
        values |= {"method": asdict(self.method), "seed": self.seed, "log_exact": self.log_exact}
        # In the form in which it is read back, so that a resume compares like with like.
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain

    def header(self, *, num_parameters: int | None = None) -> RunHeader:
        """Return the first line of the records. None: the model is not built yet."""
        report, ranks, device = self.experiment.report, Ranks.here(), torch.device(self.device)
        hardware: dict[str, Any] = {
            "device": device.type,
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
            "cpus": num_cores(),
            "threads": torch.get_num_threads(),
        }
        if not ranks.is_alone:
            hardware |= {"ranks": ranks.size, "sharding": self.sharding}
        return RunHeader(
            experiment=self.experiment.name,
            method=self.method_name,
            seed=self.seed,
            label=self.method.label,
            metric=self.experiment.metric,
            report=replace(report, order=report.order or list(self.experiment.methods)),
            config=self.config,
            versions={"python": platform.python_version(), "divebatch": __version__}
            | {package.__name__: package.__version__ for package in (torch, numpy)},
            hardware=hardware,
            num_parameters=num_parameters,
            git_commit=_git_commit(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """Return the commit of this source tree, with "-dirty" if it was changed. None: no checkout."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():  # installed: git would look further up and find a foreign repository
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


# Files


def check_can_write(run: Run, *, resume: bool) -> None:
    """Raise before any work if the records of this run must not be written or continued."""
    saved = [run.checkpoint_path, previous(run.checkpoint_path)]
    if run.records_path.exists() and not resume:
        raise RecordError(
            f"'{run.records_path}' already holds a run. Continue it with --resume, or choose another folder."
        )
    if not _is_begun(run):
        if found := [path for path in saved if path.exists()]:
            raise RecordError(
                f"'{found[0]}' is a checkpoint, but the records of its run, '{run.records_path.name}', are gone: put "
                f"them back, or remove '{run.records_path.stem}.*' to start this run again."
            )
    else:
        for key, there, now in _differences(read_run(run.records_path)[0].config, run.config):
            raise CheckpointError(
                f"'{run.records_path}' is a run with another configuration: {key} is {there!r} there "
                f"and {now!r} now. Choose another folder."
            )


def _is_begun(run: Run) -> bool:
    """Return whether the first line of the records is complete."""
    try:
        return run.records_path.is_file() and b"\n" in run.records_path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read '{run.records_path}': {error.strerror}") from error


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the settings in which two configurations differ, except for more epochs than were planned."""
    for key in sorted({*there, *here}, key=str):
        one, other, name = there.get(key), here.get(key), f"{place}{key}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{name}.")
            continue
        # If a run is one pass, its epochs are parts of the pass.
        is_longer = name == "epochs" and not here.get("one_pass") and type(one) is int and one < (other or 0)
        if one != other and name not in MAY_CHANGE and not is_longer:
            yield name, one, other


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A run's records up to its checkpoint, and the checkpoint's path; both are missing if the run begins."""

    header: RunHeader | None = None
    epochs: list[EpochRecord] = field(default_factory=list)
    checkpoint: Path | None = None
    is_complete: bool = False

    @property
    def last_epoch(self) -> int:
        # Not their count: if epochs are parts of a pass, one batch may complete several.
        return self.epochs[-1].epoch if self.epochs else 0

    @classmethod
    def of(cls, run: Run) -> tuple[Self, dict[str, Any]]:
        """Read a run's progress and its checkpoint's state; remove later records, which will be written again."""
        if not _is_begun(run):
            run.records_path.unlink(missing_ok=True)
            return cls(), {}
        header, epochs = read_run(run.records_path)
        found = cls(header=header, epochs=epochs)
        complete = replace(found, is_complete=True)
        was_last = found.last_epoch >= run.experiment.epochs
        try:
            newest = load_newest(run.checkpoint_path, device=torch.device(run.device))
        except CheckpointError:
            if was_last:
                return complete, {}
            raise
        if newest is None:
            if was_last:
                return complete, {}
            if len(epochs) > run.checkpoint_every:  # else the run was killed before its first checkpoint
                raise CheckpointError(
                    f"'{run.records_path}' holds {len(epochs)} epochs, but its checkpoint "
                    f"'{run.checkpoint_path.name}' is gone: put it back, or remove the records to start this run again."
                )
            if epochs:
                logger.warning("no checkpoint of '%s' was written yet: the run begins again", run.records_path)
            run.records_path.unlink()
            return cls(), {}
        path, state = newest
        _require_own(run, path, state)
        done = replace(found, epochs=epochs[: state["run"]["records"]], checkpoint=path)
        if done.last_epoch >= run.experiment.epochs:
            return complete, {}
        planned = replace(header, config=run.config)  # perhaps for more epochs than before
        lines = run.records_path.read_bytes().split(b"\n")[1 : len(done.epochs) + 1]
        try:
            write_whole(run.records_path, b"".join(line + b"\n" for line in [planned.to_json().encode(), *lines]))
        except OSError as error:
            raise RecordError(f"cannot write records to '{run.records_path}': {error.strerror}") from error
        return replace(done, header=planned), state


def _require_own(run: Run, path: Path, state: Mapping[str, Any]) -> None:
    """Raise unless this run wrote the checkpoint after the existing records."""
    way_out = f"Put the run's own files back, or remove '{run.records_path.stem}.*' to start it again."
    found = state.get("run")
    if not isinstance(found, Mapping) or not {"config", "divebatch", "records", "records_hash"} <= found.keys():
        raise CheckpointError(f"checkpoint '{path}' does not say whose it is. {way_out}")
    there = {**found["config"], "version of divebatch": found["divebatch"]}
    for key, one, other in _differences(there, {**run.config, "version of divebatch": __version__}):
        raise CheckpointError(
            f"checkpoint '{path}' belongs to another run: {key} is {one!r} there and {other!r} here. {way_out}"
        )
    if found["records_hash"] != _records_hash(run, found["records"]):
        raise CheckpointError(
            f"'{run.records_path}' was changed after its checkpoint '{path}' was written, or is damaged. {way_out}"
        )


def _records_hash(run: Run, num_epochs: int) -> str:
    """Return a hash of the first `num_epochs` epochs and of the header without the configuration."""
    first, *others = run.records_path.read_bytes().split(b"\n")[:-1]  # complete lines
    header = {**json.loads(first), "config": None}
    lines = [json.dumps(header).encode(), *others[:num_epochs]]
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


def lengthened(run: Run, plan: Callable[[int], Experiment]) -> Run:
    """Return the run with more epochs than its records were planned for, and all other settings as they were.

    Settings that count epochs scale with a run's length, so they must not change in the middle. `plan` makes the
    experiment for a number of epochs.
    """
    if not _is_begun(run):
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


# Training


def execute(
    run: Run,
    *,
    resume: bool = False,
    on_epoch: Callable[[EpochRecord], None] = lambda _: None,
    on_resume: Callable[[EpochRecord], None] = lambda _: None,
    stop: StopRequest | None = None,
) -> None:
    """Train a run to its end, with a record after every epoch and checkpoints as configured.

    `on_epoch` gets each epoch that is trained here, and `on_resume` the last earlier epoch, if any. A killed run
    resumes from its last checkpoint. If a signal or `stop` requests a stop, finish the current step, save, and raise
    `StoppedError`. Under a process group all ranks call this function, and only rank 0 writes. If another process
    works on the run, raise `RecordError`.
    """
    if stop is not None and stop.now():
        raise StoppedError(f"stopped before {run.records_path} was begun")
    ranks = Ranks.here()
    state: dict[str, Any] = {}

    def begin() -> Progress:
        if not held.enter_context(locked(run.records_path.with_suffix(".lock"))):
            raise RecordError(
                f"another process is working on '{run.records_path}', and two would spoil its files: wait for its "
                f"end, stop it, or choose another folder"
            )
        check_can_write(run, resume=resume)
        progress, found = Progress.of(run)
        state.update(found)
        return progress

    with ExitStack() as held:
        progress = first_does(ranks, begin)
        if progress.epochs:
            on_resume(progress.epochs[-1])
        if progress.checkpoint is not None and not ranks.is_first:
            state = load_checkpoint(progress.checkpoint, device=torch.device(run.device))
        if not progress.is_complete:
            with nullcontext(stop) if stop is not None else StopRequest(ranks) as listening:
                _train(run, progress, state, on_epoch, listening)
            gc.collect()  # a trainer has cycles, and the next run's memory peak must not include its tensors


def _train(
    run: Run, progress: Progress, state: dict[str, Any], report: Callable[[EpochRecord], None], stop: StopRequest
) -> None:
    trainer = make_trainer(run)
    if progress.checkpoint is not None:
        _load(run, trainer, progress.checkpoint, state)
    keeper = _Keeper(run, trainer, stop, progress)
    with trainer.control, _writing(run, trainer, progress) as write:
        while keeper.epoch < run.experiment.epochs:
            record = keeper.run_epoch()
            write(record)
            # Save after the record is written: a checkpoint must not know more epochs than the records.
            keeper.after_epoch(record)
            report(record)


def require_data(path: Path, state: Mapping[str, Any], trainer: Trainer) -> None:
    """Raise unless the checkpoint was trained on this trainer's data."""
    there, here = state["run"]["data"], trainer.data_fingerprint
    if there != here:
        raise CheckpointError(
            f"checkpoint '{path}' belongs to another run: the fingerprint of the data is {there!r} there and {here!r} "
            f"here. Give the folder that the run was started with."
        )


def _load(run: Run, trainer: Trainer, path: Path, state: dict[str, Any]) -> None:
    require_data(path, state, trainer)
    before = state["run"]["config"]["training"].get("micro_batch_size")
    now = run.experiment.training.micro_batch_size
    if before != now and has_batch_norm(trainer.model) and trainer.ranks.is_first:
        logger.warning(
            "'%s' continues with micro_batch_size=%s after %s: BatchNorm takes its statistics from each micro-batch, "
            "so the run is no longer the one that was begun",
            *(run.records_path, now, before),
        )
    try:
        trainer.load_state_dict(state)
    except Exception as error:  # torch may raise anything for a state of other shapes
        what = str(error) if isinstance(error, DivebatchError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"checkpoint '{path}' does not fit this run: {what}") from error


@contextmanager
def _writing(run: Run, trainer: Trainer, progress: Progress) -> Iterator[Callable[[EpochRecord], None]]:
    """Open records and loggers on rank 0; yield a function that writes an epoch to each."""
    if not trainer.ranks.is_first:
        yield lambda _: None
        return
    with RecordWriter(run.records_path) as writer:
        header = progress.header
        if header is None:
            trained = [each.numel() for each in trainer.model.parameters() if each.requires_grad]
            header = run.header(num_parameters=sum(trained))  # sharded parameters report their whole size
            writer.write(header)
        folder = run.records_path.with_suffix("")
        with logging_to(run.loggers, header, folder, epochs_done=len(progress.epochs)) as log:

            def write(record: EpochRecord) -> None:
                writer.write(record)
                log(record)

            try:
                yield write
            except StoppedError as error:
                with suppress(RecordError):  # the state is saved; this line is only information
                    writer.write(RunStop(reason=str(error)))
                raise


class _Keeper:
    """A driver that trains a run's epochs and saves its state when due."""

    def __init__(self, run: Run, trainer: Trainer, stop: StopRequest, progress: Progress) -> None:
        self.run, self.trainer, self.stop = run, trainer, stop
        self.epoch, self._records, self._steps = progress.last_epoch, len(progress.epochs), 0

    def run_epoch(self) -> EpochRecord:
        try:
            record = self.trainer.run_epoch(after_step=self._after_step)
            self._require_finite()
            return record
        except DivergedError as error:
            path = self.run.checkpoint_path
            saved = f"The last good checkpoint is '{path}'." if path.exists() else "No checkpoint was written yet."
            raise DivergedError(f"{error}. {saved} A smaller learning rate may help.") from error

    def after_epoch(self, record: EpochRecord) -> None:
        """Save the state if that is due; the record is already on disk."""
        before, self.epoch = self.epoch, record.epoch
        self._records += 1
        is_last = self.epoch == self.run.experiment.epochs
        is_asked = self.stop.now()  # once: a signal may come any time
        if is_last or is_asked or self.epoch % self.run.checkpoint_every == 0:
            self._save(self.run.checkpoint_path)
        # One batch may complete several parts of a pass, and so skip the epoch to keep.
        if any(before < kept <= self.epoch for kept in self.run.keep_epochs):
            self._save(self.run.records_path.with_suffix(f".epoch-{self.epoch}.ckpt"))
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
        """Raise, before anything is written, if the loss or the weights of any rank are not finite."""
        for problem in self.trainer.ranks.gather(self._what_is_not_finite()):
            if problem is not None:
                raise DivergedError(problem)

    def _what_is_not_finite(self) -> str | None:
        if not torch.isfinite(self.trainer.tally.loss_sum):
            return f"the training loss of epoch {self.trainer.control.epoch + 1} is not finite"
        for name, tensor in self.trainer.model.state_dict().items():
            here = tensor.to_local() if is_sharded(tensor) else tensor
            if here.is_floating_point() and not here.isfinite().all():
                return f"the model's '{name}' is no longer finite"
        return None

    def _save(self, path: Path) -> None:
        state = self.trainer.state_dict()

        def write() -> None:
            about = {
                "divebatch": __version__,
                "config": self.run.config,
                "data": self.trainer.data_fingerprint,
                "records": self._records,
                "records_hash": _records_hash(self.run, self._records),
            }
            save_checkpoint(path, {"run": about, **state})

        first_does(self.trainer.ranks, write)

    def _stopped(self) -> StoppedError:
        return StoppedError(
            f"stopped after {self.trainer.control.epoch} epochs and saved to {self.run.checkpoint_path}"
        )
