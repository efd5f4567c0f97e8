"""Advice on a device: the batch size and learning rate to start with, and the size at which growth stops paying."""

from divebatch.advice.advice import Advice
from divebatch.advice.measure import advise

__all__ = ["Advice", "advise"]
