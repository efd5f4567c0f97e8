"""Checks that all parts share, and the warning at the user's line. Each names the argument and a remedy."""

import reprlib
import sys
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, cast

from divebatch.errors import ArgumentError, CheckpointError


def require_count(name: str, value: Any, *, at_least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `at_least`; True and False do not count as integers."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ArgumentError(f"{name} must be an integer of at least {at_least}, got {name}={value!r}")


def require_positive(name: str, value: Any, *, above: float = 0) -> None:
    """Raise unless `value` is a finite number above `above`; NaN is refused too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= sys.float_info.max:
        wanted = f"above {above:g}" if above else "positive"
        raise ArgumentError(f"{name} must be {wanted} and finite, got {name}={value!r}")


FEW = 5
"""The most names that an error lists in full; of more it suggests the most similar one."""


def require_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Raise unless `value` is one of `known`."""
    if value not in known:
        raise ArgumentError(unknown(name, value, known))


def unknown(name: str, value: Any, known: Iterable[Any]) -> str:
    """Return a sentence that lists all known names, or of many the most similar one.

    >>> unknown("mode", "x", ["exact", "sketch"]), unknown("key", "dog", ["dot", "cat", "a", "b", "c", "d"])
    ("unknown mode 'x'; known: exact, sketch", "unknown key 'dog': did you mean 'dot'?")
    """
    words = [str(each) for each in known]
    near = get_close_matches(str(value), words, n=1) if len(words) > FEW else []
    there = f": did you mean {near[0]!r}?" if near else f"; known: {', '.join(words) or 'none'}"
    return f"unknown {name} {value!r}{there}"


def require_coupling_power(name: str, value: Any) -> None:
    """Raise unless `value` is a valid power of the batch size for a learning rate to follow."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:  # NaN fails too
        raise ArgumentError(
            f"{name} as a number is p in lr * (batch_size / base batch size)^p, above 0 and at most 1, got "
            f"{name}={value!r}; for a constant rate pass {name}='none'"
        )


def require_same(place: str, saved: Any, mine: Any) -> None:
    """Raise if saved settings differ from `mine`; the error names the first difference, below `place` in the state."""
    if isinstance(mine, Mapping) and isinstance(saved, Mapping):
        for name in [*mine, *(name for name in saved if name not in mine)]:
            require_same(f"{place}.{name}", saved.get(name), mine.get(name))
    elif isinstance(mine, list | tuple) and isinstance(saved, list | tuple) and len(mine) == len(saved):
        for number, (there, here) in enumerate(zip(saved, mine, strict=True)):
            require_same(f"{place}.{number}", there, here)
    else:
        are_numbers = {type(saved), type(mine)} == {int, float}  # 2 equals 2.0, but True does not equal 1
        if not ((are_numbers or type(saved) is type(mine)) and saved == mine):
            raise CheckpointError(f"{place} is {reprlib.repr(saved)} in the checkpoint, and {mine!r} in this run")


_NOT_THE_USERS = frozenset({"divebatch", "torch", "contextlib"})


def warn_user(text: str) -> None:
    """Warn at the user's own line that led here, however deep the call."""
    level, frame = 1, cast(Any, sys._getframe(1))
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level + 1)
