"""The adapter's file in the Trainer's checkpoints, and which of them are complete."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from divebatch.errors import CheckpointError
from divebatch.integrations.transformers.framework import logger

STATE_FILE = "divebatch.pt"
_TRAINER_STATE = "trainer_state.json"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write the file in one go: a process that is killed meanwhile leaves none."""
    unfinished = folder / f"{STATE_FILE}.part"
    torch.save(state, unfinished)
    os.replace(unfinished, folder / STATE_FILE)


def require_complete(folder: Path) -> None:
    """Raise where nothing can be resumed exactly."""
    if not _is_complete(folder):
        raise CheckpointError(
            f"'{folder}' has no {STATE_FILE} or no whole {_TRAINER_STATE}: it was not saved by a BatchSizeTrainer, or "
            f"with save_only_model=True, or its process was killed meanwhile. train(resume_from_checkpoint=True) takes "
            f"the last complete checkpoint"
        )


def load(folder: Path, *, pass_samples: int, first_batch_size: int) -> dict[str, Any]:
    """Read the file, for a training with passes and a first batch of these sizes."""
    # A checkpoint may come from elsewhere, and a pickle can run anything.
    state: dict[str, Any] = torch.load(folder / STATE_FILE, weights_only=True)
    there, here = (state["pass_samples"], state["first_batch_size"]), (pass_samples, first_batch_size)
    if there != here:
        raise CheckpointError(
            f"'{folder}' is of a training with {there[0]} samples a pass and {there[1]} in the first batch, and here "
            f"they are {here[0]} and {here[1]}: set per_device_train_batch_size to {there[0]} over the number of "
            f"processes, and gradient_accumulation_steps={there[1] // there[0]}"
        )
    return state


def last_complete(output_dir: str) -> str | None:
    """The last checkpoint that was saved to its end; None where there is none, complete or not."""
    numbered = {int(path.name.partition("-")[2]): path for path in Path(output_dir).glob("checkpoint-[0-9]*")}
    for number in sorted(numbered, reverse=True):
        if _is_complete(numbered[number]):
            return str(numbered[number])
        logger.warning(f"'{numbered[number]}' is not complete and is left out: was its process killed meanwhile?")
    if numbered:
        raise CheckpointError(f"no checkpoint in '{output_dir}' is complete: train without resume_from_checkpoint")
    return None


def _is_complete(folder: Path) -> bool:
    """The Trainer's own state is written last."""
    try:
        json.loads((folder / _TRAINER_STATE).read_text())
    except (OSError, ValueError):
        return False
    return (folder / STATE_FILE).is_file()
