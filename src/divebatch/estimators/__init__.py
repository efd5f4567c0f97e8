"""Estimators: what an epoch's gradients show, as a `Diversity`."""

from divebatch.estimators.catalog import ESTIMATORS, make_estimator
from divebatch.estimators.estimator import Estimator, Scene
from divebatch.estimators.oracle import Oracle
from divebatch.estimators.trajectory import Trajectory

__all__ = ["ESTIMATORS", "Estimator", "Oracle", "Scene", "Trajectory", "make_estimator"]
