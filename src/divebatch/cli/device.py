"""The devices a command takes."""

import torch

from divebatch.errors import ArgumentError


def require_device(device: str) -> None:
    """Raise for a device that is unknown or not there."""
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"unknown device {device!r}; known: cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device cuda: torch finds no GPU here; use --device cpu")
