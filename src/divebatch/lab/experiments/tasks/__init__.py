"""Tasks by kind. A new one is one file and one row here."""

from divebatch.lab.experiments.tasks.classification import Classification, SmoothedClassification
from divebatch.lab.experiments.tasks.next_token import NextToken
from divebatch.lab.experiments.tasks.regression import Regression
from divebatch.lab.training.task import Task

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "smoothed-classification": SmoothedClassification,
    "next-token": NextToken,
    "regression": Regression,
}

__all__ = ["TASKS", "Task"]
