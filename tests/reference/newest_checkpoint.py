"""A run's newest intact checkpoint as one state of whole tensors."""

from pathlib import Path
from typing import Any

import torch

from divebatch.lab.training.checkpoint_store import open_newest
from divebatch.ranks import Ranks

CPU = torch.device("cpu")


def load_newest(path: Path) -> dict[str, Any] | None:
    """None where there is no checkpoint yet."""
    found = open_newest(path, device=CPU, ranks=Ranks.alone())
    return None if found is None else found.state(CPU, lambda _: None)
