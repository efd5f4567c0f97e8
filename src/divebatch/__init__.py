"""Train PyTorch models with the batch size their gradients ask for."""

from divebatch.advice import Advice, advise
from divebatch.controller import Controller
from divebatch.data import AdaptiveBatchSampler, AdaptiveLoader
from divebatch.data.micro_batches import micro_batches
from divebatch.errors import DivebatchError
from divebatch.estimators import Oracle, Trajectory
from divebatch.measurement import Decision, Diversity, Measurement
from divebatch.norms import NormMeter, gradient_diversity, rule_for
from divebatch.policies import AdaBatch, Auto, DiveBatch, Fixed, Policy
from divebatch.records import EpochRecord

__version__ = "0.1.0"

__all__ = [
    "AdaptiveLoader",
    "AdaptiveBatchSampler",
    "Controller",
    "DiveBatch",
    "AdaBatch",
    "Auto",
    "Fixed",
    "Policy",
    "Trajectory",
    "Oracle",
    "NormMeter",
    "gradient_diversity",
    "micro_batches",
    "rule_for",
    "advise",
    "Advice",
    "Diversity",
    "Measurement",
    "Decision",
    "EpochRecord",
    "DivebatchError",
]
