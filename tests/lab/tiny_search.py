"""A search that takes milliseconds a trial."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from divebatch.lab import Experiment, get_experiment
from divebatch.lab.search import Search, parse_space

OVER = ("lr=0.5,2.0", "batch_size=16,32,64")


def tiny_experiment() -> Experiment:
    experiment = get_experiment("synthetic-convex").scaled(4)
    settings = {**experiment.data.settings, "num_samples": 250, "num_features": 4}
    return replace(experiment, data=replace(experiment.data, settings=settings))


def tiny_search(folder: Path, *, over: tuple[str, ...] = OVER, method: str = "sgd-small", **settings: Any) -> Search:
    settings = {"experiment": tiny_experiment(), "epochs": 3, **settings}
    return Search(method_name=method, folder=folder, space=parse_space(over), **settings)
