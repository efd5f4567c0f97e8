"""A finished run of milliseconds, with its checkpoint."""

from dataclasses import replace
from pathlib import Path

from divebatch.lab import Run, execute, get_experiment
from divebatch.lab.schema import Part
from divebatch.lab.search import to_toml

NAME = "tiny"


def tiny_experiment(folder: Path, *, optimizer: Part | None = None, **data: int) -> Path:
    """The path of its file; methods `sgd-small` and `divebatch` at batch 16."""
    experiment = replace(get_experiment("synthetic-convex").scaled(4), name=NAME)
    settings = {**experiment.data.settings, "num_samples": 1250, "num_features": 6, **data}
    methods = {
        name: replace(experiment.methods[name], batch_size=16, lr=0.1) for name in ("sgd-small", "divebatch", "oracle")
    }
    experiment = replace(
        experiment,
        data=replace(experiment.data, settings=settings),
        methods=methods,
        optimizer=optimizer or experiment.optimizer,
    )
    path = folder / f"{NAME}.toml"
    path.write_text(to_toml(experiment), encoding="utf-8")
    return path


def run_it(path: Path, runs: Path, *methods: str) -> None:
    for method in methods:
        execute(Run(get_experiment(str(path)), method, 0, runs))
