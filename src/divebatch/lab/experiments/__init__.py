"""The paper's experiments: configuration, data, models, runs."""

from divebatch.lab.experiments.assembly import check_parts, make_trainer
from divebatch.lab.experiments.runs import Run, check_can_write, execute, lengthened
from divebatch.lab.experiments.schema import Experiment, Method, experiment_names, get_experiment, parse_experiment
from divebatch.lab.experiments.workers import Failure, default_jobs, execute_all

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
    "lengthened",
    "make_trainer",
    "parse_experiment",
]
