"""The reference trainer, one concern a file."""

from divebatch.training.checkpoint import load_checkpoint, save_checkpoint
from divebatch.training.clock import Clock
from divebatch.training.evaluation import Evaluation, evaluate
from divebatch.training.loop import LossFn, train_epoch
from divebatch.training.trainer import Trainer

__all__ = [
    "Clock",
    "Evaluation",
    "LossFn",
    "Trainer",
    "evaluate",
    "load_checkpoint",
    "save_checkpoint",
    "train_epoch",
]
