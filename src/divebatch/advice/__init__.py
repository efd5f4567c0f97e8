"""Which batch size and learning rate to start with on a device, where growth stops paying, and why."""

from divebatch.advice.advise import advise
from divebatch.advice.result import Advice

__all__ = ["Advice", "advise"]
