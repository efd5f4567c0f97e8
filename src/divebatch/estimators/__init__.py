"""Estimators: what an epoch's gradients show, as a `Diversity`."""

from divebatch.estimators.across_ranks import AcrossRanks
from divebatch.estimators.catalog import ESTIMATORS, make_estimator
from divebatch.estimators.estimator import Delivery, Estimator, Scene
from divebatch.estimators.moments import Moments
from divebatch.estimators.oracle import Oracle
from divebatch.estimators.per_sample import PerSample
from divebatch.estimators.split import Split
from divebatch.estimators.trajectory import Trajectory

__all__ = [
    "ESTIMATORS",
    "AcrossRanks",
    "Delivery",
    "Estimator",
    "Moments",
    "Oracle",
    "PerSample",
    "Scene",
    "Split",
    "Trajectory",
    "make_estimator",
]
