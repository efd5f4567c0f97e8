"""Checkpoints: one file of `torch.save` for any number of ranks, with the previous checkpoint in NAME.previous.

At every moment a complete checkpoint is on disk. The zip archive's checksums reveal a damaged file, and nothing in a
file is ever executed.
"""

import io
import logging
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from divebatch.errors import CheckpointError
from divebatch.lab.files import write_whole

logger = logging.getLogger(__name__)


def previous(path: Path) -> Path:
    """Return the path of the previous checkpoint."""
    return path.with_name(path.name + ".previous")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; the old checkpoint becomes the previous one."""
    content = io.BytesIO()
    torch.save(state, content)
    try:
        write_whole(path, content.getbuffer(), previous=previous(path))
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoint '{path}': {error.strerror or error}") from error


def load_checkpoint(path: Path, *, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint; raise `CheckpointError` if the file is damaged or holds more than tensors and plain data."""
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.load alone does not notice most damage.
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"checkpoint '{path}' is damaged: the checksum of its '{damaged}' does not fit")
        state = torch.load(path, map_location=device, weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint '{path}': {error.strerror or error}") from error
    except pickle.UnpicklingError as error:  # torch's message explains how to load the file anyway
        raise CheckpointError(f"'{path}' holds more than tensors and plain data; nothing in it was executed") from error
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(
            f"'{path}' is not a checkpoint, or is damaged or cut short: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"'{path}' is not a checkpoint: it holds a {type(state).__name__}")
    return state


def load_newest(path: Path, *, device: torch.device) -> tuple[Path, dict[str, Any]] | None:
    """Read the checkpoint; if it is damaged or gone, warn and read the previous one. None: there is none."""
    problems = [] if path.exists() else [f"checkpoint '{path}' is gone"]
    candidates = [each for each in (path, previous(path)) if each.exists()]
    for candidate in candidates:
        try:
            state = load_checkpoint(candidate, device=device)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems:
            logger.warning("%s; continuing from the one before it, '%s'", problems[0], candidate)
        return candidate, state
    if not candidates:
        return None
    raise CheckpointError(f"{'; '.join(problems)}. Remove the run's files to start it again.")
