"""The paper's experiments: configuration, data, models, runs."""

from divebatch.experiments.assembly import check_parts, make_trainer
from divebatch.experiments.catalog import experiment_names, get_experiment
from divebatch.experiments.history import check_can_write
from divebatch.experiments.pool import Failure, default_jobs, execute_all
from divebatch.experiments.run import Run
from divebatch.experiments.runner import execute
from divebatch.experiments.schema import Experiment, Method, parse_experiment

__all__ = [
    "Experiment",
    "Failure",
    "Method",
    "Run",
    "check_can_write",
    "check_parts",
    "default_jobs",
    "execute",
    "execute_all",
    "experiment_names",
    "get_experiment",
    "make_trainer",
    "parse_experiment",
]
