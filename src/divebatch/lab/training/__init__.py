"""The reference trainer, one concern a file."""

from divebatch.data.micro_batches import micro_batches
from divebatch.lab.training.checkpoint import load_checkpoint, save_checkpoint
from divebatch.lab.training.clock import Clock
from divebatch.lab.training.device_options import DeviceOptions
from divebatch.lab.training.evaluation import evaluate
from divebatch.lab.training.forward import LossFn
from divebatch.lab.training.ranks import StopRequest
from divebatch.lab.training.step import Tally, TrainStep, train_epoch
from divebatch.lab.training.task import Evaluation, Task
from divebatch.lab.training.trainer import Trainer

__all__ = [
    "Clock",
    "DeviceOptions",
    "Evaluation",
    "LossFn",
    "StopRequest",
    "Tally",
    "Task",
    "TrainStep",
    "Trainer",
    "evaluate",
    "load_checkpoint",
    "micro_batches",
    "save_checkpoint",
    "train_epoch",
]
