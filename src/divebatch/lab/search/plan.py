"""A search in full: which experiment and method, over what, judged how, and where it is kept."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from divebatch.errors import ArgumentError
from divebatch.lab.experiments import Experiment, Run, check_parts
from divebatch.lab.experiments.datasets.dataset import require_fraction
from divebatch.lab.experiments.schema import require_name
from divebatch.lab.search.space import Space, check_point, corners, paper_space, slug, with_point
from divebatch.lab.search.storage import sqlite_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every point is trained with each of the seeds; its worth is the mean final metric on the held-out part."""

    experiment: Experiment
    """The experiment to tune, at its full length; the search may be shorter."""
    method_name: str
    space: Space
    folder: Path
    epochs: int
    sampler: str = "grid"
    num_trials: int | None = None
    seed: int = 0
    num_seeds: int = 1
    held_out: float = 0.2
    study_name: str = ""
    storage: str = ""
    run_settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Run` that change no result: device, data folder and the like."""

    @property
    def name(self) -> str:
        """The study's name."""
        return self.study_name or f"{self.experiment.name}-{self.method_name}"

    @property
    def url(self) -> str:
        """The database's URL; a file in the folder by default."""
        return self.storage or sqlite_url(self.folder / f"{self.name}.db")

    @property
    def description(self) -> dict[str, Any]:
        """What must be equal for two processes to work on one study."""
        experiment = self.searched()
        return {
            "space": [str(dimension) for dimension in self.space.dimensions],
            "sampler": [self.sampler, self.num_trials],
            "seeds": [self.seed, self.num_seeds],
            "epochs": self.epochs,
            "data": asdict(experiment.data),
            "held_out": self.held_out,
            "metric": asdict(experiment.metric),
            "model": asdict(experiment.model),
            "training": asdict(experiment.training),
            "optimizer": asdict(experiment.optimizer),
            "schedule": asdict(experiment.schedule),
            "method": asdict(experiment.method(self.method_name)),
        }

    def check(self) -> None:
        """Raise before any work for what cannot be run."""
        require_fraction("held_out", self.held_out)
        require_name("study_name", self.name)
        method = self.experiment.method(self.method_name)
        check_parts(self.searched())
        for point in corners(self.space):
            try:
                check_point(method, point)
            except ArgumentError as error:
                raise ArgumentError(f"{self.method_name} with {json.dumps(point)}: {error}") from error

    def searched(self) -> Experiment:
        """The experiment that trials run: shorter, without the held-out part."""
        return replace(self.experiment.scaled(self.epochs), held_out=self.held_out)

    def runs(self, point: Mapping[str, int | float]) -> list[Run]:
        """One for each seed; their records are in FOLDER/STUDY/METHOD_SETTINGS/seed-K.jsonl."""
        experiment = self.searched()
        method = with_point(experiment.method(self.method_name), point)
        name = f"{self.method_name}_{slug(point)}"
        tried = replace(experiment, name=self.name, methods={name: method})
        seeds = range(self.seed, self.seed + self.num_seeds)
        return [Run(tried, name, seed, self.folder, **self.run_settings) for seed in seeds]

    def tuned(self, point: Mapping[str, int | float], *, apply_to: tuple[str, ...] = ()) -> Experiment:
        """The experiment at its full length, with this point in the searched method and in those of `apply_to`."""
        changed = {name: with_point(self.experiment.method(name), point) for name in (self.method_name, *apply_to)}
        methods = {**self.experiment.methods, **changed}
        return replace(self.experiment, name=f"{self.experiment.name}-tuned", methods=methods)


def make_plan(experiment: Experiment, method_name: str, folder: Path, **settings: Any) -> Plan:
    """The paper's grid and the experiment's own length where nothing else is said."""
    method = experiment.method(method_name)
    settings["space"] = settings.get("space") or paper_space(method)
    settings["epochs"] = settings.get("epochs") or experiment.epochs
    return Plan(experiment=experiment, method_name=method_name, folder=folder, **settings)
