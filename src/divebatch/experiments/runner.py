"""One run: an experiment's method with one seed, from its configuration to its records."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD

from divebatch.controller import Controller
from divebatch.data import AdaptiveLoader
from divebatch.data.order import mixed_seed
from divebatch.errors import ArgumentError, CheckpointError, RecordError
from divebatch.experiments.datasets import DATASETS
from divebatch.experiments.models import MODELS
from divebatch.experiments.provenance import git_commit, hardware, versions
from divebatch.experiments.schedules import SCHEDULES
from divebatch.experiments.schema import Experiment, Method, Part, build_settings
from divebatch.policies import make_policy
from divebatch.records import EpochRecord, RecordWriter, RunHeader, read_run, rewrite_run
from divebatch.training import Clock, Trainer, load_checkpoint, save_checkpoint

# Apart from each other and from the epochs' orders, whose purpose is one number.
DATA, MODEL = (0, 2), (0, 3)

WORDS = {"summary", "paper", "trials"}
"""What may differ between a run and its resume."""


@dataclass(frozen=True, slots=True)
class Run:
    """What to run and where its records go."""

    experiment: Experiment
    method_name: str
    seed: int
    folder: Path
    device: str = "cpu"
    log_exact: bool = False

    @property
    def method(self) -> Method:
        """The method's settings."""
        return self.experiment.method(self.method_name)

    @property
    def records_path(self) -> Path:
        """DIR/EXPERIMENT/METHOD/seed-K.jsonl, as the records' contract has it."""
        return self.folder / self.experiment.name / self.method_name / f"seed-{self.seed}.jsonl"

    @property
    def checkpoint_path(self) -> Path:
        """Beside the records."""
        return self.records_path.with_suffix(".ckpt")

    @property
    def config(self) -> dict[str, Any]:
        """All settings of this run, complete: what must be equal for a resume."""
        values = asdict(self.experiment)
        del values["methods"]
        return {**values, "method": asdict(self.method), "seed": self.seed, "log_exact": self.log_exact}

    def header(self) -> RunHeader:
        """The first line of the records."""
        return RunHeader(
            experiment=self.experiment.name,
            method=self.method_name,
            seed=self.seed,
            config=self.config,
            versions=versions(),
            hardware=hardware(torch.device(self.device)),
            git_commit=git_commit(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def execute(run: Run, *, resume: bool = False, on_epoch: Callable[[EpochRecord], None] | None = None) -> None:
    """Train to the end, a record and a checkpoint after every epoch; a killed run loses the epoch under way."""
    done = _done_before(run, resume=resume)
    report = on_epoch or (lambda record: None)
    for record in done:
        report(record)
    if len(done) == run.experiment.epochs:
        return
    trainer = make_trainer(run)
    if done:
        trainer.load_state_dict(load_checkpoint(run.checkpoint_path, device=torch.device(run.device)))
    with trainer.control, RecordWriter(run.records_path) as writer:
        if not done:
            writer.write(run.header())
        for _ in range(len(done), run.experiment.epochs):
            record = trainer.run_epoch()
            writer.write(record)
            save_checkpoint(run.checkpoint_path, trainer.state_dict())
            report(record)


def make_trainer(run: Run) -> Trainer:
    """Data, model, optimizer, schedule and controller as configured; everything random follows from the seed."""
    experiment, method, device = run.experiment, run.method, torch.device(run.device)
    split = _settings(DATASETS, experiment.data, "data").load(mixed_seed(run.seed, *DATA), device)
    model_settings = _settings(MODELS, experiment.model, "model")
    torch.manual_seed(mixed_seed(run.seed, *MODEL))
    model = model_settings.build(split.num_features).to(device)
    optimizer = SGD(model.parameters(), lr=method.lr, **asdict(experiment.optimizer))
    scheduler = _settings(SCHEDULES, experiment.schedule, "schedule").build(optimizer)
    control = Controller(
        model,
        optimizer,
        AdaptiveLoader(split.train, method.batch_size, seed=run.seed),
        make_policy(method.policy.kind, **method.policy.settings),
        estimator=method.estimator,
        lr_coupling=method.lr_coupling,
        scheduler=scheduler,
        loss_fn=model_settings.loss_fn,
    )
    return Trainer(
        model, optimizer, scheduler, control, model_settings.loss_fn, split.validation, Clock(device), run.log_exact
    )


def check_can_write(run: Run, *, resume: bool) -> None:
    """Raise before any work if the records of this run must not be written or continued."""
    if not run.records_path.exists():
        return
    if resume:
        _require_same(run, _read_back(run)[0])
        return
    raise RecordError(
        f"'{run.records_path}' already holds a run. Use --resume to continue it, or another --out folder."
    )


def _done_before(run: Run, *, resume: bool) -> list[EpochRecord]:
    """The epochs that are on disk and can be built upon; records beyond the checkpoint are taken back."""
    check_can_write(run, resume=resume)
    if not run.records_path.exists():
        return []
    header, epochs = _read_back(run)
    if len(epochs) < run.experiment.epochs:
        epochs = epochs[: _checkpointed_epochs(run, len(epochs))]
        rewrite_run(run.records_path, header, epochs) if epochs else run.records_path.unlink()
    return epochs


def _read_back(run: Run) -> tuple[RunHeader, list[EpochRecord]]:
    if run.records_path.read_bytes().count(b"\n") == 0:  # killed before its first line was complete
        return run.header(), []
    return read_run(run.records_path)


def _checkpointed_epochs(run: Run, recorded: int) -> int:
    """Records are written first, so that a checkpoint never knows an epoch they do not."""
    if not run.checkpoint_path.exists():
        return 0
    epoch = int(load_checkpoint(run.checkpoint_path, device=torch.device("cpu"))["control"]["epoch"])
    if epoch > recorded:
        raise CheckpointError(
            f"'{run.checkpoint_path}' stands at epoch {epoch}, but its records end at {recorded}: "
            f"the records were changed. Remove both files to start this run again."
        )
    return epoch


def _require_same(run: Run, header: RunHeader) -> None:
    """A resume must continue the same configuration."""
    wanted = json.loads(json.dumps(run.config))  # as a file holds it: lists for tuples
    keys = {*wanted, *header.config} - WORDS
    different = sorted(key for key in keys if wanted.get(key) != header.config.get(key))
    if different:
        key = different[0]
        raise CheckpointError(
            f"'{run.records_path}' is a run with another configuration: {key} is {header.config.get(key)!r} there "
            f"and {wanted.get(key)!r} now. Use another --out folder."
        )


def _settings(registry: dict[str, type[Any]], part: Part, where: str) -> Any:
    if part.kind not in registry:
        raise ArgumentError(f"unknown {where} kind {part.kind!r}; known: {', '.join(registry)}")
    return build_settings(registry[part.kind], part, where)
