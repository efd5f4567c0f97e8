"""Policies: pure rules that turn a `Measurement` into a `Decision`. This package does not import torch."""

from typing import Any

from divebatch.checks import require_choice
from divebatch.errors import ArgumentError
from divebatch.policies.auto import Auto
from divebatch.policies.by_loss import AdaDamp, Plateau
from divebatch.policies.by_noise import (
    CABS,
    GradientDamp,
    InnerProductTest,
    NoiseDoubling,
    NoiseScale,
    NormTest,
    SimiGrad,
)
from divebatch.policies.by_schedule import Seesaw, SmithSchedule
from divebatch.policies.divebatch import DiveBatch
from divebatch.policies.goodput import Goodput
from divebatch.policies.policy import Policy
from divebatch.policies.timetables import AdaBatch, Fixed, GeoDamp, PadaDamp, SampleSchedule
from divebatch.policies.wrappers import Doublings, Rounded, SpillOver, Steady, WarmUp

__all__ = [
    "CABS",
    "POLICIES",
    "AdaBatch",
    "AdaDamp",
    "Auto",
    "DiveBatch",
    "Doublings",
    "Fixed",
    "GeoDamp",
    "Goodput",
    "GradientDamp",
    "InnerProductTest",
    "NoiseDoubling",
    "NoiseScale",
    "NormTest",
    "PadaDamp",
    "Plateau",
    "Policy",
    "Rounded",
    "SampleSchedule",
    "Seesaw",
    "SimiGrad",
    "SmithSchedule",
    "SpillOver",
    "Steady",
    "WarmUp",
    "make_policy",
]

POLICIES: dict[str, type[Policy]] = {
    "fixed": Fixed,
    "adabatch": AdaBatch,
    "divebatch": DiveBatch,
    "auto": Auto,
    "noise-doubling": NoiseDoubling,
    "noise-scale": NoiseScale,
    "norm-test": NormTest,
    "inner-product-test": InnerProductTest,
    "simigrad": SimiGrad,
    "cabs": CABS,
    "smith": SmithSchedule,
    "seesaw": Seesaw,
    "adadamp": AdaDamp,
    "gradient-damp": GradientDamp,
    "padadamp": PadaDamp,
    "geodamp": GeoDamp,
    "goodput": Goodput,
    "sample-schedule": SampleSchedule,
    "plateau": Plateau,
}
"""Every policy by the name that experiment files give it."""


def make_policy(kind: str, **settings: Any) -> Policy:
    """Build a policy from its name and settings, as a configuration file gives them.

    >>> make_policy("adabatch", max_batch_size=2048)
    AdaBatch(max_batch_size=2048, factor=2, every_epochs=20, lr_decay=1.0)

    Args:
        kind: A key of `POLICIES`.
        settings: The arguments of its class.
    """
    require_choice("policy", kind, tuple(POLICIES))
    try:
        return POLICIES[kind](**settings)
    except TypeError as error:
        raise ArgumentError(f"policy {kind!r} cannot be built from {settings}: {error}") from error
