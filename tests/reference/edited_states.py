"""A saved state with one field changed: every leaf and every container of it, in every odd way."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Path = tuple[Any, ...]
GONE = object()
"""In the place of a value: the key is left out."""


@dataclass(frozen=True)
class Edit:
    """One change."""

    path: Path
    what: str
    value: Any

    @property
    def place(self) -> str:
        return ".".join(map(str, self.path))

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"

    def applied(self, state: Any) -> Any:
        """A copy of `state` with the change."""
        changed = copy.deepcopy(state)
        *way, last = self.path
        parent = changed
        for key in way:
            parent = parent[key]
        if self.value is GONE:
            del parent[last]
        else:
            parent[last] = self.value
        return changed


def edits(state: Any, path: Path = ()) -> Iterator[Edit]:
    """Every change of every field below `path`; of long lists the first and the last entry's."""
    for key, value in _entries(state):
        place = (*path, key)
        if isinstance(state, dict):
            yield Edit(place, "gone", GONE)
        for what, odd in _odd_values(value).items():
            if not _is_same(odd, value):
                yield Edit(place, what, odd)
        yield from edits(value, place)


def _entries(state: Any) -> list[tuple[Any, Any]]:
    if isinstance(state, dict):
        return list(state.items())
    if isinstance(state, list):
        return [(place, state[place]) for place in sorted({0, len(state) - 1})] if state else []
    return []


def _odd_values(value: Any) -> dict[str, Any]:
    common = {"a word": "x", "None": None, "a list": [1, 2, 3], "a table": {"x": 1}}
    if isinstance(value, dict):
        return {"a word": "x", "None": None, "a number": 3, "one more key": {**value, "x": 1}, "empty": {}}
    if isinstance(value, list | tuple):
        longer, shorter = [*value, *(value[-1:] or [1])], list(value)[:-1]
        return {"a word": "x", "None": None, "a number": 3, "one more": longer, "one less": shorter}
    if isinstance(value, Tensor):
        return {**common, "another shape": torch.zeros(7, 3), "whole numbers": value.long() if value.numel() else "x"}
    if isinstance(value, bool):
        return {**common, "a number": 7, "the other": not value}
    numbers = {"NaN": math.nan, "infinite": math.inf, "negative": -1, "huge": 10**30, "a fraction": 0.5, "true": True}
    if isinstance(value, int):
        return {**common, **numbers, "one more": value + 1, "zero": 0}
    if isinstance(value, float):
        return {**common, **numbers, "doubled": 2 * value, "zero": 0.0}
    return {**common, **numbers}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return type(one) is type(other) and one == other
