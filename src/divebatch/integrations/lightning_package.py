"""Which Lightning is here: `lightning.pytorch` and `pytorch_lightning` are different packages with the same classes."""

from importlib import import_module
from typing import Any

from divebatch.integrations.versions import Requirement

REQUIREMENT = Requirement(
    ["lightning", "pytorch-lightning"],
    extra="lightning",
    oldest="2.6.6",
    too_new="2.7",
    excluded=["2.6.2", "2.6.3"],  # these two carried malware
)
_MODULES = {"lightning": "lightning.pytorch", "pytorch-lightning": "pytorch_lightning"}
_CALLBACKS = tuple(import_module(_MODULES[package]).Callback for package in REQUIREMENT.installed())
LightningCallback: Any = type("LightningCallback", _CALLBACKS, {})
"""A callback for the trainers of all packages that are here."""
