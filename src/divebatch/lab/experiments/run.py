"""What to run, how, and where its records go."""

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from divebatch.errors import ArgumentError
from divebatch.lab.experiments.provenance import git_commit, hardware, versions
from divebatch.lab.experiments.schema import Experiment, Method
from divebatch.lab.training.distributed import SHARDINGS
from divebatch.ranks import Ranks
from divebatch.records import RunHeader


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
    on_device: bool = True
    """False where the data does not fit: it then comes through a DataLoader with `num_workers` processes."""
    num_workers: int = 0
    checkpoint_every: int = 1
    """Epochs from one checkpoint to the next; the last epoch always has one."""
    checkpoint_steps: int | None = None
    """Steps from one checkpoint to the next within an epoch."""
    sharding: str = "ddp"
    """How several ranks train one model: "ddp", a copy on each, or "fsdp", a part on each."""
    loggers: tuple[str, ...] = ()
    """Kinds, as `divebatch.lab.loggers` knows them: where epochs are shown beside the records."""

    def __post_init__(self) -> None:
        if self.sharding not in SHARDINGS:
            raise ArgumentError(f"unknown sharding {self.sharding!r}; known: {', '.join(SHARDINGS)}")
        if self.log_exact and self.sharding == "fsdp":
            raise ArgumentError("the exact diversity needs whole gradients, which fsdp has nowhere: use sharding ddp")
        if self.experiment.training.compile and self.sharding == "fsdp":
            raise ArgumentError("norms of compiled passes are not measured on fsdp's parts: use --no-compile, or ddp")

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
    def log_folder(self) -> Path:
        """For what loggers write: the records' path without its suffix."""
        return self.records_path.with_suffix("")

    @property
    def config(self) -> dict[str, Any]:
        """All settings of this run, complete: what must be equal for a resume."""
        values = asdict(self.experiment)
        del values["methods"], values["report"], values["metric"]
        return {**values, "method": asdict(self.method), "seed": self.seed, "log_exact": self.log_exact}

    @property
    def settings_of_all_ranks(self) -> dict[str, Any]:
        """What must be equal on all ranks; devices differ, and folders may be called something else elsewhere."""
        names = ("checkpoint_every", "checkpoint_steps", "sharding")
        return {**self.config, **{name: getattr(self, name) for name in names}}

    @property
    def _ranks(self) -> dict[str, Any]:
        ranks = Ranks.here()
        return {} if ranks.is_alone else {"ranks": ranks.size, "sharding": self.sharding}

    def header(self) -> RunHeader:
        """The first line of the records."""
        return RunHeader(
            experiment=self.experiment.name,
            method=self.method_name,
            seed=self.seed,
            label=self.method.label,
            metric=self.experiment.metric,
            report=replace(self.experiment.report, order=self.experiment.report.order or list(self.experiment.methods)),
            config=self.config,
            versions=versions(),
            hardware={**hardware(torch.device(self.device)), **self._ranks},
            git_commit=git_commit(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
