"""Saved states that belong to another run are refused: by their settings, among them the shapes of parameters."""

import reprlib
from collections.abc import Mapping
from typing import Any

from divebatch.errors import CheckpointError


def require_same(place: str, saved: Any, mine: Any) -> None:
    """Raise if a setting of a saved state is not the one of this run, naming the first place where they differ.

    Args:
        place: Where both stand, such as "control.settings".
        saved: The settings in the checkpoint.
        mine: Those of this run.
    """
    if isinstance(mine, Mapping) and isinstance(saved, Mapping):
        for name in [*mine, *(name for name in saved if name not in mine)]:
            require_same(f"{place}.{name}", saved.get(name), mine.get(name))
    elif isinstance(mine, list | tuple) and isinstance(saved, list | tuple) and len(mine) == len(saved):
        for number, (there, here) in enumerate(zip(saved, mine, strict=True)):
            require_same(f"{place}.{number}", there, here)
    else:
        are_numbers = {type(saved), type(mine)} == {int, float}  # 2 is 2.0, but True is not 1
        if not ((are_numbers or type(saved) is type(mine)) and saved == mine):
            raise CheckpointError(f"{place} is {reprlib.repr(saved)} in the checkpoint, and {mine!r} in this run")
