"""The checkpoint a probe starts from, and the run it belongs to."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from divebatch.errors import ArgumentError, CheckpointError
from divebatch.lab.experiments import Experiment, Run
from divebatch.lab.experiments.schema import Part
from divebatch.lab.training import load_checkpoint
from divebatch.records import RunHeader, read_run
from divebatch.state_checks import anything, optional, read, whole

SUFFIXES = (".ckpt", ".ckpt.previous")
PROBLEM = ("task", "data", "model", "optimizer", "schedule", "one_pass", "clip_norm")
"""What of a run's configuration its experiment must share, for the checkpoint to be that experiment's."""


@dataclass(frozen=True, slots=True)
class Start:
    """A checkpoint with the first line of its run's records."""

    path: Path
    header: RunHeader
    state: dict[str, Any]

    @property
    def epoch(self) -> int:
        """The number of epochs trained before it; of a run over one pass, the number of its parts."""
        epoch: int = read(self.state, "control.epoch", whole())
        # Not the loader's epochs: one of them may have carried over several parts.
        parts: int | None = read(self.state, "parts_done", optional(whole()))
        return epoch if parts is None else parts

    @property
    def samples(self) -> int:
        """The samples that the run had seen, of all epochs."""
        before: int = read(self.state, "control.loader.samples_before", whole())
        if read(self.state, "control.loader.pass", anything) is None:
            return before
        under_way: int = read(self.state, "control.loader.pass.samples", whole(1))
        return before + under_way

    @property
    def batch_size(self) -> int:
        """The batch size in force from here on."""
        size: int = read(self.state, "control.loader.batch_size", whole(1))  # may have changed since the last record
        return size

    @property
    def first_batch_size(self) -> int:
        """The batch size that the run began with."""
        size: int = read(self.state, "control.rates.couplings.0.first_batch_size", whole(1))
        return size


def find_start(place: Path, experiment: str, *, method: str | None, seed: int | None, epoch: int | None) -> Start:
    """The one checkpoint that `place`, a file or a folder of runs, and the wishes leave.

    Of several epochs of one run it is the last, unless `epoch` says which; of several runs none, but an error.
    """
    runs = [_Candidate.at(path) for path in _checkpoints(place)]
    if not runs:
        raise ArgumentError(f"no checkpoint (seed-K.ckpt) at '{place}'; a run leaves one beside its records")
    fitting = [each for each in runs if each.header.experiment == experiment]
    if not fitting:
        others = ", ".join(sorted({each.header.experiment for each in runs}))
        raise ArgumentError(f"'{place}' holds no checkpoint of experiment {experiment!r}, but of: {others}")
    fitting = [each for each in fitting if method in (None, each.header.method) and seed in (None, each.header.seed)]
    names = sorted({each.name for each in fitting})
    if len(names) != 1:
        known = ", ".join(names or sorted({each.name for each in runs}))
        what = "several runs fit; choose by method and seed" if names else "no such run"
        raise ArgumentError(f"'{place}': {what}. There are: {known}")
    chosen: Start | None = None
    there = set()
    for start in (each.load() for each in fitting):  # one at a time: they may be large
        there.add(start.epoch)
        if epoch in (None, start.epoch) and (chosen is None or start.epoch > chosen.epoch):
            chosen = start
    if chosen is None:
        epochs = ", ".join(map(str, sorted(there)))
        raise ArgumentError(f"'{place}': no checkpoint of {names[0]} after epoch {epoch}; there are: {epochs}")
    return chosen


def run_of(start: Start, experiment: Experiment, **settings: Any) -> Run:
    """The run as it was, on another use of the device if `settings` of `Run` or of its training say so."""
    config = start.header.config
    scaled = experiment.scaled(int(config["epochs"]))
    training = {**config["training"], **{k: v for k, v in settings.pop("training", {}).items() if v is not None}}
    planned = replace(scaled, model=Part(**config["model"])).with_training(**training)
    run = Run(planned, start.header.method, start.header.seed, start.path.parent, **settings)
    for key in PROBLEM:
        here, there = run.config[key], config.get(key)
        if here != there:
            raise CheckpointError(
                f"'{start.path}' belongs to another experiment called {experiment.name!r}: its {key} is {there!r}, "
                f"here it is {here!r}. Name the TOML file that the run was started with"
            )
    return run


def _checkpoints(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return [path for suffix in SUFFIXES for path in sorted(place.rglob(f"*{suffix}"))]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A checkpoint that is not read yet: it may be large."""

    path: Path
    header: RunHeader

    @classmethod
    def at(cls, path: Path) -> Self:
        # Those that a run keeps have the epoch in their name too.
        records = path.with_name(re.sub(r"(\.epoch-\d+)?\.ckpt(\.previous)?$", "", path.name) + ".jsonl")
        if not records.exists():
            raise ArgumentError(f"'{path}' lacks the records of its run: '{records.name}' must lie beside it")
        return cls(path, read_run(records)[0])

    @property
    def name(self) -> str:
        return f"{self.header.method} seed {self.header.seed}"

    def load(self) -> Start:
        state = load_checkpoint(self.path, device=torch.device("cpu"))
        start = Start(self.path, self.header, state)
        try:
            _ = start.epoch, start.samples, start.batch_size, start.first_batch_size
            for part in ("model", "optimizer", "run.data"):
                read(state, part, anything)
            read(self.header.config, "training", anything)
        except CheckpointError as error:
            raise CheckpointError(f"'{self.path}' is not the checkpoint of a run: {error}") from error
        return start
