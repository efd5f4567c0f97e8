"""A run: an experiment's method with one seed, how to run it, and where its records go."""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from divebatch.checks import require_choice
from divebatch.errors import ArgumentError
from divebatch.lab.experiments.schema import Experiment, Method
from divebatch.lab.training.distributed import SHARDINGS
from divebatch.ranks import Ranks
from divebatch.records import RunHeader

MAY_DIFFER = {"may_differ_between_ranks": True}
"""Marks a field of `Run` that each rank may have its own value of: devices, and folders with other names elsewhere."""


@dataclass(frozen=True, slots=True)
class Run:
    """An experiment's method with one seed."""

    experiment: Experiment
    method_name: str
    seed: int
    folder: Path = field(metadata=MAY_DIFFER)
    device: str = field(default="cpu", metadata=MAY_DIFFER)
    log_exact: bool = False
    data_dir: Path | None = field(default=None, metadata=MAY_DIFFER)
    on_device: bool = field(default=True, metadata=MAY_DIFFER)
    """False where the data does not fit: it then comes through a DataLoader with `num_workers` processes."""
    num_workers: int = field(default=0, metadata=MAY_DIFFER)
    checkpoint_every: int = 1
    """Epochs from one checkpoint to the next; the last epoch always has one."""
    checkpoint_steps: int | None = None
    """Steps from one checkpoint to the next within an epoch."""
    keep_epochs: tuple[int, ...] = ()
    """Epochs whose checkpoints stay, each in a file of its own, where others are replaced by later ones."""
    sharding: str = "ddp"
    """How several ranks train one model: "ddp", a copy on each, or "fsdp", a part on each."""
    loggers: tuple[str, ...] = field(default=(), metadata=MAY_DIFFER)
    """Kinds, as `divebatch.lab.loggers` knows them: where epochs are shown beside the records."""

    def __post_init__(self) -> None:
        require_choice("sharding", self.sharding, SHARDINGS)
        for epoch in self.keep_epochs:
            if not 1 <= epoch <= self.experiment.epochs:
                raise ArgumentError(f"keep_epochs={epoch}: the run has epochs 1 to {self.experiment.epochs}")
        if self.log_exact and self.sharding == "fsdp":
            raise ArgumentError("the exact diversity needs whole gradients, which fsdp has nowhere: use sharding ddp")
        if self.experiment.training.compile and self.sharding == "fsdp":
            raise ArgumentError("norms of compiled passes are not measured on fsdp's parts: use compile=False, or ddp")
        if self.num_workers and self.on_device:
            raise ArgumentError(
                f"num_workers={self.num_workers} load nothing while the data lies on the device: add on_device=False"
            )

    @property
    def method(self) -> Method:
        return self.experiment.method(self.method_name)

    @property
    def records_path(self) -> Path:
        """DIR/EXPERIMENT/METHOD/seed-K.jsonl, as the records' contract has it."""
        return self.folder / self.experiment.name / self.method_name / f"seed-{self.seed}.jsonl"

    @property
    def checkpoint_path(self) -> Path:
        """The last checkpoint, beside the records."""
        return self.records_path.with_suffix(".ckpt")

    def kept_checkpoint(self, epoch: int) -> Path:
        """The checkpoint after an epoch of `keep_epochs`."""
        return self.records_path.with_suffix(f".epoch-{epoch}.ckpt")

    @property
    def log_folder(self) -> Path:
        """The folder that loggers write to: the records' path without its suffix."""
        return self.records_path.with_suffix("")

    @property
    def config(self) -> dict[str, Any]:
        """All settings of this run, as a record holds them: what must be equal for a resume."""
        values = asdict(self.experiment)
        # How a run is shown is not how it is trained: naming another baseline must not prevent a resume.
        del values["methods"], values["report"], values["metric"]
        values |= {"method": asdict(self.method), "seed": self.seed, "log_exact": self.log_exact}
        # As it will be read back, so that the comparison at a resume is between like and like.
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain

    @property
    def settings_of_all_ranks(self) -> dict[str, Any]:
        """What must be equal on all ranks: every setting that is not marked as one that may differ."""
        names = [entry.name for entry in fields(self) if entry.metadata != MAY_DIFFER and entry.name != "experiment"]
        return {**self.config, **{name: getattr(self, name) for name in names}}

    @property
    def _ranks(self) -> dict[str, Any]:
        ranks = Ranks.here()
        return {} if ranks.is_alone else {"ranks": ranks.size, "sharding": self.sharding}

    def header(self, *, num_parameters: int | None = None) -> RunHeader:
        """The first line of the records; `num_parameters` are the model's that are trained, once it is built."""
        return RunHeader(
            experiment=self.experiment.name,
            method=self.method_name,
            seed=self.seed,
            label=self.method.label,
            metric=self.experiment.metric,
            report=replace(self.experiment.report, order=self.experiment.report.order or list(self.experiment.methods)),
            config=self.config,
            versions=_versions(),
            hardware={**_hardware(torch.device(self.device)), **self._ranks},
            num_parameters=num_parameters,
            git_commit=_git_commit(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def _versions() -> dict[str, str]:
    """The versions of everything that can change a result."""
    found = {"python": platform.python_version()}
    for package in ("divebatch", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from source
            found[package] = "source"
    return found


def _hardware(device: torch.device) -> dict[str, Any]:
    """The hardware the run is timed on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {"device": device.type, "name": name, "cpus": os.cpu_count(), "threads": torch.get_num_threads()}


def _git_commit() -> str | None:
    """The commit of this source tree, with "-dirty" where it was changed; None outside a checkout of this project."""
    package = Path(__file__).parents[2]
    # Installed into an environment that lies in somebody's repository, git would tell of theirs.
    if _git("rev-parse", "--show-toplevel") != str(package.parents[1].resolve()):
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(*words: str) -> str | None:
    """What git says of the folder of this file; None where it says nothing."""
    try:
        answer = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
