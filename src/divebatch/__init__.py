"""Train PyTorch models with the batch size their gradients ask for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from divebatch.advice import Advice, advise
    from divebatch.controller import Controller
    from divebatch.data import AdaptiveLoader
    from divebatch.data.micro_batches import micro_batches
    from divebatch.errors import DivebatchError
    from divebatch.estimators import Oracle, Trajectory
    from divebatch.measurement import Decision, Diversity, Measurement
    from divebatch.noise_meter import NoiseMeter
    from divebatch.norms import NormMeter, gradient_diversity, rule_for
    from divebatch.policies import AdaBatch, Auto, DiveBatch, Fixed, Policy
    from divebatch.records import EpochRecord

__version__ = "0.2.0"

__all__ = [
    "AdaptiveLoader",
    "Controller",
    "DiveBatch",
    "AdaBatch",
    "Auto",
    "Fixed",
    "Policy",
    "Trajectory",
    "Oracle",
    "NormMeter",
    "NoiseMeter",
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

_HOMES = {
    "advice": ("Advice", "advise"),
    "controller": ("Controller",),
    "data": ("AdaptiveLoader",),
    "data.micro_batches": ("micro_batches",),
    "errors": ("DivebatchError",),
    "estimators": ("Oracle", "Trajectory"),
    "measurement": ("Decision", "Diversity", "Measurement"),
    "noise_meter": ("NoiseMeter",),
    "norms": ("NormMeter", "gradient_diversity", "rule_for"),
    "policies": ("AdaBatch", "Auto", "DiveBatch", "Fixed", "Policy"),
    "records": ("EpochRecord",),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command's help must not wait for torch."""
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
