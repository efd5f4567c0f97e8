"""Where tries are made: a folder, chance, and how many there are to be."""

import random
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

_numbers = count()


@dataclass(frozen=True)
class Shop:
    """What every family gets."""

    folder: Path
    is_quick: bool = False
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def tries(self, *, quick: int, full: int) -> int:
        """How many."""
        return quick if self.is_quick else full

    def fresh(self, name: str) -> Path:
        """A folder that nobody has used yet."""
        path = self.folder / f"{next(_numbers)}-{name}"
        path.mkdir(parents=True)
        return path

    def log(self) -> Path:
        """A file for a process's output."""
        return self.folder / "logs" / f"{next(_numbers)}.txt"
