"""The reference trainer, one concern a file."""

from divebatch.training.accumulation import micro_batches
from divebatch.training.checkpoint import load_checkpoint, load_newest, save_checkpoint
from divebatch.training.clock import Clock
from divebatch.training.evaluation import Evaluation, evaluate
from divebatch.training.interrupt import StopRequest
from divebatch.training.loop import Step, Tally, train_epoch
from divebatch.training.passes import LossFn, Passes
from divebatch.training.setup import Setup
from divebatch.training.trainer import Trainer

__all__ = [
    "Clock",
    "Evaluation",
    "LossFn",
    "Passes",
    "Setup",
    "Step",
    "StopRequest",
    "Tally",
    "Trainer",
    "evaluate",
    "load_checkpoint",
    "load_newest",
    "micro_batches",
    "save_checkpoint",
    "train_epoch",
]
