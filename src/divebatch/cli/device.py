"""The devices a command takes, and how it uses several."""

import torch

from divebatch.errors import ArgumentError
from divebatch.experiments import SHARDINGS


def require_device(device: str) -> None:
    """Raise for a device that is unknown or not there."""
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"unknown device {device!r}; known: cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device cuda: torch finds no GPU here; use --device cpu")


def require_sharding(name: str) -> None:
    """Raise for an unknown way to spread a model over ranks."""
    if name not in SHARDINGS:
        raise ArgumentError(f"unknown sharding {name!r}; known: {', '.join(SHARDINGS)}")
