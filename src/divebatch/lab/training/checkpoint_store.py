"""A run's checkpoint, whoever wrote it: one process, which makes a file, or several ranks, who make a folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from divebatch.errors import CheckpointError
from divebatch.lab.training.checkpoint import load_checkpoint, newest, save_checkpoint
from divebatch.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Place = tuple[Any, ...]
"""The keys that lead to a tensor in the state."""
Layout = Callable[[Place], "DTensor | None"]
"""What the tensor at a place is sharded like; None where it is whole."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was found intact."""

    path: Path
    rest: dict[str, Any]
    """Its state; a folder's without the large tensors."""

    def state(self, device: torch.device, layout: Layout) -> dict[str, Any]:
        """All of it, with the tensors sharded that `layout` wants so. All ranks must call it."""
        if not self.path.is_dir() and not _is_distributed():
            return self.rest
        from divebatch.lab.training import sharded_checkpoint  # a second to import, which few runs need

        if self.path.is_dir():
            return sharded_checkpoint.load_sharded(self.path, device=device, layout=layout)
        return sharded_checkpoint.cut_whole(self.rest, layout)


def save_state(path: Path, state: dict[str, Any], ranks: Ranks) -> None:
    """All ranks call it, with the state that all of them have."""
    if ranks.is_alone:
        save_checkpoint(path, state)
        return
    from divebatch.lab.training.sharded_checkpoint import save_sharded

    save_sharded(path, state, ranks)


def open_newest(path: Path, *, device: torch.device, ranks: Ranks) -> Saved | None:
    """The checkpoint, or the one before it where that is damaged or gone; None where there was none yet.

    Each rank checks its part of the files, and all of them take the same.
    """
    return newest(path, lambda candidate: _opened(candidate, device, ranks), ranks)


def _opened(path: Path, device: torch.device, ranks: Ranks) -> Saved:
    """Or the first flaw that a rank found, as an error on all of them."""
    answer: Saved | CheckpointError
    try:
        answer = _opened_here(path, device, ranks)
    except CheckpointError as error:
        answer = error
    # A rank that failed alone would leave the others waiting in the next collective.
    for flaw in ranks.gather(answer if isinstance(answer, CheckpointError) else None):
        if flaw is not None:
            raise flaw
    assert isinstance(answer, Saved)
    return answer


def _opened_here(path: Path, device: torch.device, ranks: Ranks) -> Saved:
    if not path.is_dir():
        return Saved(path, load_checkpoint(path, device=device))
    from divebatch.lab.training.sharded_checkpoint import read_rest, require_intact

    require_intact(path, ranks)
    return Saved(path, read_rest(path, device))


def _is_distributed() -> bool:
    return not Ranks.here().is_alone
