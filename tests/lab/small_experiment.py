"""A small run, for tests that do something to its files."""

from dataclasses import replace

from divebatch.lab import Experiment, get_experiment


def small() -> Experiment:
    """Four epochs on a hundred samples."""
    experiment = get_experiment("synthetic-nonconvex").scaled(4)
    settings = {**experiment.data.settings, "num_samples": 100, "num_features": 4}
    return replace(experiment, data=replace(experiment.data, settings=settings))
