"""The paper's experiments: configuration, data, models, runs."""

from divebatch.lab.experiments.assembly import check_parts, make_trainer
from divebatch.lab.experiments.catalog import experiment_names, get_experiment
from divebatch.lab.experiments.elastic import begun_here, was_begun_here
from divebatch.lab.experiments.history import check_can_write
from divebatch.lab.experiments.pool import Failure, default_jobs, execute_all
from divebatch.lab.experiments.run import Run
from divebatch.lab.experiments.run_lock import in_hand
from divebatch.lab.experiments.runner import execute
from divebatch.lab.experiments.schema import Experiment, Method, parse_experiment
from divebatch.lab.training.launch import first_does, process_group, speaks_first

__all__ = [
    "Experiment",
    "Failure",
    "Method",
    "Run",
    "begun_here",
    "check_can_write",
    "check_parts",
    "default_jobs",
    "execute",
    "execute_all",
    "experiment_names",
    "first_does",
    "get_experiment",
    "in_hand",
    "make_trainer",
    "parse_experiment",
    "process_group",
    "speaks_first",
    "was_begun_here",
]
