"""The laboratory: experiment files, data, models, the reference trainer, runs that resume, search and probe."""

try:
    import fcntl  # noqa: F401  checked only here: file locks and signals follow POSIX
except ImportError as error:
    raise ImportError("divebatch.lab needs a POSIX system: Linux, macOS, or WSL on Windows") from error

from divebatch.lab.build import check_parts, make_trainer
from divebatch.lab.checkpoint import load_checkpoint, save_checkpoint
from divebatch.lab.clock import Clock
from divebatch.lab.ranks import StopRequest
from divebatch.lab.runs import Run, check_can_write, execute, lengthened
from divebatch.lab.schema import Experiment, Method, experiment_names, get_experiment, parse_experiment
from divebatch.lab.step import DeviceOptions, LossFn, Tally, TrainStep, train_epoch
from divebatch.lab.tasks import Evaluation, Task, evaluate
from divebatch.lab.trainer import Trainer
from divebatch.lab.workers import Failure, default_jobs, execute_all

__all__ = [
    "Clock",
    "DeviceOptions",
    "Evaluation",
    "Experiment",
    "Failure",
    "LossFn",
    "Method",
    "Run",
    "StopRequest",
    "Tally",
    "Task",
    "TrainStep",
    "Trainer",
    "check_can_write",
    "check_parts",
    "default_jobs",
    "evaluate",
    "execute",
    "execute_all",
    "experiment_names",
    "get_experiment",
    "lengthened",
    "load_checkpoint",
    "make_trainer",
    "parse_experiment",
    "save_checkpoint",
    "train_epoch",
]
