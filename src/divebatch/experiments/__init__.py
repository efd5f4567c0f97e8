"""The paper's experiments: configuration, data, models, runs."""

from divebatch.experiments.catalog import experiment_names, get_experiment
from divebatch.experiments.pool import Failure, default_jobs, execute_all
from divebatch.experiments.runner import Run, check_can_write, execute, make_trainer
from divebatch.experiments.schema import Experiment, Method, parse_experiment

__all__ = [
    "Experiment",
    "Failure",
    "Method",
    "Run",
    "check_can_write",
    "default_jobs",
    "execute",
    "execute_all",
    "experiment_names",
    "get_experiment",
    "make_trainer",
    "parse_experiment",
]
