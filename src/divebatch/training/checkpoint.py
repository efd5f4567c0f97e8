"""Checkpoints that are either the old one or the new one, never half of one."""

import os
from pathlib import Path
from typing import Any

import torch

from divebatch.errors import CheckpointError


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write beside, sync, then rename: a crash at any moment leaves a complete file."""
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    _sync_folder(path.parent)


def load_checkpoint(path: Path, *, device: torch.device) -> dict[str, Any]:
    """Read back tensors and plain containers; nothing in the file is executed."""
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a damaged file may fail in any way
        raise CheckpointError(f"cannot read checkpoint '{path}': {error}. Remove it to start again.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"'{path}' is not a checkpoint: it holds a {type(state).__name__}")
    return state


def _sync_folder(folder: Path) -> None:
    # The rename itself lives in the folder; os.open on one is not allowed everywhere.
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
