"""The paper's experiments: configuration, data, models, runs."""

from divebatch.lab.experiments.assembly import check_parts, make_trainer
from divebatch.lab.experiments.pool import Failure, default_jobs, execute_all
from divebatch.lab.experiments.progress import check_can_write, lengthened
from divebatch.lab.experiments.run import Run
from divebatch.lab.experiments.run_lock import locked_runs, marked_as_begun, was_begun_by_this_launch
from divebatch.lab.experiments.runner import execute
from divebatch.lab.experiments.schema import Experiment, Method, experiment_names, get_experiment, parse_experiment

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
    "locked_runs",
    "make_trainer",
    "marked_as_begun",
    "parse_experiment",
    "was_begun_by_this_launch",
]
